"""Change points in a figure's history: one alert for each level shift, night by night.

Pure and online: what is said of a night depends on it and the nights before. The history is judged
in logarithms, so a shift is a relative change.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DriftRules:
    """A shift needs `before` nights at the old level and `after` at the new one, a change of
    `least` (relative), and a distance of `z` standard errors between old median and new mean. The
    new level is looked for in the last `window` nights. `floor` is the least standard deviation
    that is assumed of a night. Each night at the new level must show `agreement` of the shift.
    """

    before: int = 12
    after: int = 3
    least: float = 0.025
    agreement: float = 0.4
    z: float = 5.0
    window: int = 10
    floor: float = 0.006


@dataclass(frozen=True, slots=True)
class Shift:
    """A level shift that began at night `began` and was told at night `told` (indices). `change` is
    relative: 0.05 for 5 % more.
    """

    began: int
    told: int
    change: float
    z: float


def _spread(residuals: Floats, floor: float) -> float:
    """Robust standard deviation: 1.4826 x median absolute deviation, corrected for few nights."""
    count = len(residuals)
    mad = float(np.median(np.abs(residuals)))
    return max(floor, 1.4826 * mad * count / max(1, count - 1.5))


def _best_split(segment: Floats, rules: DriftRules) -> tuple[int, float, float] | None:
    """(split, shift, z) of the clearest split of `segment` near its end."""
    count = len(segment)
    best: tuple[int, float, float] | None = None
    first = max(rules.before, count - rules.window)
    for split in range(first, count - rules.after + 1):
        old, new = segment[:split], segment[split:]
        level = float(np.median(old))
        shift = float(new.mean()) - level
        # One wild night is no new level: each night must be well on its side.
        if float((np.sign(shift) * (new - level)).min()) < rules.agreement * abs(shift):
            continue
        residuals = np.concatenate((old - level, new - np.median(new)))
        # A median's variance is 1.57 times that of a mean.
        error = _spread(residuals, rules.floor) * (1.57 / len(old) + 1 / len(new)) ** 0.5
        z = abs(shift) / error
        if best is None or z > best[2]:
            best = split, shift, z
    return best


def shifts(
    values: Sequence[float],
    rules: DriftRules = DriftRules(),
    known: Collection[int] = (),
) -> list[Shift]:
    """Level shifts in positive `values`, a night each. `known` are nights at which a new level was
    expected (a marked shift, another baseline): the history starts anew there, without an alert.
    """
    series = np.log(np.asarray(values, dtype=np.float64))
    found: list[Shift] = []
    start = 0
    for night in range(len(series)):
        if night in known:
            start = night
        best = _best_split(series[start : night + 1], rules)
        if best is None:
            continue
        split, shift, z = best
        change = float(np.expm1(shift))
        if z >= rules.z and abs(change) >= rules.least:
            began = start + split
            found.append(Shift(began, night, change, z))
            start = began
    return found
