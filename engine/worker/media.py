"""Between a cache on its device and the arena from which the data plane sends.

On a CPU they are the same memory (`Direct`). A GPU's cache is packed layer by layer into a staging
area on the host, and unpacked from there on the other side (`Staged`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from engine.cache.pool import Lease, NeverFits, Pin, PoolFull
from engine.cache.storage import CacheStorage
from engine.model.layout import CacheLayout
from engine.ops.pack import pack, unpack
from engine.transport.arena import SharedArena
from engine.transport.regions import Kind, Region
from engine.worker.heap import Heap
from engine.worker.settling import until_done

Ranges = list[tuple[int, int]]
Pieces = list[tuple[Region, Ranges]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parcel:
    """The part of a lease's (or a pinned prefix's) cache that crosses: all of `n_tokens` but the
    first `held` (whole pages). `offset` is where it is staged, -1 where it is not.
    """

    lease: Lease | Pin
    n_tokens: int
    held: int
    offset: int = -1

    def pages(self, layout: CacheLayout, start: int, stop: int) -> list[int]:
        """Those of tokens start..stop."""
        return self.lease.pages[start // layout.page_tokens : layout.pages_for(stop)]


class Medium(Protocol):
    """`open` may raise PoolFull (try later) or NeverFits; every parcel is closed once."""

    def open(self, lease: Lease | Pin, n_tokens: int, held: int) -> Parcel: ...

    def pieces(self, parcel: Parcel, layer: int, start: int, stop: int) -> Pieces:
        """Where in the arena tokens start..stop of the layer, or its state, lie or will lie.

        `start` is a page boundary.
        """
        ...

    async def load(self, parcel: Parcel, layer: int, start: int, stop: int, fence: Any) -> None:
        """Bring what `pieces` names into the arena, once `fence` has passed (None: it is there)."""
        ...

    async def land(self, parcel: Parcel) -> None:
        """Bring a whole arrived cache from the arena to its pages and slot."""
        ...

    def close(self, parcel: Parcel) -> None: ...


def region_sizes(layout: CacheLayout, layer: int, n_tokens: int) -> list[tuple[Region, int]]:
    """The regions of one layer and their bytes, where `n_tokens` latents cross."""
    if layer in layout.state:
        return [
            (Region(layer, Kind.STATE), layout.state[layer].row_bytes),
            (Region(layer, Kind.CONV), layout.conv[layer].row_bytes),
        ]
    token_bytes = layout.latents[layer].row_bytes // layout.page_tokens
    return [(Region(layer, Kind.KV), token_bytes * n_tokens)]


class Direct:
    """The storage lies in the arena: nothing is copied."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout

    def open(self, lease: Lease | Pin, n_tokens: int, held: int) -> Parcel:
        return Parcel(lease, n_tokens, held)

    def pieces(self, parcel: Parcel, layer: int, start: int, stop: int) -> Pieces:
        layout = self._layout
        pages = parcel.pages(layout, start, stop)
        ranges = layout.regions(layer, pages, parcel.lease.slot, stop - start)
        if layer in layout.state:
            state, conv = ranges
            return [(Region(layer, Kind.STATE), [state]), (Region(layer, Kind.CONV), [conv])]
        return [(Region(layer, Kind.KV), ranges)]

    async def load(self, parcel: Parcel, layer: int, start: int, stop: int, fence: Any) -> None:
        assert fence is None, "a CPU layer is written when its forward pass says so"

    async def land(self, parcel: Parcel) -> None:
        return None

    def close(self, parcel: Parcel) -> None:
        return None


class Staged:
    """Copies through the arena with one thread, which on CUDA has a stream of its own."""

    def __init__(self, storage: CacheStorage, arena: SharedArena) -> None:
        self._storage = storage
        self._layout = storage.layout
        self._heap = Heap(arena.size_bytes)
        self._host = torch.frombuffer(arena.buffer, dtype=torch.uint8)
        self._thread = ThreadPoolExecutor(1, "staging")
        cuda = storage.device.type == "cuda"
        self._stream = torch.cuda.Stream(storage.device) if cuda else None

    def open(self, lease: Lease | Pin, n_tokens: int, held: int) -> Parcel:
        size = sum(self._layer_bytes(layer, n_tokens - held) for layer in self._layers)
        if size > self._heap.size_bytes:
            raise NeverFits(
                f"a cache of {size} bytes; the staging area has {self._heap.size_bytes}"
            )
        offset = self._heap.take(size)
        if offset is None:
            raise PoolFull(f"{size} bytes of staging wanted")
        return Parcel(lease, n_tokens, held, offset)

    def pieces(self, parcel: Parcel, layer: int, start: int, stop: int) -> Pieces:
        offset = self._offset(parcel, layer, start)
        pieces: Pieces = []
        for region, size in region_sizes(self._layout, layer, stop - start):
            pieces.append((region, [(offset, size)]))
            offset += size
        return pieces

    async def load(self, parcel: Parcel, layer: int, start: int, stop: int, fence: Any) -> None:
        await self._run(lambda: self._load(parcel, layer, start, stop, fence))

    async def land(self, parcel: Parcel) -> None:
        await self._run(lambda: self._land(parcel))

    def close(self, parcel: Parcel) -> None:
        self._heap.give(parcel.offset)

    @property
    def _layers(self) -> range:
        return range(self._layout.config.layers)

    def _layer_bytes(self, layer: int, n_tokens: int) -> int:
        size = sum(size for _, size in region_sizes(self._layout, layer, n_tokens))
        return -(-size // 16) * 16

    def _offset(self, parcel: Parcel, layer: int, start: int) -> int:
        """Layers lie one after the other, each at a multiple of 16 bytes, so that views align; a
        layer's tokens lie in order.
        """
        tokens = parcel.n_tokens - parcel.held
        offset = parcel.offset + sum(self._layer_bytes(n, tokens) for n in range(layer))
        if layer in self._layout.latents:
            offset += region_sizes(self._layout, layer, start - parcel.held)[0][1]
        return offset

    def _load(self, parcel: Parcel, layer: int, start: int, stop: int, fence: Any) -> None:
        if self._stream is not None and fence is not None:
            self._stream.wait_event(fence)
        pages = parcel.pages(self._layout, start, stop)
        wire = pack(self._storage, layer, pages, parcel.lease.slot, stop - start)
        offset = self._offset(parcel, layer, start)
        self._host[offset : offset + wire.numel()].copy_(wire)

    def _land(self, parcel: Parcel) -> None:
        tokens = parcel.n_tokens - parcel.held
        pages = parcel.pages(self._layout, parcel.held, parcel.n_tokens)
        for layer in self._layers:
            offset = self._offset(parcel, layer, parcel.held)
            size = sum(size for _, size in region_sizes(self._layout, layer, tokens))
            wire = self._host[offset : offset + size].to(self._storage.device)
            unpack(self._storage, layer, pages, parcel.lease.slot, tokens, wire)
        if self._stream is not None:
            self._stream.synchronize()

    async def _run(self, work: Callable[[], T]) -> T:
        """In the thread; returns or raises only when the thread no longer touches the memory."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._on_stream, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await until_done(running)
            raise

    @torch.inference_mode()
    def _on_stream(self, work: Callable[[], T]) -> T:
        with torch.cuda.stream(self._stream):
            return work()
