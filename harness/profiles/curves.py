"""Prefill time over prompt length: points joined by a named interpolation.

Every curve is continuous, non-decreasing and defined from 0 tokens on, because an incremental
prompt is charged T(l) - T(c) + T(0) (see `Profile.prefill_s`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Points = Sequence[tuple[float, float]]


class Curve(Protocol):
    """Seconds over tokens."""

    def at(self, tokens: float) -> float:
        """T(tokens), seconds."""
        ...

    def over(self, tokens: FloatArray) -> FloatArray:
        """T of each element, seconds."""
        ...

    def times(self, factor: float) -> Curve:
        """The curve with every duration multiplied by `factor`."""
        ...


@dataclass(frozen=True, slots=True)
class Quadratic:
    """T = constant_s + linear_s l + square_s l^2."""

    constant_s: float
    linear_s: float
    square_s: float

    @classmethod
    def fit(cls, points: Points) -> Quadratic:
        """Least squares with equal weights; needs three points."""
        tokens, seconds = zip(*points, strict=True)
        square, linear, constant = np.polyfit(tokens, seconds, 2)
        return cls(float(constant), float(linear), float(square))

    def at(self, tokens: float) -> float:
        return self.constant_s + tokens * (self.linear_s + tokens * self.square_s)

    def over(self, tokens: FloatArray) -> FloatArray:
        return self.constant_s + tokens * (self.linear_s + tokens * self.square_s)

    def times(self, factor: float) -> Quadratic:
        return Quadratic(self.constant_s * factor, self.linear_s * factor, self.square_s * factor)


@dataclass(frozen=True, slots=True)
class Linear:
    """Straight lines between points; the last one goes on beyond the last point.

    Below the first point the first line goes on to 0 tokens, but not below 0 seconds there.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Points) -> Linear:
        """At least two points, tokens rising."""
        (l0, t0), (l1, t1) = points[0], points[1]
        if l0 > 0:
            points = [(0.0, max(0.0, t0 - l0 * (t1 - t0) / (l1 - l0))), *points]
        tokens, seconds = zip(*points, strict=True)
        return cls(tuple(map(float, tokens)), tuple(map(float, seconds)))

    def at(self, tokens: float) -> float:
        knots, values = self.tokens, self.seconds
        i = min(max(bisect_right(knots, tokens) - 1, 0), len(knots) - 2)
        low, high = knots[i], knots[i + 1]
        return values[i] + (values[i + 1] - values[i]) * (tokens - low) / (high - low)

    def over(self, tokens: FloatArray) -> FloatArray:
        knots, values = np.asarray(self.tokens), np.asarray(self.seconds)
        i = np.clip(np.searchsorted(knots, tokens, side="right") - 1, 0, len(knots) - 2)
        share = (tokens - knots[i]) / (knots[i + 1] - knots[i])
        return np.asarray(values[i] + (values[i + 1] - values[i]) * share)

    def times(self, factor: float) -> Linear:
        return Linear(self.tokens, tuple(value * factor for value in self.seconds))


@dataclass(frozen=True, slots=True)
class LogLog:
    """Power laws between points; the last one goes on beyond the last point.

    Below the first point a power law would fall to 0 s at 0 tokens, where a real prefill still has
    its fixed cost: there the straight line through the first two points is used (`Linear`).
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    exponents: tuple[float, ...]
    start: Linear

    @classmethod
    def through(cls, points: Points) -> LogLog:
        """At least two points, tokens rising from above 0, seconds above 0."""
        tokens, seconds = zip(*points, strict=True)
        logs = np.log(np.asarray(points, dtype=np.float64))
        exponents = tuple(float(b[1] - a[1]) / float(b[0] - a[0]) for a, b in pairwise(logs))
        start = Linear.through(points[:2])
        return cls(tuple(map(float, tokens)), tuple(map(float, seconds)), exponents, start)

    def at(self, tokens: float) -> float:
        knots = self.tokens
        if tokens < knots[0]:
            return self.start.at(tokens)
        i = min(bisect_right(knots, tokens) - 1, len(knots) - 2)
        return self.seconds[i] * float((tokens / knots[i]) ** self.exponents[i])

    def over(self, tokens: FloatArray) -> FloatArray:
        knots = np.asarray(self.tokens)
        i = np.clip(np.searchsorted(knots, tokens, side="right") - 1, 0, len(knots) - 2)
        held = np.maximum(tokens, knots[0])
        powers = np.asarray(self.seconds)[i] * (held / knots[i]) ** np.asarray(self.exponents)[i]
        return np.where(tokens < knots[0], self.start.over(tokens), powers)

    def times(self, factor: float) -> LogLog:
        scaled = tuple(value * factor for value in self.seconds)
        return LogLog(self.tokens, scaled, self.exponents, self.start.times(factor))
