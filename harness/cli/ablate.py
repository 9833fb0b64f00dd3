"""`prfaas ablate`: what each part of PrfaaS is worth, rung by rung."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from harness.errors import BadInput

_EXAMPLES = """\
examples:
  prfaas ablate paper                          one hour a phase, in virtual time
  prfaas ablate paper --rate 2.8               all rungs at a rate that only some can take
  prfaas ablate bench --rung balanced --rung threshold --rung priced
                                               three rungs on real bytes, a minute and a half each
  prfaas ablate mooncake --rung threshold --rung short-term --rung prefixes --rung queues

Each rung is a configuration of the experiment; the run directory is that of `prfaas run`. The
change in brackets is to the rung above. Capacity is the throughput under overload; TTFT is at a
rate that is the same for all rungs: 0.8 x homogeneous capacity, or --rate.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("experiment", help="a preset by name, or a TOML file")
    parser.add_argument("--mode", choices=("simulate", "emulate"), help="instead of the file's")
    parser.add_argument("--rate", type=float, metavar="R", help="common offered rate, req/s")
    parser.add_argument("--seed", type=int, help="instead of the file's")
    parser.add_argument(
        "--rung", action="append", default=[], metavar="NAME", help="only this rung (repeatable)"
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
    parser.add_argument("--json", action="store_true", help="the ladder as JSON, no table")


def run(options: argparse.Namespace) -> int:
    from harness.ablation import ladder_experiment, steps
    from harness.execution import execute
    from harness.experiment import load_experiment, parse_override

    overrides = dict(parse_override(text) for text in options.overrides)
    for key in ("measure.load_fractions", "measure.unloaded", "measure.slo_search"):
        if overrides.get(key):
            raise BadInput(
                f"--set {key}: the ladder has no such phases, only capacity and one common rate "
                "(--rate); leave it out, or `prfaas run` the experiment"
            )
    for key in ("mode", "seed"):
        if getattr(options, key) is not None:
            overrides[key] = getattr(options, key)
    if options.rate is not None:
        overrides["measure.request_rate"] = options.rate
    experiment = ladder_experiment(load_experiment(options.experiment, overrides), options.rung)
    command = shlex.join(["prfaas", *sys.argv[1:]])
    done = execute(
        experiment, options.out, command, lambda line: print(line, file=sys.stderr, flush=True)
    )
    climbed = steps(done.summary)
    if options.json:
        print(json.dumps([asdict(step) for step in climbed], indent=1))
        return done.exit_code
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{done.summary.name}: TTFT at {done.summary.load_rate:.2f} req/s")
    table.add_column("rung")
    for name in ("capacity, req/s", "TTFT mean, s", "TTFT P90, s", "TTFT P99, s", "egress, Gbps"):
        table.add_column(name, justify="right")
    table.add_column("what it adds")
    for step in climbed:
        table.add_row(
            step.name,
            _figure(step.capacity, step.capacity_gain),
            _figure(step.ttft_mean_s),
            _figure(step.ttft_p90_s, step.ttft_p90_gain),
            _figure(step.ttft_p99_s, step.ttft_p99_gain),
            _figure(step.egress_gbps),
            step.adds,
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"wrote     {done.directory}")
    return done.exit_code


def _figure(value: float | None, change: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if change is None else f"{value:.2f} ({change:+.1%})"
