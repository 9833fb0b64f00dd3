"""`prfaas chaos`: inject faults, check invariants, tell the story of a failing seed."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time

from harness.errors import BadInput, CommandError, ExitCode
from harness.progress import Progress

EPILOG = """\
examples:
  prfaas chaos --seeds 10000 --jobs 2
      ten thousand campaigns in virtual time: crashes, pauses, outages, corruption, cancellations
  prfaas chaos --seed 59 --explain
      replay one, shrink its list of faults, and tell what happened
  prfaas chaos --planted
      break the code on purpose, one bug at a time, and see how soon a seed notices
  prfaas chaos --mode emulate --minutes 5
      kill, stop, restart and cut real workers and links, and count what is left behind

Exit code 1: an invariant was broken (a bug), or a planted fault was not noticed.
"""

SEEDS = 200
MINUTES = 5.0


class InvariantBroken(CommandError):
    """A campaign found a bug."""

    exit_code = ExitCode.BUG


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--mode",
        choices=("virtual", "emulate"),
        default="virtual",
        help="virtual time in one process, or real workers and links (default: virtual)",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help=f"campaigns to run (default: {SEEDS})"
    )
    parser.add_argument(
        "--first", type=int, default=0, metavar="SEED", help="first seed (default: 0)"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes to run them in (default: 1)"
    )
    parser.add_argument("--seed", type=int, metavar="SEED", help="run this seed alone")
    parser.add_argument(
        "--explain", action="store_true", help="with --seed: shrink its faults and tell the story"
    )
    parser.add_argument(
        "--planted",
        nargs="?",
        const="all",
        metavar="NAME",
        help="plant each bug of the shipped list (or the named one; with --seed: in that seed)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help=f"with --mode emulate: how long faults are injected (default: {MINUTES:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    own = {"virtual": ("seeds", "jobs", "explain", "planted"), "emulate": ("minutes",)}
    for mode, names in own.items():
        for name in names:
            if mode != options.mode and getattr(options, name) not in (None, False):
                raise BadInput(f"--{name} is for --mode {mode}")
    options.seeds = SEEDS if options.seeds is None else options.seeds
    options.jobs = 1 if options.jobs is None else options.jobs
    options.minutes = MINUTES if options.minutes is None else options.minutes
    if options.seeds < 1 or options.jobs < 1 or not 0.0 < options.minutes < math.inf:
        raise BadInput("--seeds, --jobs and --minutes must be positive and finite")
    if options.explain and options.seed is None:
        raise BadInput("--explain tells the story of one seed: give --seed")
    if options.mode == "emulate":
        return _emulate(options)
    _need_engine()
    if options.seed is not None:
        return _one(options)
    if options.planted is not None:
        return _planted(options)
    return _many(options)


def _need_engine() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise BadInput(
            "chaos runs the worker's own code, which imports torch: "
            "pip install 'prfaas-bench[engine]'"
        ) from error


def _many(options: argparse.Namespace) -> int:
    from harness.chaos.many import BATCH, Tally, run_many

    began_s = time.monotonic()
    tally = Tally()
    with Progress("chaos", -(-options.seeds // BATCH)) as progress:
        for tally in run_many(options.first, options.seeds, options.jobs):
            progress.advance(f"{tally.seeds} seeds, {len(tally.broken)} broken")
    took_s = time.monotonic() - began_s
    if options.json:
        broken = {str(seed): str(each) for seed, each in sorted(tally.broken.items())}
        found = {
            "seeds": tally.seeds,
            "succeeded": tally.succeeded,
            "failed": tally.failed,
            "cache_checks": tally.checks,
            "violations": broken,
            "duration_s": round(took_s, 3),
        }
        print(json.dumps(found, indent=2))
    else:
        print(
            f"{tally.seeds} seeds in {took_s:.1f} s: {tally.succeeded} requests succeeded, "
            f"{tally.failed} failed as they may, {tally.checks} caches checked byte by byte"
        )
        for seed, violation in sorted(tally.broken.items()):
            print(f"seed {seed}: {violation}")
    if tally.broken:
        seed = min(tally.broken)
        raise InvariantBroken(
            f"{len(tally.broken)} of {tally.seeds} seeds broke an invariant; "
            f"prfaas chaos --seed {seed} --explain tells the story"
        )
    return int(ExitCode.OK)


def _one(options: argparse.Namespace) -> int:
    from harness.chaos.campaign import run_seed
    from harness.chaos.planted import planted
    from harness.chaos.shrink import shrink
    from harness.chaos.story import tell

    if options.planted is not None:
        _known(options.planted)
        with planted(options.planted):
            outcome = run_seed(options.seed)
            if options.explain and outcome.violations:
                outcome = shrink(outcome)
    else:
        outcome = run_seed(options.seed)
        if options.explain and outcome.violations:
            outcome = shrink(outcome)
    if options.explain:
        print("\n".join(tell(outcome)))
    else:
        for violation in outcome.violations:
            print(violation)
        print(f"seed {options.seed}: {outcome.succeeded} succeeded, {outcome.failed} failed")
    if outcome.violations:
        raise InvariantBroken(f"seed {options.seed}: {outcome.violations[0]}")
    return int(ExitCode.OK)


def _known(name: str) -> None:
    from harness.chaos.planted import PLANTED

    if name not in PLANTED:
        raise BadInput(f"--planted {name!r} is not on the list: {'; '.join(PLANTED)}")


def _planted(options: argparse.Namespace) -> int:
    from harness.chaos.many import find_planted
    from harness.chaos.planted import PLANTED

    names = list(PLANTED)
    if options.planted != "all":
        _known(options.planted)
        names = [options.planted]
    rows = []
    missed = []
    for name in names:
        found = find_planted(name, options.seeds)
        seed, violation = found if found is not None else (None, None)
        if found is None:
            missed.append(name)
        rows.append({"fault": name, "seed": seed, "noticed": str(violation) if violation else ""})
        if not options.json:
            what = f"seed {seed}: {violation}" if violation else f"not in {options.seeds} seeds"
            print(f"{name}: {what}"[:200])
            sys.stdout.flush()
    if options.json:
        print(json.dumps(rows, indent=2))
    if missed:
        raise InvariantBroken(f"not noticed within {options.seeds} seeds: {', '.join(missed)}")
    return int(ExitCode.OK)


def _emulate(options: argparse.Namespace) -> int:
    from harness.chaos.emulate import soak

    began_s = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {what}", file=sys.stderr, flush=True)

    seed = options.first if options.seed is None else options.seed
    report = soak(options.minutes, seed, say)
    print(json.dumps(report.to_json(), indent=2) if options.json else "\n".join(report.lines()))
    if report.violations:
        raise InvariantBroken(report.violations[0])
    return int(ExitCode.OK)
