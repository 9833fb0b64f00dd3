"""Pack and unpack: bit-exact, whole, and only where they are told to write."""

from __future__ import annotations

import pytest
import torch

from engine.cache.storage import CacheStorage
from engine.model.config import shape
from engine.model.layout import CacheLayout
from engine.ops.pack import StateCodec, pack, packed_bytes, unpack

TINY = shape("tiny")
MLA_LAYER, KDA_LAYER = 3, 1


def filled(dtype: str = "float32", seed: int = 0) -> CacheStorage:
    storage = CacheStorage(CacheLayout(TINY, n_pages=8, n_slots=5, page_tokens=8, dtype=dtype))
    torch.manual_seed(seed)
    for tensors in (storage.latents, storage.state, storage.conv):
        for tensor in tensors.values():
            tensor.normal_()
    return storage


def as_bytes(storage: CacheStorage, layer: int, pages: list[int], slot: int, n: int) -> bytes:
    """What the layout's regions hold, in wire order."""
    flat = storage.buffer.numpy().tobytes()
    regions = storage.layout.regions(layer, pages, slot, n)
    return b"".join(flat[offset : offset + length] for offset, length in regions)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [MLA_LAYER, KDA_LAYER])
@pytest.mark.parametrize("n_tokens", [1, 8, 17, 24])
def test_round_trip_is_bit_exact_and_in_wire_order(dtype: str, layer: int, n_tokens: int):
    source, target = filled(dtype), filled(dtype, seed=1)
    pages = [5, 2, 7][: -(-n_tokens // 8)]
    wire = pack(source, layer, pages, 3, n_tokens)
    assert wire.dtype == torch.uint8
    assert wire.numel() == packed_bytes(source, layer, n_tokens)
    assert wire.numpy().tobytes() == as_bytes(source, layer, pages, 3, n_tokens)
    there = [1, 4, 6][: len(pages)]
    before = target.buffer.clone()
    unpack(target, layer, there, 2, n_tokens, wire)
    assert as_bytes(target, layer, there, 2, n_tokens) == wire.numpy().tobytes()
    for offset, length in target.layout.regions(layer, there, 2, n_tokens):
        before[offset : offset + length] = target.buffer[offset : offset + length]
    assert torch.equal(before, target.buffer)


def test_a_request_packs_into_its_bytes():
    storage = filled()
    sizes = [packed_bytes(storage, layer, 19) for layer in range(TINY.layers)]
    assert sum(sizes) == storage.layout.request_bytes(19)


def test_bf16_codec_halves_the_state_and_keeps_the_convolution():
    source, target = filled(), filled(seed=1)
    wire = pack(source, KDA_LAYER, [], 3, 0, StateCodec.BF16)
    assert wire.numel() == TINY.kda_state_bytes() // 2 + TINY.conv_bytes("float32")
    unpack(target, KDA_LAYER, [], 2, 0, wire, StateCodec.BF16)
    expected = source.state[KDA_LAYER][3].bfloat16().float()
    assert torch.equal(target.state[KDA_LAYER][2], expected)
    assert torch.equal(target.conv[KDA_LAYER][2], source.conv[KDA_LAYER][3])


@pytest.mark.parametrize("layer", [MLA_LAYER, KDA_LAYER])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_buffer_of_another_size_is_refused_and_nothing_is_written(layer: int, change: int):
    source, target = filled(), filled(seed=1)
    wire = pack(source, layer, [5, 2], 3, 10)
    wrong = wire[:-1] if change < 0 else torch.cat([wire, wire[:1]])
    before = target.buffer.clone()
    with pytest.raises(ValueError, match=f"layer {layer}: .* bytes arrived"):
        unpack(target, layer, [1, 4], 2, 10, wrong)
    assert torch.equal(before, target.buffer)
