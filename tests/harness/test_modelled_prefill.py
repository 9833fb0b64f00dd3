"""Prefill: order, chunks, overlap with the transfer, grants, faults, and nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from engine.disciplines import Fifo, LeastSlack, ShortestFirst
from harness.clock import run
from harness.instances.modelled import ModelledInstance
from harness.instances.modelled_prefill import PrefillRules
from harness.links.fluid import FluidLink, LinkState
from harness.ports import (
    DecodeJob,
    InstanceLost,
    InstanceSpec,
    PrefillJob,
    RequestRejected,
    Role,
    TransferFailed,
)
from workloads.request import Request


@dataclass(frozen=True)
class Device:
    """A token takes 1 ms of prefill and is a byte of cache; 10 layers; a decode step takes 1 s."""

    max_batch: int = 4
    kv_memory_bytes: float | None = None
    n_layers: int = 10

    def prefill_s(self, input_tokens, cached_tokens=0):
        return 0.001 * (input_tokens - cached_tokens)

    def kv_bytes(self, tokens, held_tokens=0):
        return float(tokens - held_tokens)

    def decode_step_s(self, batch, context_tokens):
        return 1.0


def instance(name, role, rules=PrefillRules(), device=Device()):
    return ModelledInstance(InstanceSpec(name, name, role, "test"), device, rules)


def pair(rules=PrefillRules(), sender=Device(), receiver=Device()):
    return (
        instance("p", Role.PREFILL, rules, sender),
        instance("d", Role.DECODE, device=receiver),
    )


def link_of(bytes_per_s, delay_s=0.0):
    return FluidLink("p", "d", [LinkState(0.0, bytes_per_s * 8, delay_s, 2 * delay_s)])


def job(number, tokens, destination, link=None, cached=0, held=0, attempt=1):
    request = Request(number, 0.0, tokens, 1)
    now_s = asyncio.get_running_loop().time()
    return PrefillJob(request, attempt, cached, held, destination, link, now_s)


def assert_empty(*instances):
    for one in instances:
        load = one.load()
        assert {name: getattr(load, name) for name in load.__slots__} == dict.fromkeys(
            load.__slots__, 0
        )


async def consume(destination, work, number, attempt=1):
    """Await a prefill and decode its single token."""
    done = await work
    await destination.decode(DecodeJob(Request(number, 0.0, 1, 1), attempt, done))
    return done


def test_prompts_run_one_at_a_time_in_order():
    async def main():
        p, d = pair()
        works = [p.prefill(job(i, tokens, d)) for i, tokens in enumerate([1000, 3000, 2000])]
        dones = [await consume(d, work, i) for i, work in enumerate(works)]
        assert_empty(p, d)
        return [(done.started_s, done.finished_s, done.delivered_s) for done in dones]

    assert run(main()) == [(0.0, 1.0, 1.0), (1.0, 4.0, 4.0), (4.0, 6.0, 6.0)]


def test_hand_over_inside_a_cluster_takes_its_stated_time_and_no_wire_bytes():
    async def main():
        p, d = pair(PrefillRules(handover_s=0.25))
        return await p.prefill(job(1, 1000, d))

    done = run(main())
    assert (done.finished_s, done.delivered_s, done.wire_bytes) == (1.0, 1.25, 0)


def test_transfer_overlaps_prefill_and_only_the_last_layer_remains():
    async def main():
        p, d = pair()
        return await p.prefill(job(1, 1000, d, link_of(2000.0, 0.05)))

    done = run(main())
    assert done.finished_s == 1.0
    assert done.delivered_s == pytest.approx(1.0 + 100 / 2000 + 0.05, abs=1e-12)
    assert done.wire_bytes == 1000


def test_slow_link_delivers_at_its_own_rate_from_the_first_layer_on():
    async def main():
        p, d = pair()
        return await p.prefill(job(1, 1000, d, link_of(100.0)))

    assert run(main()).delivered_s == pytest.approx(0.1 + 10.0, abs=1e-9)


def test_work_counts_the_cache_here_and_bytes_the_cache_there():
    async def main():
        p, d = pair()
        return await p.prefill(job(1, 1000, d, link_of(1e9), cached=600, held=300))

    done = run(main())
    assert done.finished_s == pytest.approx(0.4)
    assert done.wire_bytes == 700


def test_a_prefix_that_is_not_there_is_computed_and_sent():
    @dataclass(frozen=True)
    class Pool:
        tokens: int

        def usable_tokens(self, request):
            return self.tokens

        def held_tokens(self, request):
            return self.tokens

    async def main():
        p, d = pair()
        p.prefixes, d.prefixes = Pool(256), Pool(128)
        counted_on = job(1, 1000, d, link_of(1e9), cached=512, held=512)
        counted_on.request = Request(1, 0.0, 1000, 1, (7,), 512)
        return await p.prefill(counted_on)

    done = run(main())
    assert done.finished_s == pytest.approx(0.744)
    assert (done.cached_tokens, done.wire_bytes) == (256, 872)


def test_next_prompt_computes_while_the_last_one_is_sent():
    async def main():
        p, d = pair()
        link = link_of(100.0)
        first, second = p.prefill(job(1, 1000, d, link)), p.prefill(job(2, 1000, d, link))
        await first
        done = await second
        return done.started_s, done.finished_s

    assert run(main()) == (1.0, 2.0)


def test_caches_on_their_way_hold_back_prefill_when_memory_is_full():
    async def main():
        p, d = pair(sender=Device(kv_memory_bytes=1500.0))
        link = link_of(100.0)
        first, second = p.prefill(job(1, 1000, d, link)), p.prefill(job(2, 1000, d, link))
        sent = await first
        return sent.delivered_s, (await second).started_s

    delivered_s, started_s = run(main())
    assert started_s == delivered_s == pytest.approx(10.1)


def test_destination_grants_memory_before_bytes_flow():
    async def main():
        p, d = pair(receiver=Device(kv_memory_bytes=1500.0))
        link = link_of(1e6)
        first = await p.prefill(job(1, 1000, d, link))
        second = p.prefill(job(2, 1000, d, link))
        await asyncio.sleep(5)
        assert link.sent_bytes() == 1000 and not second.done()
        assert d.load().kv_waiting == 1
        await d.decode(DecodeJob(Request(1, 0.0, 1000, 1), 1, first))
        done = await second
        d.abandon(Request(2, 0.0, 1000, 1), 1)
        assert_empty(p, d)
        return done.finished_s, done.delivered_s

    finished_s, delivered_s = run(main())
    assert finished_s == pytest.approx(2.0001, abs=1e-3)
    assert delivered_s == pytest.approx(6.0011, abs=1e-3)


def test_wait_for_memory_is_bounded():
    async def main():
        p, d = pair(PrefillRules(grant_timeout_s=7.0), receiver=Device(kv_memory_bytes=1500.0))
        await p.prefill(job(1, 1000, d))
        with pytest.raises(TransferFailed, match="d: no cache memory within 7 s"):
            await p.prefill(job(2, 1000, d))
        now_s = asyncio.get_running_loop().time()
        d.abandon(Request(1, 0.0, 1000, 1), 1)
        assert_empty(p, d)
        return now_s

    assert run(main()) == 9.0


def test_memory_that_comes_in_time_ends_the_wait_for_it():
    async def main():
        p, d = pair(PrefillRules(grant_timeout_s=7.0), receiver=Device(kv_memory_bytes=1500.0))
        link = link_of(100.0)
        first = await p.prefill(job(1, 1000, d, link))
        second = p.prefill(job(2, 1000, d, link))
        await asyncio.sleep(5)
        d.abandon(Request(1, 0.0, 1000, 1), 1)
        # The transfer alone lasts longer than the wait may.
        return first.delivered_s, (await second).delivered_s

    assert run(main()) == (pytest.approx(10.1), pytest.approx(25.1))


def test_cache_that_can_never_fit_is_rejected_at_once():
    async def main():
        p, d = pair(receiver=Device(kv_memory_bytes=500.0))
        with pytest.raises(RequestRejected):
            await p.prefill(job(1, 1000, d))
        assert_empty(p, d)

    run(main())


# Cancellation and chunks -----------------------------------------------------------------------


def test_cancelled_prompt_leaves_the_device_when_its_chunk_ends():
    async def main():
        p, d = pair(PrefillRules(chunk_tokens=400))
        link = link_of(1e6)
        first = p.prefill(job(1, 1000, d, link))
        second = p.prefill(job(2, 1000, d, link))
        third = p.prefill(job(3, 1000, d, link))
        await asyncio.sleep(0.5)
        first.cancel()
        second.cancel()
        assert p.load().prefill_computing == 0 and link.open_flows() == 0
        done = await consume(d, third, 3)
        assert_empty(p, d)
        return done.started_s

    # Three even chunks of at most 400 tokens: the second ends at two thirds of the prompt.
    assert run(main()) == pytest.approx(2 / 3)


def test_chunks_after_a_cached_prefix_cost_what_their_tokens_do():
    @dataclass(frozen=True)
    class Quadratic(Device):
        def prefill_s(self, input_tokens, cached_tokens=0):
            return 1e-6 * (input_tokens**2 - cached_tokens**2)

    async def main():
        p, d = pair(PrefillRules(chunk_tokens=200), sender=Quadratic())
        first = p.prefill(job(1, 1000, d, cached=600))
        second = p.prefill(job(2, 1000, d))
        await asyncio.sleep(0.1)
        first.cancel()
        return (await second).started_s

    # Tokens 600 to 800 take 0.28 s, those up to 1,000 another 0.36 s.
    assert run(main()) == pytest.approx(0.28)


def test_timeout_around_a_prefill_frees_everything_without_abandon():
    async def main():
        p, d = pair()
        link = link_of(10.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):
                await p.prefill(job(1, 1000, d, link))
        assert_empty(p, d)
        assert link.open_flows() == 0

    run(main())


def test_abandon_drops_the_attempt_wherever_it_is():
    async def main():
        p, d = pair()
        link = link_of(10.0)
        works = [p.prefill(job(i, 1000, d, link)) for i in range(3)]
        await asyncio.sleep(1.5)  # one is sent, one computes, one waits
        for i in range(3):
            p.abandon(Request(i, 0.0, 1000, 1), 1)
            p.abandon(Request(i, 0.0, 1000, 1), 1)
        assert all(work.cancelled() for work in works)
        assert_empty(p, d)
        assert link.open_flows() == 0
        p.abandon(Request(77, 0.0, 1, 1), 1)

    run(main())


# Disciplines -----------------------------------------------------------------------------------


def finish_order(discipline, arrivals, chunk_tokens=500):
    """Ids in order of finishing; arrivals are (time_s, tokens)."""

    async def main():
        p, d = pair(PrefillRules(chunk_tokens=chunk_tokens, discipline=discipline))
        order = []

        async def one(number, at_s, tokens):
            await asyncio.sleep(at_s)
            done = await consume(d, p.prefill(job(number, tokens, d)), number)
            order.append((number, round(done.finished_s, 6)))

        await asyncio.gather(*(one(i, *arrival) for i, arrival in enumerate(arrivals)))
        assert_empty(p, d)
        return order

    return run(main())


def test_fifo_keeps_the_order():
    arrivals = [(0.0, 3000), (0.1, 1000), (0.2, 100)]
    assert finish_order(Fifo(), arrivals) == [(0, 3.0), (1, 4.0), (2, 4.1)]


def test_shortest_first_takes_over_at_a_chunk_boundary():
    arrivals = [(0.0, 3000), (0.1, 1000), (0.2, 100)]
    # At 0.5 the shortest takes over, then the middle one; the long one had done 500 tokens.
    expected = [(2, 0.6), (1, 1.6), (0, 4.1)]
    assert finish_order(ShortestFirst(ageing=0.0), arrivals) == expected


def test_ageing_lets_a_long_prompt_through():
    stream = [(0.0, 2000), (0.05, 4000)] + [(i * 0.9, 1000) for i in range(1, 30)]
    without = dict(finish_order(ShortestFirst(ageing=0.0), stream))
    aged = dict(finish_order(ShortestFirst(ageing=0.5), stream))
    assert without[1] > 30.0
    assert aged[1] < 14.0


def test_least_slack_runs_first_who_would_miss_the_objective():
    # Both came at about the same time: the longer has less slack.
    arrivals = [(0.0, 500), (0.1, 1000), (0.2, 4000)]
    assert [n for n, _ in finish_order(LeastSlack(ttft_s=10.0), arrivals)] == [0, 2, 1]


def test_preempted_transfer_keeps_what_was_produced_and_goes_on():
    async def main():
        rules = PrefillRules(chunk_tokens=500, discipline=ShortestFirst(ageing=0.0))
        p, d = pair(rules)
        link = link_of(1e6)
        long = p.prefill(job(1, 2000, d, link))
        await asyncio.sleep(0.3)
        short = p.prefill(job(2, 200, d, link))
        await asyncio.sleep(0.3)  # long was stopped at 0.5, with 0.2 s of its layers' end passed
        assert link.sent_bytes() == pytest.approx(300 + 80, abs=1)
        first, second = await short, await long
        return first.finished_s, second.started_s, second.finished_s, second.delivered_s

    finished_s, started_s, long_s, delivered_s = run(main())
    assert (finished_s, started_s) == (pytest.approx(0.7), 0.0)
    assert long_s == pytest.approx(2.2)
    assert delivered_s == pytest.approx(2.2 + 200 / 1e6)


def test_preemption_never_waits_for_memory_that_the_preempted_holds():
    async def main():
        rules = PrefillRules(chunk_tokens=500, discipline=ShortestFirst(ageing=0.0))
        p, d = pair(rules, sender=Device(kv_memory_bytes=2300.0))
        link = link_of(1e6)
        works = [p.prefill(job(1, 2000, d, link))]
        await asyncio.sleep(0.1)
        works += [p.prefill(job(2, 200, d, link)), p.prefill(job(3, 400, d, link))]
        dones = await asyncio.gather(*works)
        return [round(done.finished_s, 3) for done in dones]

    # The second takes over at 0.5; the third does not fit beside the first, which goes on.
    assert run(main())[:2] == [2.2, 0.7]


# Faults ----------------------------------------------------------------------------------------


def test_crash_of_the_prefill_side_fails_all_and_frees_the_destination():
    async def main():
        p, d = pair()
        link = link_of(10.0)
        works = [p.prefill(job(i, 1000, d, link)) for i in range(3)]
        await asyncio.sleep(1.5)
        p.crash("killed")
        results = await asyncio.gather(*works, return_exceptions=True)
        assert [type(result) for result in results] == [InstanceLost] * 3
        assert_empty(p, d)
        assert link.open_flows() == 0
        with pytest.raises(InstanceLost, match="p: killed"):
            p.prefill(job(9, 1, d))
        p.restart()
        return (await p.prefill(job(10, 1000, d))).finished_s

    assert run(main()) == 2.5


def test_crash_of_the_decode_side_fails_prompts_that_were_bound_for_it():
    async def main():
        p, d = pair()
        link = link_of(10.0)
        works = [p.prefill(job(i, 1000, d, link)) for i in range(3)]
        await asyncio.sleep(1.5)
        d.crash()
        results = await asyncio.gather(*works, return_exceptions=True)
        assert [str(result) for result in results] == ["d: crashed"] * 3
        assert_empty(p, d)
        assert link.open_flows() == 0

    run(main())


def test_broken_connections_fail_the_transfers_only():
    async def main():
        p, d = pair()
        link = link_of(10.0)
        works = [p.prefill(job(i, 1000, d, link)) for i in range(3)]
        await asyncio.sleep(1.5)
        link.fail_flows("connection reset")
        await asyncio.sleep(0)
        assert [work.done() for work in works] == [True, True, False]
        assert isinstance(works[0].exception(), TransferFailed)
        assert works[1].exception().retryable
        done = await consume(d, works[2], 2)
        assert_empty(p, d)
        return done.started_s

    # The second prompt's chunk (all of it) still runs to its end.
    assert run(main()) == 2.0


def test_pause_freezes_prefill_and_its_production():
    async def main():
        p, d = pair()
        link = link_of(1e6)
        work = p.prefill(job(1, 1000, d, link))
        loop = asyncio.get_running_loop()
        loop.call_at(0.5, p.pause)
        loop.call_at(2.5, p.resume)
        await asyncio.sleep(2.0)
        assert link.sent_bytes() == 400
        done = await work
        return done.finished_s, done.delivered_s

    assert run(main()) == (3.0, pytest.approx(3.0001))


@pytest.mark.parametrize(
    ("cancel_s", "pause_s", "resume_s", "started_s"),
    [(0.3, 0.5, 2.5, 3.0), (0.5, 0.3, 2.0, 2.7)],
    ids=["cancelled, then paused", "paused, then cancelled"],
)
def test_the_chunk_of_a_prompt_that_is_gone_is_frozen_too(cancel_s, pause_s, resume_s, started_s):
    async def main():
        p, d = pair()
        first, second = p.prefill(job(1, 1000, d)), p.prefill(job(2, 1000, d))
        loop = asyncio.get_running_loop()
        loop.call_at(cancel_s, first.cancel)
        loop.call_at(pause_s, p.pause)
        loop.call_at(resume_s, p.resume)
        return (await second).started_s

    assert run(main()) == pytest.approx(started_s)


def test_slowing_down_stretches_what_is_left():
    async def main():
        p, d = pair()
        work = p.prefill(job(1, 1000, d, link_of(1e6)))
        asyncio.get_running_loop().call_at(0.5, p.slow, 3.0)
        return (await work).finished_s

    assert run(main()) == pytest.approx(2.0)


def test_drain_lets_promised_caches_come():
    async def main():
        p, d = pair()
        work = p.prefill(job(1, 1000, d))
        draining = asyncio.create_task(d.drain())
        await asyncio.sleep(0.5)
        with pytest.raises(InstanceLost, match="draining"):
            p.prefill(job(2, 1000, d))
        await consume(d, work, 1)
        await draining
        assert_empty(p, d)

    run(main())
