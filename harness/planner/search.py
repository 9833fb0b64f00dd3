"""Grid search over threshold and split (Eqs 7 and 8), and the curves it follows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.planner.model import (
    Capacity,
    Deployment,
    Reading,
    Shape,
    Split,
    Stage,
    capacity,
    decode_per_s,
    local_stage,
    prefill_stages,
    remote_stage,
)
from workloads.lengths import Empirical

#: A pass of the search looks at every so many points of the next one, and the first at most at
#: `MOST_POINTS`.
COARSE = 10
MOST_POINTS = 1000
#: A smooth distribution's lengths below and above these quantiles change no rate.
NEGLIGIBLE = 1e-12


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One threshold of Fig 5: the rate of all requests at which each stage is full."""

    threshold_tokens: float
    prfaas_per_s: float | None
    prefill_per_s: float | None
    decode_per_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """One split at its best threshold; Eq 8 compares `prefill_total_per_s` with `decode_per_s`."""

    split: Split
    threshold_tokens: float | None
    prefill_total_per_s: float
    decode_per_s: float
    requests_per_s: float


def threshold_grid(deployment: Deployment, step_tokens: int) -> Sequence[int]:
    """Multiples of `step_tokens` from 0 to the longest prompt: 0 offloads all, the last nothing."""
    longest = deployment.lengths.quantile(1.0)
    last = -int(-longest // step_tokens)
    return range(0, step_tokens * last + 1, step_tokens)


class _Stages:
    """Per-instance stages by threshold, each computed once: rates are linear in instances."""

    def __init__(self, deployment: Deployment, reading: Reading) -> None:
        self._deployment = deployment
        self._reading = reading
        self._known: dict[int, tuple[Stage | None, Stage | None]] = {}

    def at(self, threshold: int) -> tuple[Stage | None, Stage | None]:
        """(remote, local) stage of one instance each; None where no request goes."""
        known = self._known.get(threshold)
        if known is None:
            deployment, reading = self._deployment, self._reading
            share = deployment.lengths.tail(threshold)
            remote = local = None
            if share > 0:
                remote = remote_stage(deployment, 1, share, threshold, reading)
            if share < 1:
                local = local_stage(deployment, 1, 1 - share, threshold, reading)
            known = self._known[threshold] = (remote, local)
        return known

    def prefill_rate(self, threshold: int, n_remote: int, n_local: int) -> float:
        """Rate of all requests at which the first prefill stage is full."""
        remote, local = self.at(threshold)
        limits = []
        if remote is not None:
            rate = n_remote / remote.prefill_s
            bound = self._deployment.link.rate_gbps
            if bound is not None:
                rate = min(rate, bound * 1e9 / 8 / remote.kv_bytes)
            limits.append(rate / remote.share)
        if local is not None:
            limits.append(n_local / local.prefill_s / local.share)
        return min(limits)


def best_threshold(
    deployment: Deployment,
    n_prfaas: int,
    n_prefill: int,
    reading: Reading = Reading.WORK,
    step_tokens: int = 100,
    stages: _Stages | None = None,
) -> int:
    """The threshold on the grid at which the prefill stages together sustain most (Eq 7).

    Fewer requests go remote as t grows, so Theta_prfaas / p rises and Theta_pd_p / (1 - p) falls:
    their minimum has one peak for a smooth distribution: coarse passes find its cell, ever smaller,
    the last pass the grid point. Where next to no lengths are, it is flat: of that, only both ends
    are looked at. Steps of an empirical one can make more peaks, so every point is
    looked at behind which a length was seen: others equal the one before. Of equals the least is
    taken.
    """
    known = stages or _Stages(deployment, reading)
    grid = threshold_grid(deployment, step_tokens)

    def best(indices: Iterable[int]) -> int:
        return max(
            indices, key=lambda i: (known.prefill_rate(grid[i], n_prfaas, n_prefill), -grid[i])
        )

    last = len(grid) - 1
    if isinstance(deployment.lengths, Empirical):
        behind = np.ceil(deployment.lengths.support() / step_tokens).astype(np.int64)
        return grid[best([0, *np.unique(np.minimum(behind, last)).tolist()])]
    low, high = (deployment.lengths.quantile(q) / step_tokens for q in (NEGLIGIBLE, 1 - NEGLIGIBLE))
    least, most = min(last, int(low)), min(last, math.ceil(high))
    stride = COARSE
    while (most - least) / stride > MOST_POINTS:
        stride *= COARSE
    first, final = least, most
    while stride:
        found = best(sorted({*range(first, final, stride), final}))
        first, final = max(least, found - stride), min(most, found + stride)
        stride //= COARSE
    return grid[best(sorted({0, found, last}))]


class _Splits:
    """The splits of `n_local` local instances by their number that prefills, each at its best
    threshold, computed when asked for."""

    def __init__(
        self,
        deployment: Deployment,
        n_prfaas: int,
        n_local: int,
        reading: Reading,
        step_tokens: int,
    ) -> None:
        self.numbers = _numbers(n_prfaas, n_local)
        self._deployment, self._reading, self._step_tokens = deployment, reading, step_tokens
        self._n_prfaas, self._n_local = n_prfaas, n_local
        self._stages = _Stages(deployment, reading)
        self._known: dict[int, tuple[int, float]] = {}

    def best(self, n_prefill: int) -> tuple[int, float]:
        """The best threshold, and the rate at which a prefill stage is full with it."""
        known = self._known.get(n_prefill)
        if known is None:
            n_prfaas, stages = self._n_prfaas, self._stages
            threshold = best_threshold(
                self._deployment, n_prfaas, n_prefill, self._reading, self._step_tokens, stages
            )
            rate = stages.prefill_rate(threshold, n_prfaas, n_prefill)
            known = self._known[n_prefill] = (threshold, rate)
        return known

    def capacity(self, n_prefill: int) -> Capacity:
        split = Split(self._n_prfaas, n_prefill, self._n_local - n_prefill)
        threshold, _ = self.best(n_prefill)
        return capacity(self._deployment, Shape.THRESHOLD, split, threshold, self._reading)

    def point(self, n_prefill: int) -> SplitPoint:
        result = self.capacity(n_prefill)
        threshold, rate = self.best(n_prefill)
        return SplitPoint(result.split, threshold, rate, result.decode_per_s, result.requests_per_s)


def _numbers(n_prfaas: int, n_local: int) -> range:
    """How many of the local instances may prefill."""
    numbers = range(0 if n_prfaas else 1, n_local)
    if not numbers:
        raise ValueError("needs at least two local instances, or one and a remote one")
    return numbers


def search(
    deployment: Deployment,
    n_prfaas: int,
    n_local: int,
    reading: Reading = Reading.WORK,
    step_tokens: int = 100,
) -> tuple[Capacity, tuple[SplitPoint, ...]]:
    """The best threshold configuration of `n_prfaas` remote and `n_local` local instances.

    Returns it and the best of every split. Of equal capacities the one whose prefill has more to
    spare is taken.
    """
    splits = _Splits(deployment, n_prfaas, n_local, reading, step_tokens)
    points = tuple(map(splits.point, splits.numbers))
    best = max(points, key=lambda point: (point.requests_per_s, point.prefill_total_per_s))
    return splits.capacity(best.split.n_prefill), points


def best_capacity(
    deployment: Deployment,
    n_prfaas: int,
    n_local: int,
    reading: Reading = Reading.WORK,
    step_tokens: int = 100,
) -> Capacity:
    """The best that `search` finds, of few splits: each instance that prefills instead of decoding
    raises what prefill sustains, or leaves it, and lowers what decode does, so the best is where
    they cross.
    """
    splits = _Splits(deployment, n_prfaas, n_local, reading, step_tokens)

    def prefill_rate(n_prefill: int) -> float:
        return splits.best(n_prefill)[1]

    def decode_rate(n_prefill: int) -> float:
        return decode_per_s(deployment, n_local - n_prefill)

    def worth(n_prefill: int) -> tuple[float, float]:
        rate = prefill_rate(n_prefill)
        return min(rate, decode_rate(n_prefill)), rate

    candidates = _crossing(splits.numbers, prefill_rate, decode_rate)
    return splits.capacity(max(candidates, key=worth))


def split_points(
    deployment: Deployment,
    n_prfaas: int,
    n_local: int,
    reading: Reading = Reading.WORK,
    step_tokens: int = 100,
    most: int = 1000,
) -> tuple[SplitPoint, ...]:
    """Every split at its best threshold; of more than `most`, about so many at even distances."""
    splits = _Splits(deployment, n_prfaas, n_local, reading, step_tokens)
    every = max(1, math.ceil(len(splits.numbers) / most))
    return tuple(map(splits.point, splits.numbers[::every]))


def _crossing(
    numbers: range, rising: Callable[[int], float], falling: Callable[[int], float]
) -> tuple[int, ...]:
    """Of `numbers` those that may have the largest lesser of both rates, least first: of a rate
    that never falls and one that falls, or is 0 throughout."""
    at = bisect_left(numbers, True, key=lambda n: rising(n) >= falling(n))
    found = numbers[at : at + 1]
    if found and falling(found[0]) == 0:
        # No rate at all: the one that rises decides.
        at, found = len(numbers), numbers[:0]
    if at:
        # Before the crossing the one that rises is the lesser: the first at which it is as large.
        level = rising(numbers[at - 1])
        first = bisect_left(numbers, level, hi=at - 1, key=rising)
        return (numbers[first], *found)
    return tuple(found)


def best_split(
    deployment: Deployment, shape: Shape, n_prfaas: int, n_local: int, reading: Reading
) -> Split:
    """The split of `n_local` local instances that sustains most, for a shape without threshold."""
    numbers = _numbers(n_prfaas, n_local)

    def split(n_prefill: int) -> Split:
        return Split(n_prfaas, n_prefill, n_local - n_prefill)

    def prefill_rate(n_prefill: int) -> float:
        stages = prefill_stages(deployment, shape, split(n_prefill), None, reading)
        return min(stage.rate_at_capacity() for stage in stages)

    def decode_rate(n_prefill: int) -> float:
        return decode_per_s(deployment, n_local - n_prefill)

    if decode_rate(numbers[0]) == 0:
        return split(numbers[0])
    candidates = _crossing(numbers, prefill_rate, decode_rate)
    return split(max(candidates, key=lambda n: min(prefill_rate(n), decode_rate(n))))


def threshold_curves(
    deployment: Deployment,
    split: Split,
    thresholds: Iterable[float],
    reading: Reading = Reading.PUBLISHED,
) -> tuple[CurvePoint, ...]:
    """Fig 5 over t: both prefill stages' rates, which cross at the best threshold (Eq 7)."""
    points = []
    for threshold in thresholds:
        result = capacity(deployment, Shape.THRESHOLD, split, threshold, reading)
        remote = next((stage for stage in result.stages if stage.remote), None)
        local = next((stage for stage in result.stages if not stage.remote), None)
        points.append(
            CurvePoint(
                threshold,
                None if remote is None else remote.rate_at_capacity(),
                None if local is None else local.rate_at_capacity(),
                result.decode_per_s,
                result.requests_per_s,
            )
        )
    return tuple(points)
