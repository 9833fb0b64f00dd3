"""Compares two versions by repeats of their runs: effects, verdicts, and a sentence for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from results import rundir, summary
from results.figures import METRICS, Better, Figure, figures
from results.statistics import Effect, effect

Key = tuple[str, str, str]

#: p below which a rank test counts; with the interval and the least effect beside it.
ALPHA = 0.05


class CompareError(ValueError):
    """What is to be compared is not there, or has nothing in common."""

    exit_code = 2


class Verdict(StrEnum):
    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    CHANGED = "changed"
    SAME = "no difference"
    SMALL = "too small to matter"
    UNDECIDED = "too few runs to tell"


@dataclass(frozen=True, slots=True)
class Side:
    """Repeats of one version: `values` holds one value a run for each figure.

    `seeds` are those of runs in virtual time, empty otherwise; two sides with equal ones are
    compared exactly. `settings` are the flattened ones of each run, without name and seed; empty
    where they cannot be read. `faults` say which runs are not to be trusted, and why.
    """

    label: str
    values: Mapping[Key, tuple[float, ...]]
    runs: int
    seeds: tuple[int, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One figure compared."""

    key: Key
    base: float
    candidate: float
    effect: Effect
    verdict: Verdict
    better: Better
    unit: str


@dataclass(frozen=True, slots=True)
class Limit:
    """`--fail-on`: a regression of `metric` by more than `share` fails. Empty names match all."""

    metric: str
    share: float
    configuration: str = ""
    phase: str = ""

    def __str__(self) -> str:
        names = [name for name in (self.configuration, self.phase, self.metric) if name]
        return f"'{'/'.join(names)}:{self.share * 100:g}%'"

    def matches(self, key: Key) -> bool:
        configuration, phase, metric = key
        return (
            metric == self.metric
            and self.configuration in ("", configuration)
            and self.phase in ("", phase)
        )


def parse_limit(text: str) -> Limit:
    """`ttft_p90:5%`, or `prfaas/latency/ttft_p90:5%`. Raises CompareError."""
    place, colon, amount = text.rpartition(":")
    parts = place.split("/")
    if not colon or len(parts) not in (1, 2, 3):
        raise CompareError(f"--fail-on {text!r}: write metric:percent, e.g. 'ttft_p90:5%'")
    *where, metric = parts
    if metric not in METRICS:
        raise CompareError(
            f"--fail-on {text!r}: no metric {metric!r}; there are {', '.join(METRICS)}"
        )
    if METRICS[metric][1] is Better.NEITHER:
        raise CompareError(f"--fail-on {text!r}: neither direction of {metric} is a regression")
    try:
        share = float(amount.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 10 or not amount.endswith("%"):
        raise CompareError(f"--fail-on {text!r}: {amount!r} is no percentage; write e.g. 5%")
    configuration, phase = [*where, "", ""][:2]
    return Limit(metric, share, configuration, phase)


def runs_at(paths: Sequence[Path]) -> list[Path]:
    """Run directories at `paths`; a directory of runs stands for all runs in it."""
    found: list[Path] = []
    for path in paths:
        if rundir.is_run(path) or (path / "summary.json").exists():
            found.append(path)
        else:
            found += [info.path for info in rundir.list_runs(path)]
    if not found:
        absent = ", ".join(str(path) for path in paths if not path.exists())
        raise CompareError(
            f"{absent}: no such directory; name a run's, or one of repeats"
            if absent
            else f"{', '.join(map(str, paths))}: no run here (a run has a run.json)"
        )
    return found


def load_side(paths: Sequence[Path], label: str = "") -> Side:
    """The repeats at `paths`. A figure counts when every run has it. Raises CompareError,
    SummaryError.
    """
    runs = runs_at(paths)
    collected: dict[Key, list[float]] = {}
    seeds: list[int] = []
    faults: list[str] = []
    for path in runs:
        read = summary.read(path)
        if read.verdict != "ok":
            faults.append(f"{path.name}: {read.verdict}")
        for figure in figures(read):
            collected.setdefault(figure.key, []).append(figure.value)
        if read.mode == "simulate" and read.seed is not None:
            seeds.append(read.seed)
    kept = {key: tuple(values) for key, values in collected.items() if len(values) == len(runs)}
    name = label or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    settings = tuple(rundir.settings(path) for path in runs)
    kept_seeds = tuple(seeds) if len(seeds) == len(runs) else ()
    return Side(name, kept, len(runs), kept_seeds, settings, tuple(faults))


def notices(base: Side, candidate: Side) -> list[str]:
    """What the runs were asked to do differently, within a side and between the two, in lines. Such
    runs can be compared, but the difference may be the setting's and not the version's.
    """
    said = []
    for side in (base, candidate):
        said += [f"warning: {fault}" for fault in side.faults]
        if not all(side.settings):
            said.append(f"note: what {side.label} was asked to do cannot be read")
            continue
        keys = rundir.differing(side.settings)
        if keys:
            said.append(
                f"note: the runs of {side.label} are no repeats of one experiment; they differ in "
                f"{rundir.listed(keys)}"
            )
    if base.settings and candidate.settings and all((*base.settings, *candidate.settings)):
        before, after = base.settings[0], candidate.settings[0]
        changes = [
            f"{key} {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
            for key in rundir.differing((before, after))
        ]
        if changes:
            said.append(f"note: the experiments differ in {rundir.listed(changes)}")
    return said


def judge(found: Effect, better: Better, least: float) -> Verdict:
    """Significant and at least `least` large: regression, improvement or changed."""
    if found.exact:
        significant = found.change != 0.0
    elif found.low is None or found.high is None:
        return Verdict.UNDECIDED
    else:
        excludes_one = not found.low <= 1.0 <= found.high
        if found.p is None:
            return Verdict.UNDECIDED if excludes_one else Verdict.SAME
        significant = excludes_one and found.p < ALPHA
    if not significant:
        return Verdict.SAME
    if abs(found.change) < least:
        return Verdict.SMALL
    if better is Better.NEITHER:
        return Verdict.CHANGED
    worse = found.change > 0 if better is Better.LOWER else found.change < 0
    return Verdict.REGRESSION if worse else Verdict.IMPROVEMENT


def compare(base: Side, candidate: Side, least: float = 0.02) -> list[Line]:
    """Every figure that both sides have. `least` is the relative change that matters."""
    exact = bool(base.seeds) and sorted(base.seeds) == sorted(candidate.seeds)
    lines = []
    for key, before in base.values.items():
        after = candidate.values.get(key)
        if after is None:
            continue
        found = effect(before, after, exact=exact)
        if found is None:
            continue
        figure = Figure(*key, value=0.0)
        verdict = judge(found, figure.better, least)
        means = sum(before) / len(before), sum(after) / len(after)
        lines.append(Line(key, *means, found, verdict, figure.better, figure.unit))
    if not lines:
        raise CompareError(
            f"{base.label} and {candidate.label} have no figure in common: other configurations?"
        )
    return lines


def failures(lines: Sequence[Line], limits: Sequence[Limit]) -> list[Line]:
    """Lines that are significant regressions by more than a limit that names them."""
    failed = []
    for line in lines:
        for limit in limits:
            verdict = judge(line.effect, line.better, limit.share)
            if limit.matches(line.key) and verdict is Verdict.REGRESSION:
                failed.append(line)
                break
    return failed


def unjudged(lines: Sequence[Line], limits: Sequence[Limit]) -> list[str]:
    """Of each limit that nothing could break: why, in a line. Raises CompareError for one that
    names no figure, which is a mistake.
    """
    said = []
    for limit in limits:
        named = [line for line in lines if limit.matches(line.key)]
        if not named:
            places = dict.fromkeys("/".join(filter(None, line.key[:2])) for line in lines)
            raise CompareError(
                f"--fail-on {limit}: no such figure in both; they have figures of "
                f"{', '.join(places)}"
            )
        if all(line.verdict is Verdict.UNDECIDED for line in named):
            said.append(f"--fail-on {limit}: not judged, too few runs to tell (five a side do)")
    return said


def _percent(share: float) -> str:
    return f"{share * 100:+.2f} %"


def evidence(found: Effect) -> str:
    """What supports the change, in words."""
    if found.exact:
        return "equal seeds in virtual time, compared exactly"
    runs = f"{found.n_base} against {found.n_candidate} runs"
    if found.low is None or found.high is None:
        return f"{runs}: no interval"
    text = f"95 % interval {_percent(found.low - 1)} to {_percent(found.high - 1)}"
    if found.p is not None:
        text += f", Mann-Whitney p = {found.p:.3g}"
    return f"{text}, {runs}"


def sentence(line: Line) -> str:
    """One sentence on one figure."""
    configuration, phase, metric = line.key
    name = " ".join(part for part in (configuration, phase, metric) if part)
    values = f"{line.base:.4g} -> {line.candidate:.4g} {line.unit}".rstrip()
    changed = _percent(line.effect.change)
    says = {
        Verdict.REGRESSION: f"is worse by {changed}",
        Verdict.IMPROVEMENT: f"is better by {changed}",
        Verdict.CHANGED: f"changed by {changed}",
        Verdict.SAME: f"shows no difference ({changed})",
        Verdict.SMALL: f"changed by {changed}, too little to matter",
        Verdict.UNDECIDED: f"reads {changed}, but too few runs to tell (five a side do)",
    }[line.verdict]
    return f"{name} {says}: {values}; {evidence(line.effect)}."
