"""`prfaas nightly`: the suite, baseline and candidate in turn, judged and added to the history."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import BadInput, ExitCode
from harness.places import make_folder

if TYPE_CHECKING:
    from harness.nightly.judge import Mark, Night
    from harness.nightly.run import Commits, PartResult
    from harness.nightly.suite import Suite
    from results.drift import DriftRules
    from results.gate import GateRules
    from results.history import Row

_EXAMPLES = """\
examples:
  prfaas nightly                                   the shipped suite, HEAD against HEAD~1
  prfaas nightly --baseline v0.1.0 --only engine   one part, against a tag
  prfaas nightly --resume                          go on with the last night that was cut off
  prfaas nightly --list                            the parts of the suite and their commands
  prfaas nightly --judge-only                      judge the last night again, run nothing

cron, every night at two:
  0 2 * * *  cd /srv/prfaas-bench && git pull -q && make bench-nightly >> nightly.log 2>&1

A known level shift is marked in nightly/marks.toml, so that it gives no alert:
  [[shift]]
  night = "20260501T020000Z"
  part = "engine"              # optional, as is metric
  why = "torch 2.14"

Exit codes: 0 no regression; 7 the gate or the drift detection found one; 4 a part failed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("--suite", type=Path, metavar="FILE", help="instead of the shipped one")
    parser.add_argument("--baseline", metavar="REVISION", help="instead of the suite's")
    parser.add_argument("--baseline-dir", type=Path, metavar="DIR",
                        help="a checkout of the baseline, instead of making one")  # fmt: skip
    parser.add_argument("--repository", type=Path, default=Path(), metavar="DIR",
                        help="the candidate's checkout (default: here)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("nightly"), metavar="DIR",
                        help="nights and history (default: nightly)")  # fmt: skip
    parser.add_argument("--only", action="append", metavar="PART", help="only this (repeatable)")
    parser.add_argument("--resume", action="store_true", help="go on with the last night")
    parser.add_argument("--judge-only", action="store_true", help="run nothing")
    parser.add_argument("--list", action="store_true", help="show the parts, run nothing")


def run(options: argparse.Namespace) -> int:
    from harness.nightly.suite import load_suite

    suite = _chosen(load_suite(options.suite), options.only)
    if options.list:
        for part in suite.part:
            print(f"{part.name}: {part.pairs} pairs of {' '.join(part.command)}")
        return ExitCode.OK
    directory = _night_directory(options)
    night = _run(options, suite, directory)
    summary = directory / "summary.md"
    print(summary.read_text(), end="")
    for name in ("summary.md", "report.html", "junit.xml"):
        print(f"wrote {directory / name}")
    if night.regressions or night.drifts:
        return ExitCode.REGRESSION
    return ExitCode.INCOMPLETE if night.failures else ExitCode.OK


def _chosen(suite: Suite, only: list[str] | None) -> Suite:
    if not only:
        return suite
    names = [part.name for part in suite.part]
    for name in only:
        if name not in names:
            raise BadInput(f"--only {name}: the suite has {', '.join(names)}")
    return suite.model_copy(update={"part": [p for p in suite.part if p.name in only]})


def _nights(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/samples.jsonl"))


def _night_directory(options: argparse.Namespace) -> Path:
    """Tonight's directory, or the last one to be resumed or judged again."""
    out: Path = options.out
    if options.resume or options.judge_only:
        nights = _nights(out)
        if options.resume:
            nights = [night for night in nights if not (night / "complete").exists()]
        if not nights:
            raise BadInput(f"{out}: no night to {'resume' if options.resume else 'judge'}")
        return nights[-1]
    directory = out / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    make_folder("--out", out)
    directory.mkdir()
    (directory / "samples.jsonl").touch()
    return directory


def _run(options: argparse.Namespace, suite: Suite, directory: Path) -> Night:
    from harness.nightly.run import SampleLog, Sides, checkout_of, run_part
    from harness.progress import Progress
    from results.gate import GateRules

    repository: Path = options.repository.resolve()
    log = SampleLog(directory / "samples.jsonl")
    results = log.load(suite)
    rules = GateRules(suite.gate.least, suite.gate.family_p, suite.gate.screen_p)
    commits = _commits(options, suite, directory, repository)
    if not options.judge_only:
        _say(f"{directory.name}: baseline {commits.base[:12]} ({commits.revision})")
        with contextlib.ExitStack() as stack:
            if options.baseline_dir is not None:
                base = options.baseline_dir.resolve()
            else:
                at = directory.resolve() / "baseline"
                base = stack.enter_context(checkout_of(repository, commits.base, at))
            sides = Sides(base, repository)
            with Progress("nightly", len(suite.part)) as progress:
                for part in suite.part:
                    run_part(results[part.name], sides, log, rules, _say)
                    progress.advance(part.name)
    return _tell(options, suite, directory, list(results.values()), commits, rules)


def _commits(
    options: argparse.Namespace, suite: Suite, directory: Path, repository: Path
) -> Commits:
    """What tonight compares: as the night began, when it is resumed or judged again."""
    from harness.nightly.run import NIGHT_FILE, Commits, commit_of, resolve

    if (directory / NIGHT_FILE).exists() or options.judge_only:
        commits = Commits.load(directory)
        candidate = commit_of(repository)
        if options.resume and candidate != commits.candidate:
            raise BadInput(
                f"{directory.name} measured {commits.candidate[:12]}, the checkout is now at "
                f"{candidate[:12]}: check that out again, or start a new night"
            )
        return commits
    if options.baseline_dir is not None:
        base, revision = commit_of(options.baseline_dir.resolve()), str(options.baseline_dir)
    else:
        revision = options.baseline or suite.baseline
        base = resolve(repository, revision)
    commits = Commits(base, commit_of(repository), revision, platform.node())
    commits.save(directory)
    return commits


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _tell(
    options: argparse.Namespace,
    suite: Suite,
    directory: Path,
    results: list[PartResult],
    commits: Commits,
    rules: GateRules,
) -> Night:
    """Judge, add to the history, and write the three forms."""
    from harness.nightly import report
    from harness.nightly.judge import conclude, load_marks
    from results import history
    from results.drift import DriftRules

    drift = DriftRules(
        before=suite.drift.before, after=suite.drift.after, least=suite.drift.least, z=suite.drift.z
    )
    marks = load_marks(options.out / "marks.toml")
    root = options.out / "history"
    past = [row for row in history.read(root) if row.night <= directory.name]
    night, rows = conclude(directory.name, results, commits, past, marks, rules, drift)
    history.append(root, rows)
    every = [row for row in past if row.night != directory.name] + rows
    (directory / "junit.xml").write_text(report.junit(night))
    moved = _moved(every, marks, drift)
    (directory / "report.html").write_text(report.page(night, every, moved))
    text = report.markdown(night)
    (directory / "summary.md").write_text(text)
    if not night.failures:
        (directory / "complete").touch()
    summary_file = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary_file:
        with Path(summary_file).open("a") as file:
            file.write(text)
    return night


def _moved(
    rows: list[Row], marks: list[Mark], rules: DriftRules
) -> dict[tuple[str, str], list[int]]:
    """Where each figure's level has moved so far, for the trends."""
    from harness.nightly.judge import levels
    from results import history
    from results.drift import shifts

    found = {}
    for key in dict.fromkeys((row.part, row.metric) for row in rows):
        values, known = levels(history.series(rows, *key), marks)
        if values and min(values) > 0:
            found[key] = [shift.began for shift in shifts(values, rules, known)]
    return found
