"""`prfaas fidelity`: how far virtual time can be trusted, figure by figure."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import BadInput, ExitCode, Incomplete
from harness.experiment import Experiment, load_experiment, parse_override
from results.rundir import RunDir, diff, listed

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
    parser.add_argument("--against", metavar="RUN", type=Path, help="an emulate run of it")
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
    simulate = load_experiment(options.experiment, overrides | {"mode": "simulate"})
    if options.against is None:
        emulate = load_experiment(options.experiment, overrides | {"mode": "emulate"})
        done = execute(emulate, options.out, command, say)
        emulated, verdict = done.summary, done.exit_code
    else:
        emulated = summary.read(options.against)
        _check_comparable(options.against, emulated.mode, simulate)
    simulated = execute(simulate, options.out, command, say).summary
    rows = differences(emulated, simulated)
    if not rows:
        raise Incomplete("the runs have no figure in common: was one of them interrupted?")
    if options.json:
        print(json.dumps([asdict(row) | {"relative": row.relative} for row in rows], indent=2))
    else:
        print("\n".join(table.grid([*HEADER], [cells(row) for row in rows])))
        print(f"emulate verdict: {emulated.verdict}")
    if verdict is not ExitCode.OK:
        return verdict
    return ExitCode.OK if all(row.kept for row in rows) else ExitCode.REGRESSION


def _check_comparable(run: Path, mode: str, experiment: Experiment) -> None:
    """Raises BadInput unless the run at `run` is of this experiment, on real processes."""
    wanted = f"an emulate run of {experiment.name!r} would do"
    if mode != "emulate":
        name = RunDir(run).identity().name
        raise BadInput(f"--against {run}: is a {mode} run of {name!r}; {wanted}")
    theirs = load_experiment(str(run / "experiment.toml"))
    names = {each.name for each in theirs.configurations}
    differing = diff(_compared(theirs, names), _compared(experiment, names))
    if differing:
        shown = listed([f"{key} {left!r}, not {right!r}" for key, left, right in differing], 3)
        raise BadInput(
            f"--against {run}: is an emulate run of {theirs.name!r} with other settings than "
            f"these of {experiment.name!r}: {shown}; {wanted}, or the same --set"
        )


def _compared(experiment: Experiment, names: set[str]) -> dict[str, Any]:
    """What the figures of the configurations called `names` depend on in both modes. Another seed
    draws other requests of the same kind."""
    content = experiment.model_dump(mode="json", exclude={"name", "seed", "mode", "emulate"})
    rows = {row["name"]: row for row in content["configurations"]}
    return content | {"configurations": {name: rows.get(name) for name in sorted(names)}}
