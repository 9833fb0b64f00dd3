"""The simulator against queueing theory: waits within their confidence interval of closed forms.

Each run is cut into batches whose means are nearly independent; the theory must lie within the 99 %
confidence interval of their mean by Student's t (all seeds are fixed, so a pass stays a pass).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from harness.clock import run
from harness.fleets.modelled import build_fleet
from harness.instances.modelled import ModelledInstance
from harness.policies.static import Homogeneous
from harness.ports import DecodeJob, InstanceSpec, PrefillDone, PrefillJob, Role
from harness.replay import replay
from harness.router import Router
from workloads.request import Request

#: Service times are prompts of so many tokens, a microsecond each.
TOKEN_S = 1e-6


@dataclass(frozen=True)
class Server:
    """Prefill takes a microsecond a token; decode ends with the first token."""

    max_batch: int = 10_000
    kv_memory_bytes: float | None = None
    n_layers: int = 1

    def prefill_s(self, input_tokens, cached_tokens=0):
        return input_tokens * TOKEN_S

    def kv_bytes(self, tokens, held_tokens=0):
        return 0.0

    def decode_step_s(self, batch, context_tokens):
        return 1e-6


def waits(servers: int, arrival_rate: float, service_s: np.ndarray, seed: int) -> np.ndarray:
    """Queueing times (s) of Poisson arrivals at `servers` modelled prefill instances, FIFO."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / arrival_rate, len(service_s)))
    tokens = np.maximum(1, np.rint(service_s / TOKEN_S)).astype(int)
    requests = [
        Request(i, float(at_s), int(n), 1)
        for i, (at_s, n) in enumerate(zip(arrivals, tokens, strict=True))
    ]
    records = []

    async def main():
        specs = [InstanceSpec(f"p-{i}", "pd", Role.PREFILL, "") for i in range(servers)]
        specs.append(InstanceSpec("d", "pd", Role.DECODE, ""))
        fleet = build_fleet(specs, {"pd": Server()}, {})
        router = Router(Homogeneous(), fleet.view, fleet.instances, fleet.links)
        await replay(requests, router.serve, records.append, origin_s=0.0)

    run(main())
    records.sort(key=lambda record: record.id)
    return np.array([record.prefill_started_s - record.scheduled_s for record in records])


def assert_mean(values: np.ndarray, expected: float, batches: int = 40) -> None:
    values = values[len(values) // 20 :]  # the empty start
    means = np.array([batch.mean() for batch in np.array_split(values, batches)])
    error = means.std(ddof=1) / math.sqrt(batches)
    within = stats.t.ppf(0.995, batches - 1) * error
    assert abs(means.mean() - expected) < within, (means.mean(), expected, error)
    assert error < 0.12 * expected  # an interval wide enough for anything proves nothing


def pollaczek_khinchine(rate: float, mean_s: float, mean_square_s2: float) -> float:
    """Mean wait of M/G/1: rate E[S^2] / (2 (1 - rate E[S]))."""
    return rate * mean_square_s2 / (2 * (1 - rate * mean_s))


def erlang_c(servers: int, offered: float) -> float:
    """Probability of waiting in M/M/k with `offered` = rate x mean service."""
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return last / (sum(terms) + last)


def exponential(rng):
    return rng.exponential(1.0, 20_000)


def constant(rng):
    return np.full(20_000, 1.0)


def log_normal(rng):
    return rng.lognormal(-0.5, 1.0, 20_000)  # mean 1, E[S^2] = e


@pytest.mark.parametrize(
    ("service", "rate", "expected"),
    [
        # M/M/1: rho / (mu - lambda)
        (exponential, 0.7, 0.7 / 0.3),
        # M/D/1: rho / (2 mu (1 - rho))
        (constant, 0.7, 0.7 / (2 * 0.3)),
        (log_normal, 0.6, pollaczek_khinchine(0.6, 1.0, math.e)),
    ],
    ids=["M/M/1", "M/D/1", "M/G/1"],
)
def test_mean_wait_of_one_server(service: Callable, rate: float, expected: float) -> None:
    service_s = service(np.random.default_rng(11))
    assert_mean(waits(1, rate, service_s, seed=12), expected)


def test_mean_wait_and_probability_of_waiting_of_four_servers() -> None:
    # The router sends to the least predicted wait: one FIFO queue when predictions are exact.
    rate, servers = 3.0, 4
    service_s = np.random.default_rng(21).exponential(1.0, 30_000)
    values = waits(servers, rate, service_s, seed=22)
    waiting = erlang_c(servers, rate)
    assert erlang_c(4, 3.0) == pytest.approx(0.50943, abs=1e-5)
    assert_mean(values, waiting / (servers - rate))
    assert_mean((values > 1e-9).astype(float), waiting)


def test_decode_batch_is_a_queue_with_as_many_servers() -> None:
    """With steps that do not depend on the batch, a batch of k is M/M/k."""
    rate, servers, step_s = 3.0, 4, 0.002

    @dataclass(frozen=True)
    class Decoder(Server):
        max_batch: int = servers

        def decode_step_s(self, batch, context_tokens):
            return step_s

    rng = np.random.default_rng(31)
    n = 20_000
    arrivals = np.cumsum(rng.exponential(1 / rate, n))
    # A geometric number of steps is the exponential's discrete twin, with the mean of 1 s.
    steps = rng.geometric(step_s, n)
    waited = np.zeros(n)

    async def main():
        loop = asyncio.get_running_loop()
        prefill = ModelledInstance(InstanceSpec("p", "pd", Role.PREFILL, ""), Server())
        decode = ModelledInstance(InstanceSpec("d", "pd", Role.DECODE, ""), Decoder())

        async def one(i):
            request = Request(i, 0.0, 0, int(steps[i]) + 1)
            done: PrefillDone = await prefill.prefill(
                PrefillJob(request, 1, 0, 0, decode, None, 0.0)
            )
            tokens = await decode.decode(DecodeJob(request, 1, done))
            waited[i] = tokens.admitted_s - arrivals[i]

        tasks = []
        for i in range(n):
            delay_s = arrivals[i] - loop.time()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            tasks.append(asyncio.create_task(one(i)))
        await asyncio.gather(*tasks)

    run(main())
    # Admission waits for a step boundary: half a step on average when there is a free place.
    assert_mean(waited, erlang_c(servers, rate) / (servers - rate) + step_s / 2)
