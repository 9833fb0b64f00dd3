"""Endless draws in chunks, and block ids that were never used before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from workloads.kinds import Lengths, distribution_of

CHUNK = 1024


def endless(lengths: Lengths, rng: np.random.Generator, stratified: bool = False) -> Iterator[int]:
    """Lengths in tokens without end."""
    distribution = distribution_of(lengths)
    # Chained in C: a generator would be resumed for every length.
    return chain.from_iterable(
        distribution.sample(rng, CHUNK, stratified).tolist() for _ in repeat(None)
    )


@dataclass(slots=True)
class BlockIds:
    """Hands out ids that no block had before, so that an id names one place in one chain."""

    next_id: int = 0

    def take(self, count: int) -> tuple[int, ...]:
        first = self.next_id
        self.next_id = first + count
        return tuple(range(first, first + count))
