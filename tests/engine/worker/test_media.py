"""The staging area of a GPU's cache, on a CPU: what crosses, and what each copy waits for."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from engine.cache.pool import HybridPool
from engine.cache.storage import CacheStorage
from engine.model.config import shape
from engine.model.layout import CacheLayout
from engine.transport.arena import SharedArena
from engine.worker import media
from engine.worker.media import Staged

PAGE, TOKENS = 16, 40


def staged() -> tuple[Staged, CacheStorage, HybridPool]:
    storage = CacheStorage(CacheLayout(shape("tiny"), 20, 6, PAGE))
    storage.buffer.copy_(torch.randint(0, 256, storage.buffer.shape, dtype=torch.uint8))
    pool = HybridPool(19, 5, PAGE, first_page=1, first_slot=1)
    return Staged(storage, SharedArena.create(1 << 20)), storage, pool


async def test_a_layer_is_read_behind_its_fence_and_landed_before_it_is_told(monkeypatch):
    """Nothing is sent that is still being written, nor computed on while it is still arriving."""
    medium, storage, pool = staged()
    order: list[str] = []
    pack, unpack = media.pack, media.unpack

    def noted(name, call):
        def run(*args):
            order.append(name)
            return call(*args)

        return run

    monkeypatch.setattr(media, "pack", noted("pack", pack))
    monkeypatch.setattr(media, "unpack", noted("unpack", unpack))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    medium._stream = SimpleNamespace(
        wait_event=order.append, synchronize=lambda: order.append("synchronize")
    )
    lease = pool.acquire([], TOKENS)
    parcel = medium.open(lease, TOKENS, 0)
    layers = storage.layout.config.layers
    for layer in range(layers):
        await medium.load(parcel, layer, 0, TOKENS, f"fence {layer}")
    assert order == [each for n in range(layers) for each in (f"fence {n}", "pack")]
    order.clear()
    await medium.land(parcel)
    assert order == ["unpack"] * layers + ["synchronize"]


@pytest.mark.parametrize("held", [0, PAGE])
async def test_what_is_staged_lands_bit_for_bit_and_touches_nothing_else(held: int):
    medium, storage, pool = staged()
    source, target = pool.acquire([], TOKENS), pool.acquire([], TOKENS)
    parcel = medium.open(source, TOKENS, held)
    for layer in range(storage.layout.config.layers):
        await medium.load(parcel, layer, held, TOKENS, None)
    before = storage.buffer.clone()
    other = media.Parcel(target, TOKENS, held, parcel.offset)
    await medium.land(other)
    changed = before != storage.buffer
    for layer in range(storage.layout.config.layers):
        for start, size in storage.layout.regions(
            layer, target.pages[held // PAGE :], target.slot, TOKENS - held
        ):
            changed[start : start + size] = False
        for a, b in zip(
            storage.layout.regions(layer, source.pages, source.slot, TOKENS),
            storage.layout.regions(layer, target.pages, target.slot, TOKENS),
            strict=True,
        ):
            skip = a[1] * held // TOKENS if layer in storage.layout.latents else 0
            theirs = storage.buffer[a[0] + skip : a[0] + a[1]]
            assert torch.equal(storage.buffer[b[0] + skip : b[0] + b[1]], theirs)
    assert not changed.any()
