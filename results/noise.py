"""The noise floor of a machine: how much equal runs differ, and what change can be told from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from results.compare import CompareError, Key, Side
from results.statistics import detectable


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one figure over repeats of one version: mean, standard deviation / mean, greatest / least
    - 1, and the least change that `repeats` runs a side would find nine times in ten.
    """

    mean: float
    variation: float
    spread: float
    detectable: float
    repeats: int


def floors(side: Side, repeats: int | None = None) -> Mapping[Key, Floor]:
    """The floor of each figure of `side`. Raises CompareError below three runs."""
    if side.runs < 3:
        raise CompareError(
            f"{side.runs} runs: the noise of a machine needs at least three, better ten"
        )
    wanted = repeats or side.runs
    made = {}
    for key, values in side.values.items():
        array = np.array(values)
        mean = float(array.mean())
        if mean == 0.0:
            continue
        variation = float(array.std(ddof=1)) / abs(mean)
        spread = float(array.max() / array.min()) - 1 if array.min() > 0 else float("inf")
        made[key] = Floor(mean, variation, spread, detectable(variation, wanted), wanted)
    return made
