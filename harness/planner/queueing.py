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

from harness.planner.model import Capacity, Deployment, Shape, Stage
from harness.planner.ttft import Ttft, stage_ttft
from harness.profiles.curves import FloatArray

#: Equally likely lengths that stand for a stage's distribution.
_LENGTHS = 500
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


class LoadedTtft:
    """The estimate for one configuration at any rate; what does not depend on it is kept.

    `arrival_cv` is the coefficient of variation of the gaps between requests (1: Poisson). A
    stage that gets a share p of them at random sees p cv^2 + 1 - p.
    """

    def __init__(self, deployment: Deployment, capacity: Capacity, arrival_cv: float = 1.0) -> None:
        self._capacity = capacity
        self._arrival_cv2 = arrival_cv**2
        self._services = [_services(deployment, stage) for stage in capacity.stages]
        self._weights = [
            np.full(row.typical_s.size, stage.share / row.typical_s.size)
            for stage, row in zip(capacity.stages, self._services, strict=True)
        ]

    def at(self, rate_per_s: float) -> Ttft:
        """TTFT over all requests at `rate_per_s`; infinite where a queue grows without end."""
        queues = self._queues(rate_per_s)
        if self._overloads(rate_per_s) or any(math.isinf(queue.wait_if_s) for queue in queues):
            return Ttft(math.inf, math.inf, math.inf, math.inf)
        sizes = [row.typical_s.size for row in self._services]
        return _mixture(
            np.concatenate([row.typical_s for row in self._services]),
            np.concatenate(self._weights),
            np.repeat([queue.waits for queue in queues], sizes),
            np.repeat([queue.wait_if_s for queue in queues], sizes),
        )

    def _overloads(self, rate_per_s: float) -> bool:
        """Whether the link or decode, whose queues are not modelled, cannot follow at all."""
        links = [stage for stage in self._capacity.stages if stage.link_bound]
        return rate_per_s >= self._capacity.decode_per_s or any(
            rate_per_s >= stage.rate_at_capacity() for stage in links
        )

    def _queues(self, rate_per_s: float) -> list[Queue]:
        stages = self._capacity.stages
        if self._capacity.shape is Shape.BALANCED:
            joint = _joint_queue(stages, self._services, rate_per_s, self._arrival_cv2)
            return [joint] * len(stages)
        return [
            pool_queue(
                stage.n_instances,
                rate_per_s * stage.share,
                row.mean_s,
                row.second_s2 / row.mean_s**2 - 1,
                stage.share * self._arrival_cv2 + 1 - stage.share,
            )
            for stage, row in zip(stages, self._services, strict=True)
        ]


def loaded_ttft(
    deployment: Deployment, capacity: Capacity, rate_per_s: float, arrival_cv: float = 1.0
) -> Ttft:
    """`LoadedTtft` at one rate, requests/s of all."""
    return LoadedTtft(deployment, capacity, arrival_cv).at(rate_per_s)


@dataclass(frozen=True, slots=True)
class _Services:
    """Moments of the time a request holds an instance, and its TTFT without a queue at equally
    likely lengths."""

    mean_s: float
    second_s2: float
    typical_s: FloatArray


def _services(deployment: Deployment, stage: Stage) -> _Services:
    lengths, profile = deployment.lengths, stage.profile
    low = 0.0 if stage.low is None else lengths.cdf(stage.low)
    high = 1.0 if stage.high is None else lengths.cdf(stage.high)
    q = low + (np.arange(_LENGTHS) + 0.5) / _LENGTHS * (high - low)
    tokens = np.array([lengths.quantile(float(value)) for value in q])
    return _Services(
        lengths.expect(profile.prefill_array_s, stage.low, stage.high),
        lengths.expect(lambda of: profile.prefill_array_s(of) ** 2, stage.low, stage.high),
        stage_ttft(stage, deployment.link, tokens),
    )


def _joint_queue(
    stages: Sequence[Stage],
    services: Sequence[_Services],
    rate_per_s: float,
    arrival_cv2: float,
) -> Queue:
    """Length-blind: one queue in front of all instances, service times mixed by their rates."""
    rates = np.array(
        [stage.n_instances / row.mean_s for stage, row in zip(stages, services, strict=True)]
    )
    shares = rates / rates.sum()
    mean_s = float(shares @ [row.mean_s for row in services])
    second_s2 = float(shares @ [row.second_s2 for row in services])
    servers = sum(stage.n_instances for stage in stages)
    return pool_queue(servers, rate_per_s, mean_s, second_s2 / mean_s**2 - 1, arrival_cv2)


def _mixture(
    service_s: FloatArray, weight: FloatArray, waiting: FloatArray, wait_if_s: FloatArray
) -> Ttft:
    """TTFT of requests of `weight` that serve for `service_s` after an exponential wait of mean
    `wait_if_s` with probability `waiting`."""
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


def highest_rate(
    deployment: Deployment,
    capacity: Capacity,
    p90_s: float,
    arrival_cv: float = 1.0,
    tolerance: float = 1e-3,
) -> float:
    """The highest requests/s at which the estimated TTFT P90 is at most `p90_s`; 0 if none."""
    estimate = LoadedTtft(deployment, capacity, arrival_cv)
    low, high = 0.0, capacity.requests_per_s
    if estimate.at(high * tolerance).p90_s > p90_s:
        return 0.0
    while high - low > tolerance * capacity.requests_per_s:
        middle = (low + high) / 2
        if estimate.at(middle).p90_s <= p90_s:
            low = middle
        else:
            high = middle
    return low
