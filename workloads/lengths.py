"""Length distributions: what the throughput model asks of them, and how workloads draw from them.

L is a number of tokens. A conditional mean over an event of probability 0 is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from workloads.errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Draws that share one set of quantile strata in stratified sampling.
STRATA = 64
#: A narrower log-normal is one length; a wider one fills the 64-bit range with its moments.
LEAST_SIGMA, MOST_SIGMA = 1e-3, 5.0
_PANELS = 512
#: Beyond so many standard deviations from the likeliest place there is no mass worth panels.
_REACH_Z = 12.0
#: A smaller probability has lost the digits that quotients of it need.
_LEAST_MASS = 1e-290
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(8)


class LengthDistribution(Protocol):
    """A distribution of lengths in tokens, as the planner and the generators use it."""

    def mean(self) -> float:
        """E[L]."""
        ...

    def cdf(self, tokens: float) -> float:
        """P(L <= tokens)."""
        ...

    def tail(self, tokens: float) -> float:
        """P(L > tokens)."""
        ...

    def quantile(self, q: float) -> float:
        """The least x with P(L <= x) >= q, for 0 <= q <= 1."""
        ...

    def mean_above(self, tokens: float) -> float:
        """E[L | L > tokens]."""
        ...

    def mean_below(self, tokens: float) -> float:
        """E[L | L <= tokens]."""
        ...

    def expect(
        self,
        fn: Callable[[FloatArray], FloatArray],
        low: float | None = None,
        high: float | None = None,
    ) -> float:
        """E[fn(L) | low < L <= high]; `fn` maps an array of lengths to an array of its shape."""
        ...

    def sample(self, rng: np.random.Generator, n: int, stratified: bool = False) -> IntArray:
        """`n` lengths in whole tokens; see `uniforms` for what `stratified` means."""
        ...


def uniforms(rng: np.random.Generator, n: int, stratified: bool = False) -> FloatArray:
    """`n` uniform draws on [0, 1).

    Stratified: each block of STRATA draws has one draw in each of STRATA equal intervals, in random
    order. Each draw alone is still uniform, so means stay unbiased while their variance falls
    (variance reduction by stratification); draws inside a block are no longer independent, so
    such a workload understates the clustering of long requests.
    """
    if not stratified:
        return rng.random(n)
    blocks = -(-n // STRATA)
    strata = rng.permuted(np.tile(np.arange(STRATA), (blocks, 1)), axis=1)
    return ((strata + rng.random((blocks, STRATA))) / STRATA).ravel()[:n]


def truncated_lognormal_quantile(
    q: ArrayLike, mu: ArrayLike, sigma: float, min_tokens: float, max_tokens: float
) -> FloatArray:
    """Quantiles of a log-normal truncated to [min_tokens, max_tokens]; `q` and `mu` broadcast."""
    low_z = (np.log(min_tokens) - np.asarray(mu)) / sigma
    high_z = (np.log(max_tokens) - np.asarray(mu)) / sigma
    # In the upper tail the mirrored distribution keeps the digits that 1 - small would lose.
    side = np.where(low_z > 0, -1.0, 1.0)
    low, high = ndtr(side * low_z), ndtr(side * high_z)
    z = side * ndtri(low + np.asarray(q) * (high - low))
    lengths: FloatArray = np.clip(np.exp(mu + sigma * z), min_tokens, max_tokens)
    return lengths


def _mass(low_z: float, high_z: float) -> float:
    """P(low_z < Z <= high_z) of a standard normal, without cancellation in the upper tail."""
    low, high = (-high_z, -low_z) if low_z > 0 else (low_z, high_z)
    mass = float(ndtr(high) - ndtr(low))
    return mass if mass >= _LEAST_MASS else 0.0


@dataclass(frozen=True)
class TruncatedLogNormal:
    """exp(N(mu, sigma^2)) conditioned to [min_tokens, max_tokens]. Samples are rounded."""

    mu: float = 9.90
    sigma: float = 1.00
    min_tokens: int = 128
    max_tokens: int = 131_072

    def __post_init__(self) -> None:
        if not LEAST_SIGMA <= self.sigma <= MOST_SIGMA:
            raise InputError(
                f"sigma: found {self.sigma}, needs {LEAST_SIGMA:g} to {MOST_SIGMA:g}; for one "
                "length use a fixed one"
            )
        if not 1 <= self.min_tokens < self.max_tokens:
            raise InputError(
                f"min_tokens, max_tokens: found {self.min_tokens}, {self.max_tokens}; "
                "needs 1 <= min_tokens < max_tokens"
            )
        if not self._total > 0:
            raise InputError(
                f"mu: found {self.mu}, which leaves no probability between "
                f"{self.min_tokens} and {self.max_tokens} tokens"
            )

    def _z(self, tokens: float) -> float:
        clipped = min(max(tokens, self.min_tokens), self.max_tokens)
        return float((np.log(clipped) - self.mu) / self.sigma)

    @cached_property
    def _total(self) -> float:
        return _mass(self._z(self.min_tokens), self._z(self.max_tokens))

    def _mean_between(self, low: float, high: float) -> float:
        """E[L | low < L <= high] = e^(mu + sigma^2/2) P(z - sigma in interval) / P(interval)."""
        low_z, high_z = self._z(low), self._z(high)
        mass = _mass(low_z, high_z)
        if mass <= 0:
            return float("nan")
        scale = float(np.exp(self.mu + self.sigma**2 / 2))
        return scale * _mass(low_z - self.sigma, high_z - self.sigma) / mass

    def mean(self) -> float:
        return self._mean_between(self.min_tokens, self.max_tokens)

    def cdf(self, tokens: float) -> float:
        return _mass(self._z(self.min_tokens), self._z(tokens)) / self._total

    def tail(self, tokens: float) -> float:
        return _mass(self._z(tokens), self._z(self.max_tokens)) / self._total

    def quantile(self, q: float) -> float:
        _check_quantile(q)
        return float(
            truncated_lognormal_quantile(q, self.mu, self.sigma, self.min_tokens, self.max_tokens)
        )

    def mean_above(self, tokens: float) -> float:
        return self._mean_between(tokens, self.max_tokens)

    def mean_below(self, tokens: float) -> float:
        return self._mean_between(self.min_tokens, tokens)

    def expect(
        self,
        fn: Callable[[FloatArray], FloatArray],
        low: float | None = None,
        high: float | None = None,
    ) -> float:
        """Composite Gauss-Legendre quadrature over z; kinks of `fn` cost under 1e-6 relative."""
        low_z = self._z(self.min_tokens if low is None else low)
        high_z = self._z(self.max_tokens if high is None else high)
        mass = _mass(low_z, high_z)
        if mass <= 0:
            return float("nan")
        low_z, high_z = (
            max(low_z, min(-_REACH_Z, high_z - _REACH_Z)),
            min(high_z, max(_REACH_Z, low_z + _REACH_Z)),
        )
        edges = np.linspace(low_z, high_z, _PANELS + 1)
        half = (high_z - low_z) / (2 * _PANELS)
        z = ((edges[:-1] + half)[:, None] + half * _NODES).ravel()
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        values = fn(np.exp(self.mu + self.sigma * z))
        return float(np.sum(np.tile(_NODE_WEIGHTS, _PANELS) * density * values) * half / mass)

    def sample(self, rng: np.random.Generator, n: int, stratified: bool = False) -> IntArray:
        draws = truncated_lognormal_quantile(
            uniforms(rng, n, stratified), self.mu, self.sigma, self.min_tokens, self.max_tokens
        )
        return np.rint(draws).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Empirical:
    """The lengths that were seen, each with a weight (1 by default). Queries cost O(log n)."""

    values: ArrayLike
    weights: ArrayLike | None = None
    _lengths: FloatArray = field(init=False, repr=False)
    _share: FloatArray = field(init=False, repr=False)
    _cumulative: FloatArray = field(init=False, repr=False)
    _moment: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        values = np.asarray(self.values, dtype=np.float64)
        weights = np.ones_like(values) if self.weights is None else np.asarray(self.weights, float)
        if values.ndim != 1 or values.size == 0:
            raise InputError(f"lengths: found {values.size} values, needs at least one")
        if weights.shape != values.shape or not (weights >= 0).all() or not weights.sum() > 0:
            raise InputError("weights: needs one weight >= 0 for each length, not all zero")
        lengths, where = np.unique(values, return_inverse=True)
        share = np.bincount(where, weights=weights) / weights.sum()
        lengths, share = lengths[share > 0], share[share > 0]
        fields = {
            "_lengths": lengths,
            "_share": share,
            "_cumulative": np.concatenate(([0.0], np.cumsum(share))),
            "_moment": np.concatenate(([0.0], np.cumsum(share * lengths))),
        }
        for name, array in fields.items():
            object.__setattr__(self, name, array)

    def support(self) -> FloatArray:
        """The lengths of any weight, ascending."""
        return self._lengths

    def _up_to(self, tokens: float) -> int:
        return int(np.searchsorted(self._lengths, tokens, side="right"))

    def mean(self) -> float:
        return float(self._moment[-1])

    def cdf(self, tokens: float) -> float:
        return float(self._cumulative[self._up_to(tokens)])

    def tail(self, tokens: float) -> float:
        index = self._up_to(tokens)
        return 0.0 if index == self._lengths.size else float(1.0 - self._cumulative[index])

    def quantile(self, q: float) -> float:
        _check_quantile(q)
        index = int(np.searchsorted(self._cumulative[1:], q * (1 - 1e-12), side="left"))
        return float(self._lengths[min(index, self._lengths.size - 1)])

    def _mean_between(self, low: int, high: int) -> float:
        if low >= high:
            return float("nan")
        mass = self._cumulative[high] - self._cumulative[low]
        return float((self._moment[high] - self._moment[low]) / mass)

    def mean_above(self, tokens: float) -> float:
        return self._mean_between(self._up_to(tokens), self._lengths.size)

    def mean_below(self, tokens: float) -> float:
        return self._mean_between(0, self._up_to(tokens))

    def expect(
        self,
        fn: Callable[[FloatArray], FloatArray],
        low: float | None = None,
        high: float | None = None,
    ) -> float:
        start = 0 if low is None else self._up_to(low)
        stop = self._lengths.size if high is None else self._up_to(high)
        if start >= stop:
            return float("nan")
        share = self._share[start:stop]
        return float(np.sum(share * fn(self._lengths[start:stop])) / share.sum())

    def sample(self, rng: np.random.Generator, n: int, stratified: bool = False) -> IntArray:
        draws = uniforms(rng, n, stratified)
        index = np.searchsorted(self._cumulative[1:], draws, side="right")
        picked = self._lengths[np.minimum(index, self._lengths.size - 1)]
        return np.rint(picked).astype(np.int64)


class Fixed(Empirical):
    """Every length is `tokens`."""

    def __init__(self, tokens: int) -> None:
        if tokens < 1:
            raise InputError(f"tokens: found {tokens}, needs at least 1")
        super().__init__((tokens,))

    def __repr__(self) -> str:
        return f"Fixed({int(self._lengths[0])})"


def _check_quantile(q: float) -> None:
    if not 0 <= q <= 1:
        raise InputError(f"quantile: found {q}, needs a number from 0 to 1")
