"""`prfaas noise`: what repeats of one version on this machine differ by."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from harness.errors import BadInput, ExitCode, Incomplete

_EXAMPLES = """\
examples:
  prfaas noise repeats/                               from runs that are there
  prfaas noise repeats/ --run bench --repeats 5       make five runs of preset bench there first
  prfaas noise repeats/ --run paper --repeats 5 -- --mode simulate --only prfaas

The last column is the least change that so many runs a side find nine times in ten.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("runs_dir", type=Path, metavar="DIR", help="directory of repeats")
    parser.add_argument("--run", metavar="EXPERIMENT", dest="experiment",
                        help="make the repeats first")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="how many to make (default: 5)")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("rest", nargs="*", metavar="-- OPTIONS", help="passed on to prfaas run")


def run(options: argparse.Namespace) -> int:
    from results.compare import load_side
    from results.noise import floors
    from results.table import grid, number

    if options.experiment:
        if options.repeats < 1:
            raise BadInput(f"--repeats {options.repeats}: at least 1")
        _make(options)
    found = floors(load_side([options.runs_dir]))
    if options.json:
        rows = [
            {
                "figure": "/".join(key),
                "mean": floor.mean,
                "variation": floor.variation,
                "spread": floor.spread,
                "detectable": floor.detectable,
                "repeats": floor.repeats,
            }
            for key, floor in found.items()
        ]
        print(json.dumps(rows, indent=2))
        return ExitCode.OK
    lines = [
        [
            " ".join(part for part in key if part),
            number(floor.mean, 4),
            f"{floor.variation * 100:.2f} %",
            f"{floor.spread * 100:.2f} %",
            f"{floor.detectable * 100:.2f} %",
        ]
        for key, floor in found.items()
    ]
    repeats = next(iter(found.values())).repeats if found else 0
    header = ["figure", "mean", "sd / mean", "max / min - 1", f"found by {repeats} a side"]
    print("\n".join(grid(header, lines)))
    return ExitCode.OK


def _make(options: argparse.Namespace) -> None:
    from harness.progress import Progress

    with Progress("repeats", options.repeats) as progress:
        for number in range(options.repeats):
            command = [
                sys.executable, "-m", "harness", "run", options.experiment,
                "--out", str(options.runs_dir), *options.rest,
            ]  # fmt: skip
            done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
            if done.returncode != 0:
                raise Incomplete(f"repeat {number + 1} ended with exit code {done.returncode}")
            progress.advance()
