"""Prefill on one worker, decode on another, over the data plane: tokens as if in one engine."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine.cache.keys import block_keys
from engine.pacing import Pacing
from engine.sequence import Sampling
from engine.transport.certificates import make_authority, make_certificate
from engine.transport.client import Refusal
from engine.transport.frames import HEADER_BYTES
from engine.transport.regions import Kind
from engine.transport.security import Security
from engine.worker.errors import (
    Cancelled,
    NotReady,
    Rejected,
    TransferFailed,
    UnknownRequest,
    WorkerError,
)
from engine.worker.messages import DecodeRequest, Destination, Key, PrefillRequest
from engine.worker.offers import describe


def prompt_of(length: int, seed: int = 0, shared: int = 0) -> list[int]:
    """`shared` tokens that are the same for every seed, then its own."""
    common = random.Random(99)
    own = random.Random(seed)
    return [common.randrange(256) for _ in range(shared)] + [
        own.randrange(256) for _ in range(length - shared)
    ]


def place(worker) -> Destination:
    return Destination("127.0.0.1", worker.courier.plane.port, worker.incarnation)


def asks(name, prompt, to, **changes) -> PrefillRequest:
    fields = {
        "key": Key(name, 1),
        "prompt": prompt,
        "system_tokens": 0,
        "cached_tokens": 0,
        "held_tokens": 0,
        "block_tokens": 0,
        "tenant": "",
        "sampling": Sampling(),
        "destination": None if to is None else place(to),
    }
    return PrefillRequest(**{**fields, **changes})


async def decode(worker, name, count, attempt=1, sampling=Sampling()) -> list[int]:
    request = DecodeRequest(Key(name, attempt), count, True, sampling)
    return [token.id async for token in worker.stream(request.key, worker.take(request))]


@pytest.mark.parametrize("staging_bytes", [0, 200_000])
@pytest.mark.parametrize("model", ["tiny", "tiny-7to1"])
async def test_tokens_equal_those_of_one_engine(
    model, staging_bytes, start_worker, engine, nothing_leaked
):
    p = await start_worker(model=model, role="prefill", staging_bytes=staging_bytes)
    d = await start_worker(model=model, role="decode", staging_bytes=staging_bytes)
    prompts = {f"r{n}": prompt_of(length, n) for n, length in enumerate((1, 15, 16, 17, 130))}
    results = await asyncio.gather(
        *(p.prefill(asks(name, prompt, d)) for name, prompt in prompts.items())
    )
    decoded = await asyncio.gather(*(decode(d, name, 12) for name in prompts))
    alone = engine(model)
    for (name, prompt), result, tokens in zip(prompts.items(), results, decoded, strict=True):
        expected = alone.generate(prompt, 12)
        assert tokens == expected, name
        assert result.first_token == expected[0]
        assert result.started_s <= result.finished_s <= result.delivered_s
        assert result.wire_bytes > p.engine.layout.request_bytes(len(prompt))
    await nothing_leaked(p, d)


@pytest.mark.parametrize("staging_bytes", [0, 100_000])
async def test_a_long_prompt_leaves_pass_by_pass(
    staging_bytes, start_worker, engine, nothing_leaked
):
    p = await start_worker(role="prefill", pass_tokens=32, staging_bytes=staging_bytes)
    d = await start_worker(role="decode", staging_bytes=staging_bytes)
    pushed: list[tuple[int, int, int]] = []
    pieces = p.courier._medium.pieces

    def recorded(parcel, layer, start, stop):
        pushed.append((layer, start, stop))
        return pieces(parcel, layer, start, stop)

    p.courier._medium.pieces = recorded
    await p.prefill(asks("a", prompt_of(40, 1, shared=40), d))
    await decode(d, "a", 1)
    prompt = prompt_of(100, 2, shared=32)
    pushed.clear()
    await p.prefill(asks("b", prompt, d, held_tokens=48))
    # Layer 3 is the MLA layer: its tokens leave with each pass, what is held (32) never.
    assert [piece for piece in pushed if piece[0] == 3][-3:] == [
        (3, 32, 64),
        (3, 64, 96),
        (3, 96, 100),
    ]
    assert [piece[0] for piece in pushed[-4:]] == [0, 1, 2, 3]
    assert await decode(d, "b", 6) == engine().generate(prompt, 6)
    await nothing_leaked(p, d)


async def test_hits_and_cancellation_through_a_staging_area(start_worker, engine, nothing_leaked):
    p = await start_worker(role="prefill", staging_bytes=100_000)
    d = await start_worker(role="decode", staging_bytes=100_000)
    first, second = prompt_of(50, 1, shared=40), prompt_of(150, 2, shared=40)
    await p.prefill(asks("a", first, d))
    await decode(d, "a", 2)
    leaving = asyncio.create_task(p.prefill(asks("gone", prompt_of(200), d)))
    await asyncio.sleep(0.005)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await p.prefill(asks("b", second, d, held_tokens=32))
    assert await decode(d, "b", 8) == engine().generate(second, 8)
    with pytest.raises(Rejected, match="the staging area has 100000"):
        await p.prefill(asks("c", prompt_of(1000), d))
    await nothing_leaked(p, d)
    for worker in (p, d):
        assert worker.courier._medium._heap.taken_bytes == 0


async def test_caches_cross_under_tls_to_those_who_may_send_them(
    start_worker, engine, nothing_leaked, tmp_path
):
    authority = make_authority(tmp_path, 1)

    def secured(name, tenants):
        certificate, key = make_certificate(tmp_path, name, 1)
        return Security(str(certificate), str(key), str(authority), tenants)

    p = await start_worker(role="prefill", security=secured("p0", {}))
    d = await start_worker(role="decode", security=secured("d0", {"p0": ("acme",)}))
    prompt = prompt_of(60)
    await p.prefill(asks("r", prompt, d, tenant="acme"))
    assert await decode(d, "r", 4) == engine().generate(prompt, 4)
    with pytest.raises(TransferFailed, match="p0 may not send caches of tenant 'other'"):
        await p.prefill(asks("s", prompt, d, tenant="other"))
    await nothing_leaked(p, d)


async def test_a_rounded_state_stays_within_its_tolerance(start_worker, nothing_leaked):
    p = await start_worker(role="prefill", state_codec="bf16")
    d = await start_worker(role="decode")
    exact = await start_worker(role="prefill")
    prompt = prompt_of(60)
    rounded = await p.prefill(asks("r", prompt, d))
    whole = await exact.prefill(asks("s", prompt, d))
    layout = d.engine.layout
    halved = sum(array.row_bytes for array in layout.state.values()) // 2
    # How many chunks share a frame, and so a header, is a matter of timing.
    headers = HEADER_BYTES * len(describe(layout, prompt, 0, "", {}).regions)
    assert whole.wire_bytes - rounded.wire_bytes == pytest.approx(halved, abs=headers)
    assert headers < halved / 4
    for states in d.engine.storage.state.values():
        arrived = [states[d.arrivals._held[Key(name, 1)].lease.slot] for name in "rs"]
        assert torch.allclose(arrived[0], arrived[1], rtol=2**-8, atol=0)
    for name in "rs":
        d.abandon(Key(name, 1))
    await nothing_leaked(p, d, exact)


async def test_sampled_tokens_do_not_depend_on_where_they_are_drawn(start_worker, engine):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    sampling = Sampling(temperature=1.0, seed=7)
    prompt = prompt_of(40)
    await p.prefill(asks("r", prompt, d, sampling=sampling))
    tokens = await decode(d, "r", 12, sampling=sampling)
    assert tokens == engine().generate(prompt, 12, sampling)
    assert tokens != engine().generate(prompt, 12)


async def test_prefix_hits_on_either_side(start_worker, engine, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    alone = engine()
    first, second = prompt_of(140, 1, shared=100), prompt_of(150, 2, shared=100)
    cold = await p.prefill(asks("a", first, d))
    assert cold.cached_tokens == 0
    assert await decode(d, "a", 6) == alone.generate(first, 6)
    events = p.events.take(p.pool)
    keys = [f"{key:x}" for key in block_keys(first, 16)]
    assert [key for group, stored, key in events if group == "kv" and stored] == keys
    assert [keys.index(key) + 1 for group, _, key in events if group == "state"] == [2, 4, 6, 8]
    assert p.events.take(p.pool) == []
    assert d.events._kept is None  # nobody asked it
    told_late = d.events.take(d.pool)
    told = [key for group, stored, key in told_late if group == "kv" and stored]
    assert told[: len(keys)] == keys  # and the page that decode filled
    assert d.events.take(d.pool) == []
    # 96 tokens are six shared blocks; the state nearest below was kept at 96 (interval 2 blocks).
    warm = await p.prefill(asks("b", second, d, held_tokens=96))
    assert warm.cached_tokens == 96
    assert cold.wire_bytes - warm.wire_bytes > 80 * p.engine.layout.config.kv_bytes_per_token(
        "float32"
    )
    assert await decode(d, "b", 6) == alone.generate(second, 6)
    await nothing_leaked(p, d)


async def test_a_destination_that_holds_less_than_said_gets_the_rest(
    start_worker, engine, nothing_leaked
):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    first, second = prompt_of(50, 1, shared=40), prompt_of(150, 2, shared=40)
    await p.prefill(asks("a", first, d))
    await decode(d, "a", 2)
    # 144 tokens are claimed, 32 are there.
    await p.prefill(asks("b", second, d, held_tokens=144))
    assert await decode(d, "b", 8) == engine().generate(second, 8)
    await nothing_leaked(p, d)


async def test_lengths_in_system_tokens(start_worker, engine):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    scale = {"block_tokens": 512, "system_tokens": 150 * 32}
    await p.prefill(asks("a", prompt_of(150, 1, shared=100), d, **scale))
    await decode(d, "a", 2)
    second = prompt_of(150, 2, shared=100)
    warm = await p.prefill(
        asks("b", second, d, held_tokens=6 * 512, cached_tokens=6 * 512, **scale)
    )
    assert warm.cached_tokens == 6 * 512
    assert await decode(d, "b", 5) == engine().generate(second, 5)


async def test_after_role_conversion(start_worker, engine, nothing_leaked):
    a = await start_worker(role="prefill")
    b = await start_worker(role="decode")
    prompt = prompt_of(90, 3)
    expected = engine().generate(prompt, 8)
    await a.prefill(asks("r", prompt, b))
    with pytest.raises(NotReady, match="does prefill, not decode"):
        await decode(a, "r", 8)
    # Converting waits for the delivered cache to be decoded.
    turning = asyncio.create_task(b.convert("prefill"))
    await asyncio.sleep(0.05)
    assert not turning.done() and b.state == "draining"
    with pytest.raises(TransferFailed, match="takes no caches"):
        await a.prefill(asks("late", prompt, b))
    assert await decode(b, "r", 8) == expected
    await turning
    await a.convert("decode")
    await b.prefill(asks("r2", prompt, a))
    assert await decode(a, "r2", 8) == expected
    await nothing_leaked(a, b)


async def test_after_preemption(start_worker, engine, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode", pages=12, max_batch=4)
    prompts = {f"r{n}": prompt_of(33, n) for n in range(4)}
    await asyncio.gather(*(p.prefill(asks(n, prompt, d)) for n, prompt in prompts.items()))
    decoded = await asyncio.gather(*(decode(d, name, 40) for name in prompts))
    assert d.scheduler.preemptions > 0
    alone = engine()
    assert decoded == [alone.generate(prompt, 40) for prompt in prompts.values()]
    await nothing_leaked(p, d)


async def test_one_worker_does_both(start_worker, engine, nothing_leaked):
    w = await start_worker()
    prompt = prompt_of(70, 5)
    result = await w.prefill(asks("r", prompt, None))
    assert result.wire_bytes == 0
    assert await decode(w, "r", 6) == engine().generate(prompt, 6)
    await nothing_leaked(w)


async def test_an_offer_waits_for_memory(start_worker, engine, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode", pages=5)
    first, second = prompt_of(60, 1), prompt_of(60, 2)
    await p.prefill(asks("a", first, d))
    waiting = asyncio.create_task(p.prefill(asks("b", second, d)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert await decode(d, "a", 4) == engine().generate(first, 4)
    await waiting
    assert await decode(d, "b", 4) == engine().generate(second, 4)
    await nothing_leaked(p, d)


async def test_what_can_never_fit_is_rejected_on_either_side(start_worker, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode", pages=4)
    with pytest.raises(TransferFailed, match="the pool has 4"):
        await p.prefill(asks("a", prompt_of(80), d))
    with pytest.raises(Rejected, match="do not fit in 64 pages"):
        await p.prefill(asks("b", prompt_of(64 * 16 + 1), d))
    await p.prefill(asks("c", prompt_of(60), d))
    with pytest.raises(Rejected, match="do not fit in 4 pages"):
        await decode(d, "c", 50)
    await nothing_leaked(p, d)


async def test_unlike_layouts_refuse_each_other(start_worker, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode", model="tiny-7to1")
    with pytest.raises(TransferFailed):
        await p.prefill(asks("a", prompt_of(30), d))
    await nothing_leaked(p, d)


async def test_a_restarted_destination_is_not_the_old_one(start_worker, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    stale = Destination("127.0.0.1", d.courier.plane.port, d.incarnation ^ 2)
    with pytest.raises(TransferFailed):
        await p.prefill(asks("a", prompt_of(30), d, destination=stale))
    await nothing_leaked(p, d)


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.02])
async def test_cancelling_prefill_frees_both_sides(after_s, start_worker, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    tasks = [asyncio.create_task(p.prefill(asks(f"r{n}", prompt_of(200, n), d))) for n in range(3)]
    await asyncio.sleep(after_s)
    for n, task in enumerate(tasks):
        task.cancel()
        d.abandon(Key(f"r{n}", 1))
    await asyncio.gather(*tasks, return_exceptions=True)
    await nothing_leaked(p, d)
    await p.prefill(asks("r0", prompt_of(60), d, key=Key("r0", 2)))
    assert len(await decode(d, "r0", 3, attempt=2)) == 3
    await nothing_leaked(p, d)


async def test_abandon_ends_work_in_hand_and_refuses_late_arrivals(start_worker, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    await p.prefill(asks("r", prompt_of(40), d))
    d.abandon(Key("r", 1))
    with pytest.raises(UnknownRequest):
        await decode(d, "r", 3)
    d.abandon(Key("late", 1))
    with pytest.raises(TransferFailed, match="abandoned"):
        await p.prefill(asks("late", prompt_of(40), d))
    await p.prefill(asks("s", prompt_of(40), d))
    prefilling = asyncio.create_task(p.prefill(asks("long", prompt_of(900), d)))
    await asyncio.sleep(0.01)
    p.abandon(Key("long", 1))
    d.abandon(Key("long", 1))
    with pytest.raises(Cancelled):
        await prefilling
    decoding = asyncio.create_task(decode(d, "s", 500))
    await asyncio.sleep(0.05)
    d.abandon(Key("s", 1))
    with pytest.raises(Cancelled):
        await decoding
    await nothing_leaked(p, d)


async def test_closing_the_stream_cancels_decode(start_worker, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    await p.prefill(asks("r", prompt_of(40), d))
    request = DecodeRequest(Key("r", 1), 500, True, Sampling())
    stream = d.stream(request.key, d.take(request))
    async for _ in stream:
        break
    await stream.aclose()
    await nothing_leaked(p, d)
    assert d.counters.cancelled == 1


async def test_a_dead_peer_fails_the_transfer_and_frees_memory(start_worker, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    await p.prefill(asks("warm", prompt_of(20), d))
    await decode(d, "warm", 1)
    d.courier.plane._process.kill()
    with pytest.raises(WorkerError):
        await p.prefill(asks("r", prompt_of(200), d))
    await nothing_leaked(p, d)


async def test_a_failing_step_fails_its_requests_only(start_worker, nothing_leaked, engine):
    w = await start_worker()
    real = w.loop._runner.execute
    w.loop._runner.execute = lambda *_: 1 / 0
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        await w.prefill(asks("a", prompt_of(40), None))
    w.loop._runner.execute = real
    await w.prefill(asks("b", prompt_of(40), None))
    assert await decode(w, "b", 3) == engine().generate(prompt_of(40), 3)
    await nothing_leaked(w)


async def test_memory_is_reused_right_after_a_send(start_worker, engine, nothing_leaked):
    """Room for two prompts at a time on either side: what was sent is overwritten at once."""
    p = await start_worker(role="prefill", pages=14, slots=3, checkpoint_interval=0)
    d = await start_worker(role="decode", pages=14, slots=3)
    prompts = {f"r{n}": prompt_of(90 + n, n) for n in range(8)}

    async def serve(name: str, prompt: list[int]) -> list[int]:
        await p.prefill(asks(name, prompt, d))
        return await decode(d, name, 4)

    served = await asyncio.gather(*(serve(name, prompt) for name, prompt in prompts.items()))
    alone = engine()
    assert served == [alone.generate(prompt, 4) for prompt in prompts.values()]
    await nothing_leaked(p, d)


async def test_an_offer_without_the_state_is_refused(start_worker, nothing_leaked):
    d = await start_worker(role="decode")
    p = await start_worker(role="prefill")
    whole = describe(p.engine.layout, prompt_of(40), 0, "", {})
    paged_half = replace(whole, regions=tuple(r for r in whole.regions if r.region.kind == Kind.KV))
    with pytest.raises(Refusal, match="does not fit this model's cache layout"):
        await d.courier._on_offer(("r", 1), paged_half)
    too_short = replace(whole, n_tokens=39)
    with pytest.raises(Refusal, match="does not fit this model's cache layout"):
        await d.courier._on_offer(("r", 1), too_short)
    await nothing_leaked(p, d)


async def test_a_delivered_cache_is_byte_for_byte_the_one_sent(start_worker, nothing_leaked):
    p = await start_worker(role="prefill")
    d = await start_worker(role="decode")
    prompt = prompt_of(77)
    sent = {}
    close = p.courier._medium.close

    def keep(parcel):
        sent.update(bytes_of(p, parcel.lease, 77))
        close(parcel)

    p.courier._medium.close = keep
    await p.prefill(asks("r", prompt, d))
    lease = d.arrivals._held[Key("r", 1)].lease
    assert bytes_of(d, lease, 77) == sent
    assert len(sent) == p.engine.layout.config.layers
    d.abandon(Key("r", 1))
    await nothing_leaked(p, d)


def bytes_of(worker, lease, n_tokens) -> dict[int, bytes]:
    layout = worker.engine.layout
    views = {
        layer: layout.regions(layer, lease.pages, lease.slot, n_tokens)
        for layer in range(layout.config.layers)
    }
    return {
        layer: b"".join(bytes(view) for view in worker.engine.arena.views(ranges))
        for layer, ranges in views.items()
    }


async def test_paced_layers_leave_as_the_modelled_device_computes_them(
    start_worker, engine, nothing_leaked
):
    pacing = Pacing.from_json(
        {
            "prefill": {"quadratic_s": [0.2, 0.0, 0.0]},
            "decode": {"step_s": 0.08, "max_batch": 2, "phases": 4},
        }
    )
    p = await start_worker(pacing, role="prefill")
    d = await start_worker(pacing, role="decode")
    pushed: list[float] = []
    pieces = p.courier._medium.pieces

    def timed(*of):
        pushed.append(time.monotonic())
        return pieces(*of)

    p.courier._medium.pieces = timed
    prompts = {f"r{n}": prompt_of(30 + n, n) for n in range(3)}
    results = await asyncio.gather(*(p.prefill(asks(n, x, d)) for n, x in prompts.items()))
    starts = [result.started_s for result in results]
    # A queue of three: each starts at the modelled end of the one before, to the microsecond.
    assert [b - a for a, b in pairwise(starts)] == pytest.approx([0.2, 0.2], abs=1e-6)
    for job, start_s in enumerate(starts):
        for layer in range(4):
            assert pushed[4 * job + layer] >= start_s + 0.2 * (layer + 1) / 4
        assert results[job].finished_s >= start_s + 0.2
    # Three requests for a batch of two: the third is admitted when the first has ended.
    alone = engine()
    decoded = await asyncio.gather(*(decode(d, name, 4) for name in prompts))
    assert decoded == [alone.generate(prompt, 4) for prompt in prompts.values()]
    await nothing_leaked(p, d)


async def test_a_bug_in_the_accounting_ends_the_worker(start_worker, crashes):
    pacing = Pacing.from_json(
        {
            "prefill": {"quadratic_s": [0.01, 0.0, 0.0]},
            "decode": {"step_s": 0.04, "max_batch": 2, "phases": 4},
        }
    )
    w = await start_worker(pacing)
    await w.prefill(asks("r", prompt_of(20), None))
    w.scheduler.absorb = lambda *_: 1 / 0
    decoding = asyncio.create_task(decode(w, "r", 5))
    async with asyncio.timeout(10):
        while not crashes:
            await asyncio.wait([decoding], timeout=0.01)
    assert isinstance(crashes.pop(), ZeroDivisionError)
    decoding.cancel()
    await asyncio.gather(decoding, return_exceptions=True)
