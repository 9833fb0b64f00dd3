"""Runs many seeds, in one process or several, and keeps only what broke."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.chaos.campaign import Violation, run_seed
from harness.chaos.planted import planted
from harness.processes import process_pool

#: Seeds that a process is given at a time.
BATCH = 25


@dataclass(slots=True)
class Tally:
    """Of a range of seeds: how many ran, and of those that broke something what came first."""

    seeds: int = 0
    succeeded: int = 0
    failed: int = 0
    checks: int = 0
    broken: dict[int, Violation] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.succeeded += other.succeeded
        self.failed += other.failed
        self.checks += other.checks
        self.broken.update(other.broken)


def run_range(first: int, stop: int) -> Tally:
    """Seeds first..stop-1, here."""
    tally = Tally()
    for seed in range(first, stop):
        outcome = run_seed(seed)
        tally.seeds += 1
        tally.succeeded += outcome.succeeded
        tally.failed += outcome.failed
        tally.checks += outcome.checks
        if outcome.violations:
            tally.broken[seed] = outcome.violations[0]
    return tally


def run_many(first: int, count: int, jobs: int) -> Iterator[Tally]:
    """`count` seeds from `first` on, over `jobs` processes; yields the sum so far, batch by batch.

    The order of batches is that of the seeds whatever finishes first.
    """
    total = Tally()
    starts = range(first, first + count, BATCH)
    stops = [min(start + BATCH, first + count) for start in starts]
    if jobs == 1:
        for start, stop in zip(starts, stops, strict=True):
            total.add(run_range(start, stop))
            yield total
        return
    with process_pool(jobs) as pool:
        for tally in pool.map(run_range, starts, stops):
            total.add(tally)
            yield total


def find_planted(name: str, most_seeds: int) -> tuple[int, Violation] | None:
    """The first seed that notices the planted fault, and by what; None: none of so many does."""
    with planted(name):
        for seed in range(most_seeds):
            outcome = run_seed(seed)
            if outcome.violations:
                return seed, outcome.violations[0]
    return None
