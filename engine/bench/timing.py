"""Times of alternatives, taken in turns so that a disturbance meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """`best_s` is what the code can do, `median_s` what it did on this machine as loaded."""

    best_s: float
    median_s: float
    runs: int

    def ratio_to(self, other: Timing) -> float:
        """How many times as long `other` took, best against best."""
        return other.best_s / self.best_s

    def median_ratio_to(self, other: Timing) -> float:
        """The same, median against median."""
        return other.median_s / self.median_s


def settle_allocator() -> None:
    """Free a large block once, as a process has that loaded a model: from then on glibc keeps what
    is freed. Before, it gives memory back after each call, and half of a short one's time goes into
    faulting the same pages in again.
    """
    torch.empty(30 << 20, dtype=torch.uint8)


def in_turns(
    cases: Mapping[str, Callable[[], object]],
    seconds: float = 2.0,
    least_runs: int = 3,
    turn_s: float = 0.05,
) -> dict[str, Timing]:
    """Run each case once to warm up, then all in turns until `seconds` have passed and each had
    `least_runs` turns. A turn repeats its case for `turn_s`: one that is short would otherwise be
    timed only on the caches that a long one left behind.
    """
    for case in cases.values():
        case()
    taken: dict[str, list[float]] = {name: [] for name in cases}
    rounds, end = 0, time.perf_counter() + seconds
    while rounds < least_runs or time.perf_counter() < end:
        for name, case in cases.items():
            began = now = time.perf_counter()
            while now == began or now < began + turn_s:
                begin = now
                case()
                now = time.perf_counter()
                taken[name].append(now - begin)
        rounds += 1
    return {
        name: Timing(min(times), statistics.median(times), len(times))
        for name, times in taken.items()
    }
