"""Max-min fair division of a capacity: nobody can get more without someone poorer getting less."""

from __future__ import annotations

from collections.abc import Sequence


def water_level(capacity: float, demands: Sequence[float]) -> float:
    """The level w at which sum(min(demand, w)) = capacity; infinite when all demands fit.

    Everyone gets min(demand, w). O(n log n); all values in one unit, demands >= 0.
    """
    left = capacity
    remaining = len(demands)
    for demand in sorted(demands):
        share = left / remaining
        if demand >= share:
            return max(share, 0.0)
        left -= demand
        remaining -= 1
    return float("inf")
