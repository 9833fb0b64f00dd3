"""Tests and intervals for comparing repeats of two versions. Runs are resampled, never requests:
the requests of one run are correlated. Ratios are candidate / base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Below four runs a side no rank test reaches p = 0.05 (3 against 3: 0.1).
LEAST_FOR_RANKS = 4


@dataclass(frozen=True, slots=True)
class Effect:
    """How much a figure changed. `ratio` is of the means; `low`..`high` its interval, None where
    there are not two runs a side. `p` is two-sided, None where no test applies. `exact` says that
    both sides are deterministic with equal seeds, so that any difference is real.
    """

    ratio: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n_base: int = 1
    n_candidate: int = 1
    exact: bool = False

    @property
    def change(self) -> float:
        """Relative change, e.g. 0.05 for 5 % more."""
        return self.ratio - 1.0


def bootstrap_ratio(
    base: Sequence[float],
    candidate: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 4_000,
    seed: int = 1,
) -> tuple[float, float]:
    """Percentile bootstrap interval of mean(candidate) / mean(base), resampling runs of each side.
    Both sides need two runs, and means that are not zero.
    """
    rng = np.random.default_rng(seed)

    def means(values: Sequence[float]) -> Floats:
        array = np.asarray(values, dtype=np.float64)
        picks = rng.integers(0, len(array), (resamples, len(array)))
        return np.asarray(array[picks].mean(axis=1))

    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = means(candidate) / means(base)
    tail = (1.0 - confidence) / 2
    low, high = np.nanquantile(ratios, [tail, 1.0 - tail])
    return float(low), float(high)


def mann_whitney(base: Sequence[float], candidate: Sequence[float]) -> float | None:
    """Two-sided p; None with fewer than LEAST_FOR_RANKS runs a side. All equal gives 1."""
    from scipy.stats import mannwhitneyu

    if min(len(base), len(candidate)) < LEAST_FOR_RANKS:
        return None
    if len({*base, *candidate}) == 1:
        return 1.0
    return float(mannwhitneyu(base, candidate, alternative="two-sided").pvalue)


def effect(
    base: Sequence[float], candidate: Sequence[float], *, exact: bool = False
) -> Effect | None:
    """The effect between repeats of two versions; None when base has a mean of zero."""
    base_mean = float(np.mean(base))
    if base_mean == 0.0:
        return None
    ratio = float(np.mean(candidate)) / base_mean
    low = high = p = None
    if exact:
        return Effect(ratio, n_base=len(base), n_candidate=len(candidate), exact=True)
    if min(len(base), len(candidate)) >= 2:
        low, high = bootstrap_ratio(base, candidate)
        p = mann_whitney(base, candidate)
    return Effect(ratio, low, high, p, len(base), len(candidate))


@dataclass(frozen=True, slots=True)
class TrimmedTest:
    """`shift` is the trimmed mean of the pairs' log ratios; `p` one-sided, that it is above 0."""

    shift: float
    p: float


def trimmed_pairs(log_ratios: Sequence[float], trim: float = 0.2) -> TrimmedTest:
    """Tukey-McLaughlin one-sample trimmed t test: few wild pairs (a busy neighbour) do not decide.

    Needs four pairs. Winsorised variance, h - 1 degrees of freedom for the h pairs kept.
    """
    from scipy.stats import t

    values = np.sort(np.asarray(log_ratios, dtype=np.float64))
    count = len(values)
    if count < 4:
        raise ValueError(f"{count} pairs; a test needs 4")
    cut = int(trim * count)
    kept = values[cut : count - cut]
    shift = float(kept.mean())
    winsorised = np.clip(values, kept[0], kept[-1])
    spread = float(winsorised.std(ddof=1)) / ((1 - 2 * cut / count) * count**0.5)
    if spread == 0.0:
        return TrimmedTest(shift, 0.0 if shift > 0 else 1.0)
    return TrimmedTest(shift, float(t.sf(shift / spread, len(kept) - 1)))


def detectable(coefficient_of_variation: float, repeats: int, z: float = 1.96 + 1.28) -> float:
    """Least relative change that `repeats` runs a side find nine times in ten at p = 0.05."""
    return float(z * coefficient_of_variation * (2.0 / repeats) ** 0.5)
