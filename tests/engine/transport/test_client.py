"""The asyncio client with real data plane processes on loopback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from engine.transport.arena import SharedArena
from engine.transport.client import Arrival, Callbacks, DataPlane, Refusal
from engine.transport.errors import TransferFailed, TransferRefused
from engine.transport.messages import Key, Manifest
from engine.transport.outbound import Peer
from engine.transport.regions import Kind, Range, Region, RegionSize
from engine.transport.settings import Settings

MIB = 1 << 20


class Decoder:
    """A receiving worker with a bump allocator: blocks of `block` bytes, scattered on purpose."""

    def __init__(self, arena: SharedArena, block: int = 64 * 1024) -> None:
        self.arena = arena
        self.block = block
        self.free = list(range(0, arena.size_bytes, block))[::-1]
        self.held: dict[Key, dict[Region, list[Range]]] = {}
        self.committed: dict[Key, Arrival] = {}
        self.aborted: list[Key] = []
        self.offered = 0

    async def on_offer(self, key: Key, manifest: Manifest) -> dict[Region, list[Range]]:
        self.offered += 1
        need = sum(-(-r.size_bytes // self.block) for r in manifest.regions)
        if need > len(self.free):
            raise Refusal("no blocks")
        regions = {}
        for item in manifest.regions:
            ranges, left = [], item.size_bytes
            while left:
                take = min(left, self.block)
                ranges.append(Range(self.free.pop(), take))
                left -= take
            regions[item.region] = ranges
        self.held[key] = regions
        return regions

    async def on_commit(self, key: Key, arrival: Arrival) -> None:
        self.committed[key] = arrival

    def on_abort(self, key: Key) -> None:
        self.aborted.append(key)
        self.release(key)

    def release(self, key: Key) -> None:
        for ranges in self.held.pop(key).values():
            self.free.extend(r.offset for r in ranges)

    def content(self, key: Key, region: Region) -> bytes:
        return b"".join(self.arena.views(self.held[key][region]))

    @property
    def callbacks(self) -> Callbacks:
        return Callbacks(self.on_offer, self.on_commit, self.on_abort)


async def until(condition: Callable[[], object]) -> None:
    """Poll; the test's own timeout ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - the condition lies in another process
        await asyncio.sleep(0.01)


def small_manifest(layers: int = 4, kv: int = 3 * MIB + 4096, state: int = 256 * 1024) -> Manifest:
    regions = []
    for layer in range(layers):
        kind = Kind.STATE if layer % 2 else Kind.KV
        regions.append(RegionSize(Region(layer, kind), state if layer % 2 else kv))
    return Manifest(regions=tuple(regions), n_tokens=128, held_tokens=64, tenant="a")


async def test_layer_wise_transfer_arrives_whole() -> None:
    source, target = SharedArena.create(32 * MIB), SharedArena.create(32 * MIB)
    source.buffer[:] = os.urandom(MIB) * 32
    decoder = Decoder(target)
    receiver = await DataPlane.start(target, Settings(incarnation=2, layout="t"), decoder.callbacks)
    sender = await DataPlane.start(source, Settings(incarnation=1, layout="t"))
    manifest = small_manifest()
    key = Key("r1", 1)
    transfer = await sender.open(Peer(*receiver.address, 2), key, manifest)
    at = 0
    expected = {}
    for item in manifest.regions:
        half = item.size_bytes // 2 // 4096 * 4096
        parts = [Range(at, half), Range(at + half, item.size_bytes - half)]
        for part in parts:
            transfer.push(item.region, [part])
            await asyncio.sleep(0)
        expected[item.region] = bytes(source.buffer[at : at + item.size_bytes])
        at += item.size_bytes
    stats = await transfer.commit(first_token=7, meta={"note": "x"})
    assert key in decoder.committed
    assert decoder.committed[key].first_token == 7
    assert decoder.committed[key].meta == {"note": "x"}
    for region, data in expected.items():
        assert data == decoder.content(key, region)
    assert stats.resent == 0
    assert manifest.total_bytes < stats.wire_bytes < manifest.total_bytes * 1.01
    (sent,) = sender.audit_rows()
    received: list[dict] = []
    await until(lambda: received.extend(receiver.audit_rows()) or received)
    assert sent["digest"] == received[0]["digest"]
    assert (sent["direction"], received[0]["direction"]) == ("sent", "received")
    assert received[0]["bytes"] == manifest.total_bytes
    await sender.close()
    await receiver.close()
    assert decoder.aborted == []


async def test_refusals() -> None:
    source, target = SharedArena.create(16 * MIB), SharedArena.create(4 * MIB)
    decoder = Decoder(target)
    receiver = await DataPlane.start(target, Settings(incarnation=2, layout="t"), decoder.callbacks)
    sender = await DataPlane.start(source, Settings(incarnation=1, layout="t"))
    other = await DataPlane.start(source, Settings(incarnation=3, layout="u"))
    with pytest.raises(TransferRefused, match="no blocks"):
        await sender.open(Peer(*receiver.address), Key("big"), small_manifest())
    with pytest.raises(TransferRefused, match="layout 'u'"):
        await other.open(Peer(*receiver.address), Key("x"), small_manifest())
    with pytest.raises(TransferFailed, match="restarted"):
        await sender.open(Peer(*receiver.address, 99), Key("y"), small_manifest())
    small = small_manifest(2, 4096, 4096)
    transfer = await sender.open(Peer(*receiver.address, 2), Key("z"), small)
    assert await transfer.cancel() is False
    await until(lambda: decoder.aborted == [Key("z")])
    assert len(decoder.free) == 64
    for plane in (sender, other, receiver):
        await plane.close()
