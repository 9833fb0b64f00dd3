"""`prfaas run`: one experiment, all its configurations, one table."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import BadInput, ExitCode
from harness.experiment import Experiment, load_experiment, parse_override

if TYPE_CHECKING:
    from harness.execution import Fleets

_EXAMPLES = """\
examples:
  prfaas run bench                              the main job: four configurations on real bytes
  prfaas run paper --mode simulate              the paper's case study, in virtual time
  prfaas run bench --trace conversation.jsonl   the same comparison on a real trace
  prfaas run bench --set link.rate_gbps=10      any field of the experiment, by dotted name
  prfaas run bench --set configurations.prfaas.threshold_tokens=30000
  prfaas run my-experiment.toml --dry-run       check a file and show what would run
  prfaas run bench --fleet ray --address auto --certs certs   workers on a Ray cluster's hosts
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("experiment", help="a preset by name, or a TOML file")
    parser.add_argument("--mode", choices=("simulate", "emulate"), help="instead of the file's")
    parser.add_argument("--trace", metavar="FILE", help="take the requests from this trace")
    parser.add_argument("--seed", type=int, help="instead of the file's")
    parser.add_argument("--name", help="name of the run directory, instead of the file's")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="run only this configuration (repeatable)"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="set a field of the experiment (repeatable)",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=Path("runs"), help="default: runs"
    )
    parser.add_argument(
        "--fleet",
        choices=("local", "ray"),
        default="local",
        help="emulate: workers on this host, or on the hosts of a Ray cluster (docs/scale-out.md)",
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="with --fleet ray: the cluster (default: this machine)"
    )
    parser.add_argument(
        "--certs", metavar="DIR", type=Path, help="with --fleet ray: identities of `prfaas certs`"
    )
    parser.add_argument(
        "--allow-plain", action="store_true", help="with --fleet ray: no TLS, on a trusted network"
    )
    parser.add_argument("--json", action="store_true", help="print summary.json, no table")
    parser.add_argument("--dry-run", action="store_true", help="resolve and print, run nothing")


def run(options: argparse.Namespace) -> int:
    experiment = resolve(options)
    from harness.execution import execute, plan_run, to_toml

    if options.dry_run:
        plan = plan_run(experiment)
        from results import rundir

        rundir.check(options.out, experiment.name)
        if options.json:
            print(experiment.model_dump_json(indent=2))
        else:
            sys.stdout.write(to_toml(experiment))
            for each in plan:
                for phase in each.phases:
                    rate = f"{phase.request_rate:.2f} req/s for {phase.duration_s:.0f} s"
                    print(f"# {each.configuration.name}: {phase.name} at {rate}")
        return ExitCode.OK
    command = shlex.join(["prfaas", *sys.argv[1:]])
    from harness.dashboard import Dashboard
    from harness.screen import Screen

    fleets = fleets_of(options, experiment)
    with Screen() as screen:
        watch = Dashboard(screen) if screen.terminal else None
        done = execute(experiment, options.out, command, screen.say, fleets, watch)
    from results import summary, table

    if options.json:
        sys.stdout.write(summary.to_json(done.summary))
    else:
        table.show(done.summary)
        print(f"command   {command}")
        print(f"duration  {done.summary.duration_s:.0f} s")
        for path in sorted(done.directory.iterdir()):
            print(f"wrote     {path}")
    return done.exit_code


def fleets_of(options: argparse.Namespace, experiment: Experiment) -> Fleets | None:
    """Where workers stand, if not on this host. Raises BadInput."""
    if options.fleet == "local":
        for flag in ("address", "certs", "allow_plain"):
            if getattr(options, flag):
                raise BadInput(f"--{flag.replace('_', '-')} needs --fleet ray")
        return None
    if experiment.mode != "emulate":
        raise BadInput(f"--fleet ray runs real workers: mode {experiment.mode!r} has none")
    from harness.fleets.ray import RayFleets, RayOptions

    chosen = RayOptions(options.address, options.certs, options.allow_plain)
    chosen.check()
    return lambda experiment, directory: RayFleets(experiment, directory, chosen)


def resolve(options: argparse.Namespace) -> Experiment:
    """The experiment of the command line. Raises BadInput."""
    overrides: dict[str, Any] = dict(parse_override(text) for text in options.overrides)
    for key in ("mode", "seed", "name"):
        if getattr(options, key) is not None:
            overrides[key] = getattr(options, key)
    if options.trace is not None:
        if not Path(options.trace).is_file():
            found = "not a file" if Path(options.trace).exists() else "no such file"
            raise BadInput(f"--trace {options.trace}: {found}")
        overrides["workload"] = {"kind": "trace", "path": options.trace}
    experiment = load_experiment(options.experiment, overrides)
    if options.only:
        known = {each.name for each in experiment.configurations}
        for name in options.only:
            if name not in known:
                raise BadInput(f"--only {name}: there are {', '.join(sorted(known))}")
        kept = tuple(each for each in experiment.configurations if each.name in options.only)
        experiment = experiment.model_copy(update={"configurations": kept})
    return experiment
