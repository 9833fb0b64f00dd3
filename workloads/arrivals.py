"""When requests arrive: a point process of unit rate, seen through a rate that varies in time.

A process yields operational times with mean gap 1; a shape maps them to seconds by inverting
the integral of its rate (time rescaling), so every process combines with every shape. Schedules are
absolute and lazy: nothing is rescaled to an exact rate unless `exactly` is asked to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from operator import truediv
from typing import Protocol

import numpy as np

from workloads.errors import InputError

_CHUNK = 4096


def constant_process() -> Iterator[float]:
    """0, 1, 2, ...: gaps without variation."""
    return map(float, count())


def gamma_process(rng: np.random.Generator, burstiness: float = 1.0) -> Iterator[float]:
    """Independent gamma gaps of mean 1 and shape `burstiness` (as vLLM names it).

    The coefficient of variation of the gaps is 1 / sqrt(burstiness): 1 is Poisson,
    below 1 burstier.
    """
    if not burstiness > 0:
        raise InputError(f"burstiness: found {burstiness}, needs a positive number")
    # Chained in C: a generator would be resumed for every arrival.
    return chain.from_iterable(_gamma_chunks(rng, burstiness))


def _gamma_chunks(rng: np.random.Generator, burstiness: float) -> Iterator[list[float]]:
    now = 0.0
    while True:
        gaps = (
            rng.standard_exponential(_CHUNK)
            if burstiness == 1.0
            else rng.standard_gamma(burstiness, _CHUNK) / burstiness
        )
        times: list[float] = (now + np.cumsum(gaps)).tolist()
        now = times[-1]
        yield times


class Shape(Protocol):
    """A rate over time. `time_s` inverts its integral: when the expected count is `count`."""

    def time_s(self, count: float) -> float: ...

    def rate(self, time_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Steady:
    """`rate_rps` requests a second, always."""

    rate_rps: float

    def __post_init__(self) -> None:
        _check_rate("rate_rps", self.rate_rps)

    def time_s(self, count: float) -> float:
        return count / self.rate_rps

    def rate(self, time_s: float) -> float:
        return self.rate_rps


@dataclass(frozen=True, slots=True)
class LinearRamp:
    """From `from_rps` to `to_rps` over `over_s` seconds in a straight line, then `to_rps`."""

    from_rps: float
    to_rps: float
    over_s: float

    def __post_init__(self) -> None:
        _check_rate("from_rps", self.from_rps, zero=True)
        _check_rate("to_rps", self.to_rps)
        _check_rate("over_s", self.over_s)

    def time_s(self, count: float) -> float:
        area = (self.from_rps + self.to_rps) / 2 * self.over_s
        if count <= 0:
            return 0.0
        if count >= area:
            return self.over_s + (count - area) / self.to_rps
        slope = (self.to_rps - self.from_rps) / self.over_s
        # The stable root of slope/2 t^2 + from t = count, also for slope 0.
        return 2 * count / (self.from_rps + math.sqrt(self.from_rps**2 + 2 * slope * count))

    def rate(self, time_s: float) -> float:
        return self.from_rps + (self.to_rps - self.from_rps) * min(time_s / self.over_s, 1.0)


@dataclass(frozen=True, slots=True)
class ExponentialRamp:
    """From `from_rps` to `to_rps` by a constant factor in `over_s` s, then steady."""

    from_rps: float
    to_rps: float
    over_s: float

    def __post_init__(self) -> None:
        _check_rate("from_rps", self.from_rps)
        _check_rate("to_rps", self.to_rps)
        _check_rate("over_s", self.over_s)

    def time_s(self, count: float) -> float:
        growth = math.log(self.to_rps / self.from_rps) / self.over_s
        if growth == 0:
            return count / self.from_rps
        area = (self.to_rps - self.from_rps) / growth
        if count >= area:
            return self.over_s + (count - area) / self.to_rps
        return math.log1p(growth * count / self.from_rps) / growth

    def rate(self, time_s: float) -> float:
        grown: float = (self.to_rps / self.from_rps) ** min(time_s / self.over_s, 1.0)
        return self.from_rps * grown


@dataclass(frozen=True, slots=True)
class Steps:
    """Rates in turn, each (duration_s, rate_rps); then from the start again.

    A rate of 0 is a pause. On-off load is two steps.
    """

    steps: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("steps: found none, needs at least one (duration_s, rate)")
        for duration_s, rate_rps in self.steps:
            _check_rate("duration_s", duration_s)
            _check_rate("rate", rate_rps, zero=True)
        if not any(rate_rps > 0 for _, rate_rps in self.steps):
            raise InputError("steps: every rate is 0, needs one above 0")

    def time_s(self, count: float) -> float:
        per_cycle = math.fsum(duration * rate for duration, rate in self.steps)
        cycle_s = math.fsum(duration for duration, _ in self.steps)
        cycles, left = divmod(count, per_cycle)
        time_s = cycles * cycle_s
        for duration_s, rate_rps in self.steps:
            area = duration_s * rate_rps
            if left <= area and rate_rps > 0:
                return time_s + left / rate_rps
            left -= area
            time_s += duration_s
        return time_s

    def rate(self, time_s: float) -> float:
        left = time_s % math.fsum(duration for duration, _ in self.steps)
        for duration_s, rate_rps in self.steps:
            if left < duration_s:
                return rate_rps
            left -= duration_s
        return self.steps[-1][1]


def on_off(mean_rps: float, on_s: float, off_s: float) -> Steps:
    """Bursts of `on_s` seconds, then silence of `off_s`, with `mean_rps` over a whole cycle."""
    return Steps(((on_s, mean_rps * (on_s + off_s) / on_s), (off_s, 0.0)))


def scheduled(process: Iterable[float], shape: Shape) -> Iterator[float]:
    """Arrival times in seconds, ascending: `process` seen through `shape`."""
    if isinstance(shape, Steady):  # usual: without a call of a function in Python an arrival
        return map(truediv, process, repeat(shape.rate_rps))
    return map(shape.time_s, process)


def exactly(times_s: Iterable[float], requests: int, rate_rps: float) -> list[float]:
    """The first `requests` times, stretched so that the next would be at requests / rate_rps:
    exactly so many arrive before then.

    This takes the randomness out of the achieved rate (and holds that many floats in memory).
    """
    taken = np.fromiter(islice(times_s, requests + 1), dtype=np.float64)
    stretched: list[float] = (taken[:-1] * (requests / rate_rps / taken[-1])).tolist()
    return stretched


def _check_rate(name: str, value: float, zero: bool = False) -> None:
    if not (value > 0 or (zero and value == 0)) or math.isinf(value):
        raise InputError(
            f"{name}: found {value}, needs a {'non-negative' if zero else 'positive'} number"
        )
