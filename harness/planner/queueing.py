"""TTFT under load: an estimate for first-come-first-served pools with several servers (GI/G/k).

Mean wait (Allen and Cunneen 1978): E[W] = C(k, rho) / (1 - rho) x E[S] / k x (c_a^2 + c_s^2) / 2,
with Erlang's C, the chance of waiting in M/M/k. It is exact for M/M/k and, at k = 1, for M/G/1
(Pollaczek-Khinchine). The wait of those who wait is taken as exponential with mean E[W] / C, as in
heavy traffic (Kingman; Whitt 1993); it is independent of a request's own service time.

What it leaves out: decode admission, sharing of the link, and what length-aware routing within
a pool does. Good for shapes and orders of magnitude; `simulate` gives the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.planner.link import LinkModel
from harness.planner.model import Capacity, Deployment, Shape, Stage
from harness.planner.ttft import Ttft, stage_ttft
from harness.profiles.curves import FloatArray

#: Equally likely lengths that stand for a stage's distribution.
_LENGTHS = 2000
_BISECTIONS = 60


def erlang_c(servers: int, load: float) -> float:
    """Chance that an arrival waits in M/M/k; `load` is arrival rate x mean service time."""
    if load >= servers:
        return 1.0
    blocking = 1.0
    for n in range(1, servers + 1):
        blocking = load * blocking / (n + load * blocking)
    return blocking / (1 - load / servers * (1 - blocking))


@dataclass(frozen=True, slots=True)
class Queue:
    """One pool: a fraction `waits` of its requests waits, on average `wait_if_s`."""

    waits: float
    wait_if_s: float

    @property
    def mean_wait_s(self) -> float:
        return self.waits * self.wait_if_s


def pool_queue(
    servers: int, arrival_per_s: float, mean_s: float, service_cv2: float, arrival_cv2: float
) -> Queue:
    """`mean_s` and `service_cv2` (squared coefficient of variation) are of the service time."""
    load = arrival_per_s * mean_s
    if load >= servers:
        return Queue(1.0, math.inf)
    waits = erlang_c(servers, load)
    wait_if_s = mean_s / (servers - load) * (arrival_cv2 + service_cv2) / 2
    return Queue(waits, wait_if_s)


def loaded_ttft(
    deployment: Deployment, capacity: Capacity, rate_per_s: float, arrival_cv: float = 1.0
) -> Ttft:
    """TTFT at `rate_per_s` requests/s, all of them; infinite at or over the prefill capacity.

    `arrival_cv` is the coefficient of variation of the gaps between requests (1: Poisson). A
    stage that gets a share p of them at random sees p cv^2 + 1 - p.
    """
    parts = []
    if capacity.shape is Shape.BALANCED and len(capacity.stages) > 1:
        queue = _joint_queue(deployment, capacity.stages, rate_per_s, arrival_cv)
        parts = [(stage, queue) for stage in capacity.stages]
    else:
        for stage in capacity.stages:
            mean_s, second = _moments(deployment, stage)
            arrival_cv2 = stage.share * arrival_cv**2 + 1 - stage.share
            queue = pool_queue(
                stage.n_instances,
                rate_per_s * stage.share,
                mean_s,
                second / mean_s**2 - 1,
                arrival_cv2,
            )
            parts.append((stage, queue))
    if any(math.isinf(queue.wait_if_s) for _, queue in parts):
        return Ttft(math.inf, math.inf, math.inf, math.inf)
    return _mixture(deployment, parts)


def _moments(deployment: Deployment, stage: Stage) -> tuple[float, float]:
    """E[T], E[T^2] of the stage's prefills, seconds."""
    profile = stage.profile
    expect = deployment.lengths.expect
    return (
        expect(profile.prefill_array_s, stage.low, stage.high),
        expect(lambda tokens: profile.prefill_array_s(tokens) ** 2, stage.low, stage.high),
    )


def _joint_queue(
    deployment: Deployment, stages: Sequence[Stage], rate_per_s: float, arrival_cv: float
) -> Queue:
    """Length-blind: one queue in front of all instances, service times mixed by their shares."""
    moments = [_moments(deployment, stage) for stage in stages]
    rates = [stage.n_instances / mean for stage, (mean, _) in zip(stages, moments, strict=True)]
    shares = [rate / sum(rates) for rate in rates]
    mean_s = sum(share * mean for share, (mean, _) in zip(shares, moments, strict=True))
    second = sum(share * value for share, (_, value) in zip(shares, moments, strict=True))
    servers = sum(stage.n_instances for stage in stages)
    return pool_queue(servers, rate_per_s, mean_s, second / mean_s**2 - 1, arrival_cv**2)


def _mixture(deployment: Deployment, parts: Sequence[tuple[Stage, Queue]]) -> Ttft:
    services, weights, waits, means = [], [], [], []
    for stage, queue in parts:
        service_s = _typical_services(deployment, stage, deployment.link)
        services.append(service_s)
        weights.append(np.full(service_s.size, stage.share / service_s.size))
        waits.append(np.full(service_s.size, queue.waits))
        means.append(np.full(service_s.size, queue.wait_if_s))
    service_s, weight = np.concatenate(services), np.concatenate(weights)
    waiting, wait_if_s = np.concatenate(waits), np.concatenate(means)
    mean_s = float(np.sum(weight * (service_s + waiting * wait_if_s)))

    def over(seconds: float) -> float:
        left_s = seconds - service_s
        tail = waiting * np.exp(-np.maximum(left_s, 0) / np.maximum(wait_if_s, 1e-300))
        return float(np.sum(weight * np.where(left_s < 0, 1.0, tail)))

    def quantile(q: float) -> float:
        low, high = 0.0, float(service_s.max()) + 1.0
        while over(high) > 1 - q:
            high *= 2
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if over(middle) > 1 - q else (low, middle)
        return high

    return Ttft(mean_s, quantile(0.5), quantile(0.9), quantile(0.99))


def _typical_services(deployment: Deployment, stage: Stage, link: LinkModel) -> FloatArray:
    lengths = deployment.lengths
    low = 0.0 if stage.low is None else lengths.cdf(stage.low)
    high = 1.0 if stage.high is None else lengths.cdf(stage.high)
    q = low + (np.arange(_LENGTHS) + 0.5) / _LENGTHS * (high - low)
    tokens = np.array([lengths.quantile(float(value)) for value in q])
    return stage_ttft(stage, link, tokens)


def highest_rate(
    deployment: Deployment,
    capacity: Capacity,
    p90_s: float,
    arrival_cv: float = 1.0,
    tolerance: float = 1e-3,
) -> float:
    """The highest requests/s at which the estimated TTFT P90 is at most `p90_s`; 0 if none."""
    low, high = 0.0, capacity.requests_per_s
    if loaded_ttft(deployment, capacity, high * tolerance, arrival_cv).p90_s > p90_s:
        return 0.0
    while high - low > tolerance * capacity.requests_per_s:
        middle = (low + high) / 2
        if loaded_ttft(deployment, capacity, middle, arrival_cv).p90_s <= p90_s:
            low = middle
        else:
            high = middle
    return low
