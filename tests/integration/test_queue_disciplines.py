"""Real workers take prompts by the queue discipline of the experiment, and no token changes.

All prompts come while the first chunk of the first is computed, which takes seconds; that they
did is read from the worker before the order is judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from harness import realtime
from harness.clock import run as run_virtually
from harness.experiment import Experiment, load_experiment
from harness.fleets.base import Fleet
from harness.fleets.local import LocalFleets
from harness.fleets.modelled import open_modelled
from harness.instances.remote import RemoteInstance
from harness.policies.static import Homogeneous
from harness.router import Router
from results.records import RequestRecord, Status
from workloads.request import Request

EXPERIMENT = """
name = "queues"
seed = 3
mode = "emulate"

[workload]
kind = "lognormal"
mu = 8.5
sigma = 0.7
output_tokens = 256

[slo]
ttft_s = 30.0

[emulate]
# A chunk of 8,192 tokens takes a second and more: time for all prompts to come.
time_scale = 1

[[configurations]]
name = "queues"
policy = "homogeneous"
n_prefill = 1
n_decode = 1
"""

#: By number: tokens, and seconds since the request arrived where it came in first.
FIRST, LONG, SHORT, MIDDLE, OLD = range(5)
PROMPTS = {
    FIRST: (32_000, 0.0),
    LONG: (16_000, 0.0),
    SHORT: (1_000, 0.0),
    MIDDLE: (6_000, 0.0),
    OLD: (2_000, 25.0),
}
EXPECTED = {
    "fifo": [FIRST, LONG, SHORT, MIDDLE, OLD],
    "shortest-first": [OLD, SHORT, MIDDLE, LONG, FIRST],
    "least-slack": [OLD, FIRST, LONG, MIDDLE, SHORT],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_workers_and_models_take_prompts_in_the_same_order(name: str, tmp_path: Path) -> None:
    path = tmp_path / "queues.toml"
    path.write_text(EXPERIMENT + f'queue = {{ discipline = "{name}" }}\n')
    experiment = load_experiment(str(path))
    assert run_virtually(_modelled(experiment)) == EXPECTED[name]
    order, facts, health = realtime.run(_emulated(experiment, tmp_path))
    assert order == EXPECTED[name]
    assert facts["queue_discipline"] == health["queue_discipline"] == name


async def _modelled(experiment: Experiment) -> list[int]:
    fleet = await open_modelled(experiment, experiment.configurations[0])
    assert fleet.facts()["queue_discipline"] == experiment.configurations[0].queue.discipline

    async def all_here(_: int) -> None:
        await asyncio.sleep(0.001)

    return await _serve_all(fleet, all_here)


async def _emulated(
    experiment: Experiment, folder: Path
) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    fleet = await LocalFleets(experiment, folder).open(experiment, experiment.configurations[0])
    try:
        worker = fleet.instances["pd-0"]
        assert isinstance(worker, RemoteInstance)

        async def all_here(count: int) -> None:
            async with asyncio.timeout(30):
                while True:
                    stats = await worker.stats()
                    if stats["jobs"] == count and stats["running"] == 1:
                        return
                    await asyncio.sleep(0.005)

        order = await _serve_all(fleet, all_here)
        async with worker._session.get("/health") as response:
            health = await response.json()
        return order, fleet.facts(), health
    finally:
        await fleet.close()


async def _serve_all(fleet: Fleet, all_here: Callable[[int], Awaitable[None]]) -> list[int]:
    """Numbers of the prompts in the order in which their prefills ended. `all_here(n)` returns
    when n are at the instance and only the first has begun."""
    loop = asyncio.get_running_loop()
    router = Router(Homogeneous(), fleet.view, fleet.instances, fleet.links)
    served = []
    for number, (tokens, waited_s) in PROMPTS.items():
        request = Request(number, 0.0, tokens, 256)
        record = RequestRecord(number, 0.0, tokens, 256)
        origin_s = loop.time() - waited_s
        serving = asyncio.ensure_future(router.serve(request, record, origin_s))
        served.append((request, record, origin_s, serving))
        await all_here(number + 1)
    ended: list[tuple[float, int]] = []
    for request, record, origin_s, serving in served:
        await serving
        assert record.status is Status.SUCCEEDED, record.failure
        assert record.prefill_finished_s is not None
        ended.append((origin_s + record.prefill_finished_s, request.id))
        if fleet.verify is not None:
            assert record.token_ids is not None
            assert await fleet.verify(request, record.token_ids)
    return [number for _, number in sorted(ended)]
