"""Which share of a simulated run's CPU time is recording.

    python benchmarks/recording.py [--requests 200000]         # in one run, on and off in turn
    python benchmarks/recording.py --pairs 5 --requests 100000   # whole runs with and without

The first form records every other block of requests of one simulation, so that both see the same
machine, and prints the standard error. Writing row groups, which falls into few blocks, is timed by
itself. The second counts what lasts longer than a block as well
(rows that are kept push the simulation out of the caches), and wants a quiet machine. Both count
everything from the opened to the closed files.
"""

from __future__ import annotations

import argparse
import math
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

#: Requests until recording goes on or off; some 5 ms.
BLOCK = 150
#: Blocks before the simulation is in its steady state.
SETTLED = 12


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


class _Timed(Recorder):
    """A recorder that knows how long it wrote row groups of requests, in CPU seconds."""

    written_s = 0.0

    def _convert_requests(self) -> None:
        begun_s = time.process_time()
        super()._convert_requests()
        self.written_s += time.process_time() - begun_s


class _Blocks:
    """CPU seconds of each block without recording and with it, in turn; without the writing."""

    def __init__(self, recorder: _Timed) -> None:
        self._recorder = recorder
        self._written_s = 0.0
        self.spent_s: tuple[list[float], list[float]] = ([], [])
        self._record = lambda each: recorder.request(each, "prfaas", "speed")
        self._recording = False
        self._now: Callable[[RequestRecord], None] = _drop
        self._left = BLOCK
        self._begun_s = time.process_time()

    def ended(self, record: RequestRecord) -> None:
        self._now(record)
        self._left -= 1
        if not self._left:
            now_s = time.process_time()
            written_s = self._recorder.written_s - self._written_s
            self._written_s += written_s
            self.spent_s[self._recording].append(now_s - self._begun_s - written_s)
            self._recording = not self._recording
            self._now = self._record if self._recording else _drop
            self._left = BLOCK
            self._begun_s = now_s


def within(requests: int) -> str:
    """The share by blocks of one simulation, and its standard error."""
    case = replace(CASES[0], requests=requests)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        recorder = _Timed(Path(folder), {"case": case.name})
        opened_s = time.process_time() - begun
        blocks = _Blocks(recorder)
        run(simulate(case, blocks.ended))
        written_s = recorder.written_s
        begun = time.process_time()
        recorder.close()
        closed_s = time.process_time() - begun
    recorded_count = BLOCK * len(blocks.spent_s[True])
    without, recorded = (each[SETTLED:] for each in blocks.spent_s)
    without = without[: len(recorded)]
    differences = [b - a for a, b in zip(without, recorded, strict=True)]
    count = BLOCK * len(differences)
    writing_s = (opened_s + written_s + closed_s) / recorded_count * count
    extra_s = sum(differences) + writing_s
    error_s = statistics.stdev(differences) * math.sqrt(len(differences))
    whole_s = sum(without) + extra_s
    return (
        f"recording is {extra_s / whole_s:.1%} +- {error_s / whole_s:.1%} of the CPU time: "
        f"{extra_s / count * 1e6:.2f} us a request "
        f"({writing_s / count * 1e6:.2f} in writing row groups) "
        f"on {sum(without) / count * 1e6:.1f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=0)
    options = parser.parse_args()
    if options.requests < 4 * SETTLED * BLOCK:
        parser.error(f"--requests: at least {4 * SETTLED * BLOCK}")
    cpu_s(100, record=True)
    if not options.pairs:
        print(within(options.requests))
        return
    shares = []
    for pair in range(options.pairs):
        order = (True, False) if pair % 2 else (False, True)
        taken = {record: cpu_s(options.requests, record) for record in order}
        shares.append(1 - taken[False] / taken[True])
    found = ", ".join(f"{share:.1%}" for share in sorted(shares))
    print(f"recording is {statistics.median(shares):.1%} of the CPU time (pairs: {found})")


if __name__ == "__main__":
    main()
