"""Runs a suite's parts in the baseline's and the candidate's checkout, in turn, resumably."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.host import native
from harness.nightly.suite import PartSpec, Suite, pick
from results import summary
from results.figures import METRICS, Better, figures
from results.gate import GateRules, log_ratios, screen

BASE, CANDIDATE = "base", "candidate"
CPU = "cpu_s"

#: In a night's directory: what it compares.
NIGHT_FILE = "night.json"

Say = Callable[[str], None]


class PartFailed(Exception):
    """A command of a part failed, ran out of time, or printed something else than its figures."""


@dataclass(frozen=True, slots=True)
class Commits:
    """What a night compares. `revision` is how the baseline was asked for."""

    base: str
    candidate: str
    revision: str
    host: str

    def save(self, directory: Path) -> None:
        (directory / NIGHT_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Commits:
        """Raises BadInput."""
        try:
            return cls(**json.loads((directory / NIGHT_FILE).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(f"{directory / NIGHT_FILE}: {error}; start a new night") from error


@dataclass(frozen=True, slots=True)
class Sides:
    """The two checkouts."""

    base: Path
    candidate: Path

    def of(self, side: str) -> Path:
        return self.base if side == BASE else self.candidate


@dataclass(slots=True)
class PartResult:
    """Samples by side, a dict of figures each; `failure` says why a part ended early."""

    spec: PartSpec
    samples: dict[str, list[dict[str, float]]] = field(
        default_factory=lambda: {BASE: [], CANDIDATE: []}
    )
    failure: str = ""

    @property
    def pairs(self) -> int:
        return min(len(self.samples[BASE]), len(self.samples[CANDIDATE]))

    def metrics(self) -> list[str]:
        """Figures that every sample of both sides has, in order."""
        every = self.samples[BASE][: self.pairs] + self.samples[CANDIDATE][: self.pairs]
        if not every:
            return []
        return [name for name in every[0] if all(name in each for each in every)]

    def values(self, side: str, metric: str) -> list[float]:
        return [each[metric] for each in self.samples[side][: self.pairs]]

    def better(self, metric: str) -> Better:
        """Which direction is good, as the suite or the figure's name says."""
        if metric in self.spec.figures:
            return self.spec.figures[metric].better
        name = metric.rsplit("/", 1)[-1]
        return METRICS[name][1] if name in METRICS else Better.LOWER

    def unit(self, metric: str) -> str:
        if metric in self.spec.figures:
            return self.spec.figures[metric].unit
        name = metric.rsplit("/", 1)[-1]
        return "s" if metric == CPU else METRICS[name][0] if name in METRICS else ""

    def ratios(self, metric: str) -> list[float]:
        """Log ratios of the pairs, positive when the candidate is worse; none where one is 0."""
        base, candidate = self.values(BASE, metric), self.values(CANDIDATE, metric)
        if min((*base, *candidate), default=0.0) <= 0:
            return []
        return log_ratios(base, candidate, self.better(metric))


class SampleLog:
    """samples.jsonl: every sample as it is taken, so that a night can be resumed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, suite: Suite) -> dict[str, PartResult]:
        """What is there already. A torn last line is left out."""
        found = {part.name: PartResult(part) for part in suite.part}
        if not self._path.exists():
            return found
        for line in self._path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["part"] in found:
                found[row["part"]].samples[row["side"]].append(row["figures"])
        return found

    def add(self, part: str, side: str, taken: dict[str, float]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"part": part, "side": side, "figures": taken}) + "\n")
            file.flush()
            os.fsync(file.fileno())


def take_sample(part: PartSpec, checkout: Path) -> dict[str, float]:
    """Run the part's command once in `checkout`. Raises PartFailed."""
    scratch = tempfile.mkdtemp(prefix="prfaas-nightly-")
    command = [
        word.replace("{python}", sys.executable).replace("{scratch}", scratch)
        for word in part.command
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        output = _output(command, checkout, part.timeout_s)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = _figures(part, output)
    if part.timed:
        taken[CPU] = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return taken


def _output(command: list[str], checkout: Path, timeout_s: float) -> str:
    # The checkout's own packages come first, whatever is installed.
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    try:
        process = subprocess.Popen(
            command,
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise PartFailed(f"{command[0]}: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise PartFailed(f"not done after {timeout_s:.0f} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        raise PartFailed(f"exit code {process.returncode}: {_reason(output, errors)}")
    return output


def _reason(output: str, errors: str) -> str:
    """Why a command failed: the verdict of a run that is not to be trusted, or its last words."""
    with contextlib.suppress(ValueError, summary.SummaryError):
        return summary.from_json(output, "the command's output").verdict
    return (errors.strip().splitlines() or ["nothing on standard error"])[-1]


def _figures(part: PartSpec, output: str) -> dict[str, float]:
    if part.reads == "none":
        return {}
    try:
        if part.reads == "json":
            data: Any = json.loads(output)
            return {name: pick(data, spec.path) for name, spec in part.figures.items()}
        found = figures(summary.from_json(output, "the command's output"))
    except json.JSONDecodeError as error:
        raise PartFailed(f"its output is no JSON: {error}") from error
    except (KeyError, summary.SummaryError) as error:
        raise PartFailed(str(error.args[0])) from error
    return {
        "/".join(step for step in figure.key if step): figure.value
        for figure in found
        if not part.only or figure.metric in part.only
    }


def run_part(result: PartResult, sides: Sides, log: SampleLog, rules: GateRules, say: Say) -> None:
    """Take the pairs that are missing; more where something looks worse. Fills in `result`."""
    part = result.spec
    try:
        _take_pairs(result, part.pairs, sides, log, say)
        if part.gate and not part.exact and part.confirm_pairs:
            suspects = [name for name in result.metrics() if screen(result.ratios(name), rules)]
            if suspects:
                say(f"{part.name}: {', '.join(suspects)} may be worse; more pairs")
                _take_pairs(result, part.pairs + part.confirm_pairs, sides, log, say)
    except PartFailed as error:
        result.failure = str(error)
        say(f"{part.name} FAILED: {error}")


def _take_pairs(result: PartResult, wanted: int, sides: Sides, log: SampleLog, say: Say) -> None:
    part = result.spec
    for pair in range(result.pairs, wanted):
        # Alternating order, so that neither side is always the one that runs on a warmer machine.
        order = (BASE, CANDIDATE) if pair % 2 == 0 else (CANDIDATE, BASE)
        for side in order:
            if len(result.samples[side]) > pair:
                continue
            try:
                taken = take_sample(part, sides.of(side))
            except PartFailed as error:
                raise PartFailed(f"{side}, pair {pair + 1}: {error}") from error
            result.samples[side].append(taken)
            log.add(part.name, side, taken)
        say(f"{part.name}: pair {pair + 1} of {wanted}")


def resolve(repository: Path, revision: str) -> str:
    """The commit of `revision`. Raises BadInput."""
    try:
        return git(repository, "rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}")
    except BadInput as error:
        raise BadInput(
            f"{repository} has no commit {revision!r} to compare with; name another with "
            "--baseline, or fetch the history if the clone is shallow"
        ) from error


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, with a + when tracked files differ from it. Raises BadInput."""
    changed = git(checkout, "status", "--porcelain", "--untracked-files=no")
    return git(checkout, "rev-parse", "HEAD") + ("+" if changed else "")


@contextlib.contextmanager
def checkout_of(repository: Path, commit: str, at: Path) -> Iterator[Path]:
    """A git worktree of `commit` at `at`, removed at the end."""
    git(repository, "worktree", "prune")
    if at.exists():
        git(repository, "worktree", "remove", "--force", str(at))
    git(repository, "worktree", "add", "--detach", str(at), commit)
    try:
        _build(at)
        yield at
    finally:
        git(repository, "worktree", "remove", "--force", str(at))


def _build(checkout: Path) -> None:
    """Builds its modules in C where the candidate has its own: a checkout has none, and would be
    slower for that alone. Raises BadInput.
    """
    if native() == "none" or not (checkout / "setup.py").exists():
        return
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise BadInput(
            f"the baseline's modules in C could not be built: {last}; PRFAAS_PURE_PYTHON=1 compares"
            " without any"
        )


def git(repository: Path, *arguments: str) -> str:
    """Standard output of one git command. Raises BadInput with git's own last line."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BadInput(f"git: {error.strerror}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise BadInput(f"git {arguments[0]}: {last}")
    return done.stdout.strip()
