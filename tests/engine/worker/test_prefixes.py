"""A prefix crosses from one worker's cache to another's: the same tokens with less computed."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from engine.cache.figures import Group
from engine.cache.keys import block_keys
from engine.sequence import Sampling
from engine.transport.certificates import make_authority, make_certificate
from engine.transport.security import Security
from engine.worker.errors import NotReady, TransferFailed, UnknownPrefix
from engine.worker.figures import stats
from engine.worker.messages import (
    DecodeRequest,
    Destination,
    Key,
    PrefillRequest,
    PrefixRequest,
)

PAGE = 16


def prompt_of(length: int, seed: int, shared: int = 0) -> list[int]:
    """`shared` tokens that are the same for every seed, then its own."""
    common, own = random.Random(99), random.Random(seed)
    return [common.randrange(256) for _ in range(shared)] + [
        own.randrange(256) for _ in range(length - shared)
    ]


def place(worker) -> Destination:
    return Destination("127.0.0.1", worker.courier.plane.port, worker.incarnation)


def asks(name, prompt, to, tenant="") -> PrefillRequest:
    return PrefillRequest(Key(name, 1), prompt, 0, 0, 0, 0, tenant, Sampling(), place(to))


async def decode(worker, name, count) -> list[int]:
    request = DecodeRequest(Key(name, 1), count, True, Sampling())
    return [token.id async for token in worker.stream(request.key, worker.take(request))]


def wants(name, prompt, pages, to, **changes) -> PrefixRequest:
    fields = {
        "key": Key(name, 1),
        "prompt": prompt,
        "pages": pages,
        "held_pages": 0,
        "tenant": "",
        "destination": place(to),
    }
    return PrefixRequest(**{**fields, **changes})


def hit_of(worker, prompt, tenant="") -> int:
    """Engine tokens of the prompt from which the worker would start."""
    return worker.pool.match(block_keys(prompt, PAGE, tenant), len(prompt)).tokens


async def warm(worker, decoder, prompt, name="warm", tenant="") -> None:
    """Leave the prompt's cache in `worker`."""
    await worker.prefill(asks(name, prompt, decoder, tenant=tenant))
    decoder.abandon(Key(name, 1))


@pytest.mark.parametrize("staging_bytes", [0, 200_000])
@pytest.mark.parametrize("model", ["tiny", "tiny-7to1"])
async def test_a_fetched_prefix_is_a_hit_and_the_tokens_are_those_of_one_engine(
    model, staging_bytes, start_worker, engine, nothing_leaked
):
    options = {"model": model, "staging_bytes": staging_bytes}
    source, sink = [await start_worker(role="prefill", **options) for _ in range(2)]
    decoder = await start_worker(role="decode", **options)
    prompt = prompt_of(130, 1, shared=100)
    await warm(source, decoder, prompt_of(110, 2, shared=100))
    sent = await source.send_prefix(wants("r", prompt, 6, sink))
    assert sent.tokens == 96
    assert sent.wire_bytes > source.engine.layout.request_bytes(96)
    assert hit_of(sink, prompt) == 96
    assert sink.events.take(sink.pool)[-1] == ["state", True, f"{block_keys(prompt, PAGE)[5]:x}"]
    done = await sink.prefill(asks("r", prompt, decoder))
    assert done.cached_tokens == 96
    assert await decode(decoder, "r", 12) == engine(model).generate(prompt, 12)
    for worker in (source, sink):
        assert stats(worker)["prefixes"]["in_hand"] == 0
    assert (stats(source)["prefixes"]["sent"], stats(sink)["prefixes"]["received"]) == (1, 1)
    await nothing_leaked(source, sink, decoder)


async def test_what_the_destination_holds_does_not_cross_again(
    start_worker, engine, nothing_leaked
):
    source = await start_worker(role="prefill")
    sink = await start_worker(role="prefill", checkpoint_interval=0)
    decoder = await start_worker(role="decode")
    await warm(source, decoder, prompt_of(110, 2, shared=100))
    # It computed the same first 100 tokens and kept no state where the prefix ends.
    await warm(sink, decoder, prompt_of(130, 3, shared=100), "b")
    prompt = prompt_of(130, 1, shared=100)
    assert hit_of(sink, prompt) == 0
    layout = source.engine.layout
    states = layout.request_bytes(96) - 96 * layout.config.kv_bytes_per_token("float32")
    # Nothing held is claimed, all of it is there: the state alone crosses.
    sent = await source.send_prefix(wants("r", prompt, 6, sink))
    assert states < sent.wire_bytes < states + 4096
    assert hit_of(sink, prompt) == 96
    # More is claimed than is there.
    short = prompt_of(40, 4, shared=40)
    await warm(source, decoder, prompt_of(120, 5, shared=100), "c")
    other = await start_worker(role="prefill", checkpoint_interval=0)
    await warm(other, decoder, short, "d")
    sent = await source.send_prefix(wants("s", prompt, 6, other, held_pages=6))
    held = other.pool.match(block_keys(short, PAGE), 40).kv_tokens
    assert held == 32
    assert (
        layout.request_bytes(96 - held) < sent.wire_bytes < layout.request_bytes(96 - held) + 4096
    )
    for name, worker in (("r", sink), ("s", other)):
        done = await worker.prefill(asks(name, prompt, decoder))
        assert done.cached_tokens == 96
        assert await decode(decoder, name, 8) == engine().generate(prompt, 8)
    await nothing_leaked(source, sink, other, decoder)


async def test_what_was_evicted_or_never_whole_is_not_sent(start_worker, nothing_leaked):
    source = await start_worker(role="prefill", pages=10, slots=6)
    sink = await start_worker(role="prefill")
    decoder = await start_worker(role="decode")
    prompt = prompt_of(110, 2, shared=100)
    await warm(source, decoder, prompt)
    with pytest.raises(UnknownPrefix, match="5 pages of r"):
        await source.send_prefix(wants("r", prompt, 5, sink))  # no state lies there
    await warm(source, decoder, prompt_of(150, 3), "evicting")
    with pytest.raises(UnknownPrefix):
        await source.send_prefix(wants("r", prompt, 6, sink))
    assert len(sink.pool.figures()) and sink.pool.figures()[Group.KV].cached == 0
    await nothing_leaked(source, sink, decoder)


async def test_no_prefix_of_another_tenant(start_worker, nothing_leaked):
    source = await start_worker(role="prefill")
    sink = await start_worker(role="prefill")
    decoder = await start_worker(role="decode")
    prompt = prompt_of(110, 2, shared=100)
    await warm(source, decoder, prompt, tenant="acme")
    for tenant in ("", "other"):
        with pytest.raises(UnknownPrefix):
            await source.send_prefix(wants("r", prompt, 6, sink, tenant=tenant))
    await source.send_prefix(wants("r", prompt, 6, sink, tenant="acme"))
    assert [hit_of(sink, prompt, tenant) for tenant in ("", "other", "acme")] == [0, 0, 96]
    await nothing_leaked(source, sink, decoder)


async def test_a_peer_that_may_not_send_a_tenants_caches_may_not_send_its_prefixes(
    start_worker, tmp_path, nothing_leaked
):
    authority = make_authority(tmp_path, 1)

    def secured(name, tenants):
        certificate, key = make_certificate(tmp_path, name, 1)
        return Security(str(certificate), str(key), str(authority), tenants)

    source = await start_worker(role="prefill", security=secured("p0", {}))
    sink = await start_worker(role="prefill", security=secured("p1", {"p0": ("acme",)}))
    decoder = await start_worker(role="decode", security=secured("d0", {"p0": ("*",)}))
    prompt = prompt_of(110, 2, shared=100)
    for tenant in ("acme", "other"):
        await warm(source, decoder, prompt, tenant, tenant)
    await source.send_prefix(wants("r", prompt, 6, sink, tenant="acme"))
    with pytest.raises(TransferFailed, match="p0 may not send caches of tenant 'other'"):
        await source.send_prefix(wants("s", prompt, 6, sink, tenant="other"))
    assert [hit_of(sink, prompt, tenant) for tenant in ("acme", "other")] == [96, 0]
    rows = [row for row in sink.courier.plane.audit_rows() if row["tenant"] == "acme"]
    assert [(row["direction"], row["peer"], row["request_id"]) for row in rows] == [
        ("received", "p0", "prefix:r")
    ]
    await nothing_leaked(source, sink, decoder)


async def test_refused_where_nobody_prefills_or_no_memory_is_free(start_worker, nothing_leaked):
    source = await start_worker(role="prefill")
    decoder = await start_worker(role="decode")
    small = await start_worker(role="prefill", pages=4)
    prompt = prompt_of(110, 2, shared=100)
    await warm(source, decoder, prompt)
    with pytest.raises(TransferFailed, match="takes no prefixes now"):
        await source.send_prefix(wants("r", prompt, 6, decoder))
    with pytest.raises(TransferFailed, match="no memory for a prefix"):
        await source.send_prefix(wants("r", prompt, 6, small))
    await source.drain()
    with pytest.raises(NotReady):
        await source.send_prefix(wants("r", prompt, 6, small))
    await nothing_leaked(source, small, decoder)


async def test_the_source_keeps_what_it_sends_and_gives_it_back(
    start_worker, engine, nothing_leaked
):
    """Pressure while the prefix is on its way evicts nothing of it."""
    source = await start_worker(role="prefill", pages=18, slots=5)
    sink = await start_worker(role="prefill")
    decoder = await start_worker(role="decode")
    prompt = prompt_of(130, 1, shared=100)
    await warm(source, decoder, prompt_of(110, 2, shared=100))
    reached, go_on = asyncio.Event(), asyncio.Event()
    medium = source.courier._medium
    load = medium.load

    async def held_up(parcel, layer, *rest):
        if layer == 1 and not reached.is_set():
            reached.set()
            await go_on.wait()
        await load(parcel, layer, *rest)

    medium.load = held_up
    sending = asyncio.create_task(source.send_prefix(wants("r", prompt, 6, sink)))
    await reached.wait()
    assert hit_of(sink, prompt) == 0
    assert source.pool.figures()[Group.KV].pinned == 6
    draining = asyncio.create_task(sink.drain())
    for n in range(3):
        await warm(source, decoder, prompt_of(150, 10 + n), f"other{n}")
    assert hit_of(source, prompt) == 96 and not draining.done()
    go_on.set()
    assert (await sending).tokens == 96
    await draining
    await sink.convert("prefill")
    await sink.prefill(asks("r", prompt, decoder))
    assert await decode(decoder, "r", 8) == engine().generate(prompt, 8)
    await nothing_leaked(source, sink, decoder)


@pytest.mark.parametrize("end", ["cancelled", "source dies", "sink dies"])
async def test_a_fetch_that_ends_early_leaves_nothing_anywhere(
    end, start_worker, engine, nothing_leaked
):
    source = await start_worker(role="prefill")
    sink = await start_worker(role="prefill")
    decoder = await start_worker(role="decode")
    prompt = prompt_of(130, 1, shared=100)
    await warm(source, decoder, prompt_of(110, 2, shared=100))
    reached = asyncio.Event()
    medium = source.courier._medium
    load = medium.load

    async def stuck(parcel, layer, *rest):
        if layer == 1:
            reached.set()
            await asyncio.sleep(0.3 if end != "cancelled" else 30)
        await load(parcel, layer, *rest)

    medium.load = stuck
    sending = asyncio.create_task(source.send_prefix(wants("r", prompt, 6, sink)))
    await reached.wait()
    assert len(sink.courier.prefixes) == 1
    if end == "cancelled":
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    else:
        dying = source if end == "source dies" else sink
        os.kill(dying.courier.plane.pid, signal.SIGKILL)
        with pytest.raises(TransferFailed):
            await sending
    medium.load = load
    for _ in range(1000):
        if not (len(sink.courier.prefixes) or len(source.courier.prefixes)):
            break
        await asyncio.sleep(0.01)
    await nothing_leaked(source, sink)
    assert sink.pool.figures()[Group.KV].cached == 0
    if end != "sink dies":
        # The request prefills what it has.
        done = await sink.prefill(asks("r", prompt, decoder))
        assert done.cached_tokens == 0
        assert await decode(decoder, "r", 8) == engine().generate(prompt, 8)
    await nothing_leaked(decoder)


async def test_a_prefix_that_was_computed_meanwhile_is_kept_once(
    start_worker, engine, nothing_leaked
):
    source = await start_worker(role="prefill")
    sink = await start_worker(role="prefill")
    decoder = await start_worker(role="decode")
    prompt = prompt_of(130, 1, shared=100)
    await warm(source, decoder, prompt_of(110, 2, shared=100))
    reached, go_on = asyncio.Event(), asyncio.Event()
    land = sink.courier._medium.land

    async def held_up(parcel):
        if parcel.n_tokens == 96:
            reached.set()
            await go_on.wait()
        await land(parcel)

    sink.courier._medium.land = held_up
    sending = asyncio.create_task(source.send_prefix(wants("r", prompt, 6, sink)))
    await reached.wait()
    await warm(sink, decoder, prompt_of(120, 6, shared=100), "meanwhile")
    go_on.set()
    await sending
    assert sink.pool.figures()[Group.KV].cached == 7
    done = await sink.prefill(asks("r", prompt, decoder))
    assert done.cached_tokens == 96
    assert await decode(decoder, "r", 8) == engine().generate(prompt, 8)
    await nothing_leaked(source, sink, decoder)
