"""`prfaas fidelity`: how far virtual time can be trusted, figure by figure."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from harness.errors import ExitCode
from harness.experiment import load_experiment, parse_override

_EXAMPLES = """\
examples:
  prfaas fidelity bench                        the main job in both modes
  prfaas fidelity bench --against runs/bench-20260422T101500Z
                                               simulate only, and compare with a run there is

Exit code 7 when a figure differs by more than its limit: throughput 3 %, TTFT mean and P90 8 %.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("experiment", help="a preset by name, or a TOML file")
    parser.add_argument("--against", metavar="RUN", type=Path, help="an emulate run there is")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("runs"))
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")


def run(options: argparse.Namespace) -> int:
    from harness.execution import execute
    from results import summary, table
    from results.fidelity import HEADER, cells, differences

    overrides = dict(parse_override(text) for text in options.overrides)
    command = shlex.join(["prfaas", *sys.argv[1:]])

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    verdict = ExitCode.OK
    if options.against is None:
        emulate = load_experiment(options.experiment, overrides | {"mode": "emulate"})
        done = execute(emulate, options.out, command, say)
        emulated, verdict = done.summary, done.exit_code
    else:
        emulated = summary.read(options.against)
    simulate = load_experiment(options.experiment, overrides | {"mode": "simulate"})
    simulated = execute(simulate, options.out, command, say).summary
    rows = differences(emulated, simulated)
    if options.json:
        print(json.dumps([asdict(row) | {"relative": row.relative} for row in rows], indent=2))
    else:
        print("\n".join(table.grid([*HEADER], [cells(row) for row in rows])))
        print(f"emulate verdict: {emulated.verdict}")
    if verdict is not ExitCode.OK:
        return verdict
    return ExitCode.OK if all(row.kept for row in rows) else ExitCode.REGRESSION
