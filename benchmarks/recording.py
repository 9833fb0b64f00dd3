"""Which share of a simulated run's CPU time is recording: the same run with and without, in turn.

    python benchmarks/recording.py [--requests 20000] [--pairs 7]

The share is 1 - without / with, the median over pairs. It counts everything that recording causes,
inside the recorder and elsewhere (rows that are kept push the simulation out of the caches).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from speed import CASES, simulate

from harness.clock import run
from results.recorder import Recorder
from results.records import RequestRecord


def cpu_s(requests: int, record: bool) -> float:
    """CPU seconds of the 12-instance case, from the first request to the closed files."""
    case = replace(CASES[0], requests=requests)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        recorder = Recorder(Path(folder), {"case": case.name}) if record else None
        on_record: Callable[[RequestRecord], None] = (
            (lambda each: recorder.request(each, "prfaas", "speed")) if recorder else _drop
        )
        run(simulate(case, on_record))
        if recorder:
            recorder.close()
        return time.process_time() - begun


def _drop(record: RequestRecord) -> None:
    """Keep nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    cpu_s(100, record=True)
    shares = []
    for pair in range(options.pairs):
        order = (True, False) if pair % 2 else (False, True)
        taken = {record: cpu_s(options.requests, record) for record in order}
        shares.append(1 - taken[False] / taken[True])
    found = ", ".join(f"{share:.1%}" for share in sorted(shares))
    print(f"recording is {statistics.median(shares):.1%} of the CPU time (pairs: {found})")


if __name__ == "__main__":
    main()
