"""A receiving worker with a block allocator, a fault proxy, and planes that always end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.transport.arena import SharedArena
from engine.transport.client import Arrival, Callbacks, DataPlane, Refusal, Transfer
from engine.transport.frames import HEADER_BYTES, decode_header
from engine.transport.messages import Hello, Key, Manifest
from engine.transport.outbound import Peer
from engine.transport.regions import Kind, Range, Region, RegionSize
from engine.transport.settings import Settings

MIB = 1 << 20


class Decoder:
    """Blocks of `block` bytes, handed out scattered. Waits `wait_s` for blocks, all or nothing."""

    def __init__(self, arena: SharedArena, block: int = 64 * 1024) -> None:
        self.arena = arena
        self.block = block
        self.free = list(range(0, arena.size_bytes, block))[::-1]
        self.blocks = len(self.free)
        self.held: dict[Key, dict[Region, list[Range]]] = {}
        self.committed: dict[Key, Arrival] = {}
        self.aborted: list[Key] = []
        self.wait_s = 0.0
        self.before_commit: Callable[[Key], Awaitable[None]] | None = None

    async def on_offer(self, key: Key, manifest: Manifest) -> dict[Region, list[Range]]:
        need = sum(-(-r.size_bytes // self.block) for r in manifest.regions)
        deadline = asyncio.get_running_loop().time() + self.wait_s
        while need > len(self.free):
            if asyncio.get_running_loop().time() >= deadline:
                raise Refusal("no blocks")
            await asyncio.sleep(0.01)
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
        if self.before_commit is not None:
            await self.before_commit(key)
        assert key not in self.committed, "committed twice"
        self.committed[key] = arrival

    def on_abort(self, key: Key) -> None:
        self.aborted.append(key)
        self.release(key)

    def release(self, key: Key) -> None:
        for ranges in self.held.pop(key).values():
            self.free.extend(r.offset for r in ranges)

    def content(self, key: Key, region: Region) -> bytes:
        return b"".join(self.arena.views(self.held[key][region]))


@dataclass
class FaultProxy:
    """A TCP relay in the test's own loop that can cut, stall, throttle and damage.

    damage: flips one byte of a lane's first chunk on that many lane connections. paused: nothing
    moves. rate_bytes_s: per direction of a connection.
    """

    target: tuple[str, int]
    damage: int = 0
    rate_bytes_s: float = 0.0
    rcvbuf_bytes: int = 0
    accepted: int = 0
    refuse: bool = False
    port: int = 0
    lanes: list[int] = field(default_factory=list)
    _moving: asyncio.Event = field(default_factory=asyncio.Event)
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def start(self) -> FaultProxy:
        self._moving.set()
        listener = socket.create_server(("127.0.0.1", 0))
        if self.rcvbuf_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.rcvbuf_bytes)
        self._server = await asyncio.start_server(self._serve, sock=listener)
        self.port = listener.getsockname()[1]
        return self

    def pause(self) -> None:
        self._moving.clear()

    def resume(self) -> None:
        self._moving.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._open):
            writer.transport.abort()

    async def stop(self) -> None:
        self.cut()
        self.resume()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self.refuse:
                return
            await self._moving.wait()
            self.accepted += 1
            up_reader, up_writer = await asyncio.open_connection(*self.target)
            self._open.add(up_writer)
            hello = await reader.readexactly(HEADER_BYTES)
            body = await reader.readexactly(decode_header(hello).body_bytes)
            lane = Hello.decode(body).lane
            self.lanes.append(lane)
            up_writer.write(hello + body)
            spoil = lane >= 0 and self.damage > 0
            self.damage -= spoil
            await asyncio.gather(
                self._pump(reader, up_writer, HEADER_BYTES + 1000 if spoil else -1),
                self._pump(up_reader, writer, -1),
            )
            self._open.discard(up_writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self._open.discard(writer)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spoil_at: int
    ) -> None:
        try:
            passed = 0
            while data := await reader.read(1 << 16):
                await self._moving.wait()
                if passed <= spoil_at < passed + len(data):
                    spoilt = bytearray(data)
                    spoilt[spoil_at - passed] ^= 0x10
                    data = bytes(spoilt)
                passed += len(data)
                writer.write(data)
                await writer.drain()
                if self.rate_bytes_s:
                    await asyncio.sleep(len(data) / self.rate_bytes_s)
        except OSError:
            pass
        finally:
            writer.transport.abort()


class Bench:
    """Starts planes and proxies for one test, and ends them all."""

    def __init__(self) -> None:
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._incarnation = 0
        self.source = SharedArena.create(16 * MIB)
        self.source.buffer[:] = os.urandom(MIB) * 16

    async def plane(
        self, arena: SharedArena, decoder: Decoder | None = None, **settings: Any
    ) -> DataPlane:
        self._incarnation += 1
        callbacks = None
        if decoder is not None:
            callbacks = Callbacks(decoder.on_offer, decoder.on_commit, decoder.on_abort)
        settings.setdefault("incarnation", self._incarnation)
        plane = await DataPlane.start(arena, Settings(layout="t", **settings), callbacks)
        self._closers.append(plane.close)
        return plane

    async def decoder(self, size: int = 16 * MIB, **settings: Any) -> tuple[Decoder, DataPlane]:
        decoder = Decoder(SharedArena.create(size))
        return decoder, await self.plane(decoder.arena, decoder, **settings)

    async def sender(self, **settings: Any) -> DataPlane:
        return await self.plane(self.source, **settings)

    async def proxy(self, target: DataPlane, **faults: Any) -> FaultProxy:
        proxy = await FaultProxy(target.address, **faults).start()
        self._closers.append(proxy.stop)
        return proxy

    @staticmethod
    def manifest(
        layers: int = 4, kv: int = 3 * MIB + 4096, state: int = 256 * 1024, **fields: Any
    ) -> Manifest:
        """Alternating KV and state layers."""
        regions = [
            RegionSize(Region(n, Kind.STATE), state)
            if n % 2
            else RegionSize(Region(n, Kind.KV), kv)
            for n in range(layers)
        ]
        return Manifest(tuple(regions), n_tokens=128, held_tokens=64, tenant="a", **fields)

    @staticmethod
    def layout(manifest: Manifest) -> dict[Region, Range]:
        """Where the source keeps each region: one after the other."""
        at, ranges = 0, {}
        for item in manifest.regions:
            ranges[item.region] = Range(at, item.size_bytes)
            at += item.size_bytes
        return ranges

    def push_all(self, transfer: Transfer) -> None:
        for region, where in self.layout(transfer.manifest).items():
            transfer.push(region, [where])

    async def send(self, plane: DataPlane, peer: Peer, key: Key, manifest: Manifest) -> Any:
        """Open, push everything, commit."""
        transfer = await plane.open(peer, key, manifest)
        self.push_all(transfer)
        return await transfer.commit()

    def assert_arrived(self, decoder: Decoder, key: Key, manifest: Manifest) -> None:
        assert key in decoder.committed
        for region, where in self.layout(manifest).items():
            assert decoder.content(key, region) == bytes(*self.source.views([where])), region

    async def until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - the condition lies in another process
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for closer in reversed(self._closers):
            with contextlib.suppress(Exception):
                await closer()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()
