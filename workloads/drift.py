"""Lengths whose distribution drifts over the day, and the distribution at any time of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

import numpy as np

from workloads.kinds import DriftWorkload
from workloads.lengths import (
    Empirical,
    FloatArray,
    TruncatedLogNormal,
    truncated_lognormal_quantile,
    uniforms,
)

_CHUNK = 512


def mean_at(workload: DriftWorkload, time_s: float) -> float:
    """The mean length in force at `time_s`: a cosine from mean_from to mean_to and back."""
    swing = (1 - math.cos(2 * math.pi * time_s / workload.period_s)) / 2
    return workload.mean_from + (workload.mean_to - workload.mean_from) * swing


@lru_cache(maxsize=16)
def _mu_table(sigma: float, min_tokens: int, max_tokens: int) -> tuple[FloatArray, FloatArray]:
    """Means of truncated log-normals (ascending) and the mu of each."""
    mus = np.linspace(math.log(min_tokens) - sigma, math.log(max_tokens) + 6 * sigma**2 + 1, 1025)
    means = [TruncatedLogNormal(mu, sigma, min_tokens, max_tokens).mean() for mu in mus]
    return np.asarray(means), mus


def _mu(workload: DriftWorkload, mean: float) -> float:
    means, mus = _mu_table(workload.sigma, workload.min_tokens, workload.max_tokens)
    return float(np.interp(mean, means, mus))


def lengths_at(workload: DriftWorkload, time_s: float) -> TruncatedLogNormal:
    """The length distribution in force at `time_s` (what a planner with perfect knowledge sees)."""
    mu = _mu(workload, mean_at(workload, time_s))
    return TruncatedLogNormal(mu, workload.sigma, workload.min_tokens, workload.max_tokens)


def lengths_over_a_period(workload: DriftWorkload) -> Empirical:
    """The lengths of a whole period at a steady rate: quantiles at 96 times of it."""
    times = (np.arange(96) + 0.5) / 96 * workload.period_s
    q = (np.arange(256) + 0.5) / 256
    mus = np.array([[_mu(workload, mean_at(workload, time))] for time in times])
    return Empirical(
        truncated_lognormal_quantile(
            q, mus, workload.sigma, workload.min_tokens, workload.max_tokens
        ).ravel()
    )


def drifting(
    workload: DriftWorkload, times_s: Iterator[float], rng: np.random.Generator
) -> Iterator[tuple[float, int]]:
    """(arrival_s, input_tokens) for each arrival time."""
    while chunk := list(islice(times_s, _CHUNK)):
        draws = uniforms(rng, _CHUNK, workload.stratified)[: len(chunk)]
        mus = np.array([_mu(workload, mean_at(workload, time)) for time in chunk])
        tokens = truncated_lognormal_quantile(
            draws, mus, workload.sigma, workload.min_tokens, workload.max_tokens
        )
        yield from zip(chunk, np.rint(tokens).astype(int).tolist(), strict=True)
