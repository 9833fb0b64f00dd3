"""`prfaas explain`: one request's story, or what the schedulers of a run did."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.errors import ExitCode

_EXAMPLES = """\
examples:
  prfaas explain runs/paper-20260501T120000Z --request 10000042
                           how it was routed and why, what else was possible, its TTFT split
  prfaas explain runs/paper-20260501T120000Z --request 10000042 --configuration prfaas
  prfaas explain runs/convergence-20260501T120000Z --scheduling split-6-2
                           thresholds and roles over time
  prfaas explain runs/convergence-20260501T120000Z --scheduling split-6-2 --target 3.187
                           and when 97 % of this throughput was reached

Ids of slow requests: prfaas results query RUN "select configuration, id, ttft_s from requests
order by ttft_s desc limit 5"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--request", type=int, metavar="ID", help="tell this request's story")
    what.add_argument("--scheduling", metavar="CONFIGURATION", help="tell what its schedulers did")
    parser.add_argument("--configuration", metavar="NAME", help="only this one's request")
    parser.add_argument("--phase", default="capacity", help="phase of --target (default: capacity)")
    parser.add_argument(
        "--target", type=float, metavar="R", help="throughput that should be reached, req/s"
    )


def run(options: argparse.Namespace) -> int:
    from harness import explain

    if options.request is not None:
        print("\n".join(explain.stories(options.run_dir, options.request, options.configuration)))
        return ExitCode.OK
    name = options.scheduling
    actions = explain.scheduling(options.run_dir, name)
    for time_s, what in actions:
        print(f"{time_s:10.1f} s  {what}")
    if not actions:
        print(f"{name}: its policy has no schedulers, or they changed nothing")
    if options.target is not None:
        when_s, rate = explain.reached_after_s(options.run_dir, name, options.phase, options.target)
        goal = f"97 % of {options.target:g} req/s"
        if when_s is None:
            print(f"{name}: {goal} was never reached; in the last ten minutes {rate:.3f} req/s")
        else:
            print(
                f"{name}: {goal} after {when_s:.0f} s; from then on {rate:.3f} req/s, "
                f"{rate / options.target:.1%} of it"
            )
    return ExitCode.OK
