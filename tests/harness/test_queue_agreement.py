"""The engine's scheduler and the modelled instance take the same arrivals in the same order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.pool import HybridPool
from engine.disciplines import DISCIPLINES, Discipline, make_discipline
from engine.pacing import Pacing
from engine.prefill_time import PacedTime
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence
from harness.clock import run
from harness.instances.modelled import ModelledInstance
from harness.instances.modelled_prefill import PrefillRules
from harness.ports import DecodeJob, InstanceSpec, PrefillJob, Role
from workloads.request import Request

CHUNK_TOKENS, PAGE_TOKENS = 512, 8
PACING = Pacing.from_json(
    {
        "prefill": {"quadratic_s": [0.05, 1e-3, 1e-7]},
        "decode": {"step_s": 0.01, "max_batch": 64},
    }
)


@dataclass(frozen=True)
class Device:
    """The device that the pacing file describes."""

    max_batch: int = 64
    kv_memory_bytes: float | None = None
    n_layers: int = 4

    def prefill_s(self, input_tokens: float, cached_tokens: float = 0) -> float:
        return PACING.prefill_s(input_tokens, cached_tokens)

    def kv_bytes(self, tokens: float, held_tokens: float = 0) -> float:
        return float(tokens - held_tokens)

    def decode_step_s(self, batch: int, context_tokens: float) -> float:
        return 0.01


#: (when it arrives, how long it waited before it came here, tokens)
Arrival = tuple[float, float, int]
Finished = list[tuple[int, float]]


def simulated(discipline: Discipline, arrivals: list[Arrival]) -> Finished:
    async def main() -> Finished:
        rules = PrefillRules(chunk_tokens=CHUNK_TOKENS, discipline=discipline)
        p = ModelledInstance(InstanceSpec("p", "pd", Role.PREFILL, ""), Device(), rules)
        d = ModelledInstance(InstanceSpec("d", "pd", Role.DECODE, ""), Device())
        order: Finished = []

        async def one(number: int, at_s: float, waited_s: float, tokens: int) -> None:
            await asyncio.sleep(at_s)
            request = Request(number, at_s, tokens, 1)
            done = await p.prefill(PrefillJob(request, 1, 0, 0, d, None, at_s - waited_s))
            order.append((number, done.finished_s))
            await d.decode(DecodeJob(request, 1, done))

        await asyncio.gather(*(one(i, *arrival) for i, arrival in enumerate(arrivals)))
        return order

    return run(main())


def scheduled(discipline: Discipline, arrivals: list[Arrival]) -> Finished:
    """The engine's scheduler, where each step takes as long as the engine paces it to."""
    pool = HybridPool(10_000, 256, PAGE_TOKENS, first_page=1, first_slot=1)
    limits = Limits(256, CHUNK_TOKENS, one_prompt=True)
    times = PacedTime(PACING)
    scheduler = Scheduler(pool, limits, discipline, times.left_s)
    coming = [
        (at_s, Sequence(str(i), [i] * tokens, 1, hand_over=True, arrived_s=at_s - waited_s))
        for i, (at_s, waited_s, tokens) in enumerate(arrivals)
    ]
    now_s, order = 0.0, Finished()
    while coming or len(scheduler):
        while coming and coming[0][0] <= now_s:
            scheduler.add(coming.pop(0)[1])
        step = scheduler.schedule()
        if not step.items:
            now_s = coming[0][0]
            continue
        (item,) = step.items
        now_s += times.chunk_s(item.sequence, item.start, item.stop)
        for sequence in scheduler.complete(step, [0] * item.samples):
            order.append((int(sequence.id), now_s))
            sequence.drop_memory()
    return order


@st.composite
def arrival_lists(draw: st.DrawFn) -> list[Arrival]:
    """Prompts that even chunks cut at whole pages; no two events fall on one moment."""
    at_s, arrivals = 0.0, []
    for number in range(draw(st.integers(2, 14))):
        at_s += draw(st.integers(0, 40)) * 0.0371 + 1e-4 * (number + 1)
        chunks, size = draw(st.integers(1, 6)), draw(st.integers(55, 64))
        waited_s = draw(st.sampled_from([0.0, 0.0, 3.1]))
        arrivals.append((at_s, waited_s, chunks * size * PAGE_TOKENS))
    return arrivals


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(DISCIPLINES), arrivals=arrival_lists())
def test_both_finish_the_same_prompts_at_the_same_times(name: str, arrivals: list[Arrival]) -> None:
    discipline = make_discipline(name, 0.3, 2.0)
    ours, theirs = scheduled(discipline, arrivals), simulated(discipline, arrivals)
    assert [number for number, _ in ours] == [number for number, _ in theirs]
    assert [at_s for _, at_s in ours] == pytest.approx([at_s for _, at_s in theirs], abs=1e-6)
