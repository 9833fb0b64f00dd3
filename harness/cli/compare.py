"""`prfaas compare`: two runs, or two groups of repeats, with statistics."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.numbers import finite
from harness.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from results.compare import Line

_EXAMPLES = """\
examples:
  prfaas compare runs/bench-A runs/bench-B
  prfaas compare repeats-of-v1/ repeats-of-v2/           directories with five or more runs each
  prfaas compare v1/ v2/ --fail-on 'ttft_p90:5%' --fail-on 'prfaas/latency/goodput:2%'

Runs are resampled, not requests, so intervals need at least two runs a side and a verdict five
(four at the least). Runs in virtual time with equal seeds are compared exactly: one each is enough.
Exit code 7: a regression named by --fail-on that is both significant and larger than its limit.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("base", type=Path, help="a run, or a directory of repeats")
    parser.add_argument("candidate", type=Path, help="a run, or a directory of repeats")
    parser.add_argument(
        "--fail-on",
        metavar="METRIC:PERCENT",
        action="append",
        default=[],
        help="exit 7 on a significant regression larger than this (repeatable)",
    )
    parser.add_argument(
        "--min-effect",
        type=finite(0),
        default=2.0,
        metavar="PERCENT",
        help="changes below this do not matter (default: 2)",
    )
    parser.add_argument("--metric", action="append", help="only this metric (repeatable)")
    parser.add_argument("--all", action="store_true", help="also figures without a difference")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    from results.compare import (
        Verdict,
        compare,
        failures,
        load_side,
        notices,
        parse_limit,
        sentence,
        unjudged,
    )
    from results.figures import METRICS

    limits = [parse_limit(text) for text in options.fail_on]
    for name in options.metric or ():
        if name not in METRICS:
            raise BadInput(f"--metric {name}: there are {', '.join(METRICS)}")
    base, candidate = load_side([options.base]), load_side([options.candidate])
    for notice in notices(base, candidate):
        print(notice, file=sys.stderr)
    lines = compare(base, candidate, options.min_effect / 100)
    for notice in unjudged(lines, limits):
        print(f"warning: {notice}", file=sys.stderr)
    if options.metric:
        lines = [line for line in lines if line.key[2] in options.metric]
    failed = failures(lines, limits)
    if options.json:
        print(json.dumps([_as_json(line, line in failed) for line in lines], indent=2))
        return ExitCode.REGRESSION if failed else ExitCode.OK
    quiet = (Verdict.SAME, Verdict.SMALL)
    shown = [line for line in lines if options.all or line.verdict not in quiet]
    _print_table(shown or lines[:0], base.label, candidate.label)
    for line in shown:
        if line.verdict is not Verdict.UNDECIDED:
            print(sentence(line))
    undecided = sum(line.verdict is Verdict.UNDECIDED for line in shown)
    if undecided:
        print(f"{undecided} of {len(lines)} figures: too few runs to tell (five a side do)")
    hidden = len(lines) - len(shown)
    if hidden:
        print(f"{hidden} of {len(lines)} figures show no difference that matters (--all)")
    for line in failed:
        print(f"FAILED {'/'.join(part for part in line.key if part)}: "
              f"{line.effect.change * 100:+.2f} %")  # fmt: skip
    return ExitCode.REGRESSION if failed else ExitCode.OK


def _print_table(lines: list[Line], base: str, candidate: str) -> None:
    from results.table import grid, number

    if not lines:
        return
    rows = []
    for line in lines:
        found = line.effect
        between = "" if found.low is None or found.high is None else (
            f"{found.low:.3f}..{found.high:.3f}"
        )  # fmt: skip
        rows.append(
            [
                " ".join(part for part in line.key if part),
                number(line.base, 4),
                number(line.candidate, 4),
                f"{found.ratio:.4f}",
                between,
                "" if found.p is None else f"{found.p:.3g}",
                line.verdict.value,
            ]
        )
    header = ["figure", base, candidate, "ratio", "95 % interval", "p", "verdict"]
    print("\n".join(grid(header, rows)))
    print()


def _as_json(line: Line, failed: bool) -> dict[str, object]:
    configuration, phase, metric = line.key
    return {
        "configuration": configuration,
        "phase": phase,
        "metric": metric,
        "unit": line.unit,
        "base": line.base,
        "candidate": line.candidate,
        "ratio": line.effect.ratio,
        "low": line.effect.low,
        "high": line.effect.high,
        "p": line.effect.p,
        "exact": line.effect.exact,
        "verdict": line.verdict.value,
        "failed": failed,
    }
