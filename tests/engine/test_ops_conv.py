"""Short convolution: chunks shorter than its width, slots, checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.model.batch import ForwardBatch, Piece
from engine.ops.short_conv import conv_decode, conv_prefill

CHANNELS, TAPS, LENGTH = 10, 4, 42
WEIGHT = torch.randn(TAPS, CHANNELS, generator=torch.Generator().manual_seed(1))
INPUT = torch.randn(LENGTH, CHANNELS, generator=torch.Generator().manual_seed(2))


def expected() -> torch.Tensor:
    padded = F.pad(INPUT.t().unsqueeze(0), (TAPS - 1, 0))
    return F.silu(F.conv1d(padded, WEIGHT.t().unsqueeze(1), groups=CHANNELS)[0].t())


def slots() -> torch.Tensor:
    return torch.full((5, TAPS - 1, CHANNELS), torch.nan)


def run(cache: torch.Tensor, *pieces: tuple[int, int, int], **options: object) -> torch.Tensor:
    """(start, end, slot) pieces of INPUT in one batch."""
    batch = ForwardBatch.build(
        [Piece([0] * (b - a), a, slot, range(b), **options) for a, b, slot in pieces], 1
    )
    rows = torch.cat([INPUT[a:b] for a, b, _ in pieces])
    return conv_prefill(rows, WEIGHT, cache, batch.prefill)


@pytest.mark.parametrize("chunk", [2, 3, 4, 7, LENGTH])
def test_any_chunking_equals_one_shot(chunk: int):
    cache = slots()
    for a in range(0, LENGTH, chunk):
        b = min(a + chunk, LENGTH)
        assert torch.allclose(run(cache, (a, b, 1)), expected()[a:b], atol=1e-6)
        kept = F.pad(INPUT[:b], (0, 0, TAPS - 1, 0))[-(TAPS - 1) :]
        assert torch.equal(cache[1], kept)


def test_single_tokens_equal_one_shot():
    cache = slots()
    run(cache, (0, 2, 1))
    for t in range(2, LENGTH):
        actual = conv_decode(INPUT[t : t + 1], WEIGHT, cache, torch.tensor([1]))
        assert torch.allclose(actual[0], expected()[t], atol=1e-6)
    assert torch.equal(cache[1], INPUT[-3:])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_chunk_shorter_than_the_taps_leaves_the_block_it_reads_bit_identical(size: int):
    """The state of a prefix hit is shared: read from one slot, written to another."""
    cache = slots()
    run(cache, (0, 16, 1))
    shared = cache[1].clone()
    actual = run(cache, (16, 16 + size, 2), source_slot=1)
    assert torch.allclose(actual, expected()[16 : 16 + size], atol=1e-6)
    assert torch.equal(cache[1], shared)
    assert torch.equal(cache[2], INPUT[16 + size - 3 : 16 + size])


def test_checkpoints_hold_the_inputs_before_their_position():
    cache = slots()
    run(cache, (0, 20, 1), checkpoints=((1, 2), (16, 3), (20, 4)))
    assert torch.equal(cache[2], F.pad(INPUT[:1], (0, 0, 2, 0)))
    assert torch.equal(cache[3], INPUT[13:16])
    assert torch.equal(cache[4], cache[1])


def test_sequences_of_a_batch_do_not_mix():
    cache = slots()
    run(cache, (0, 10, 2))
    actual = run(cache, (0, 5, 1), (10, 30, 2))
    assert torch.allclose(actual, torch.cat([expected()[:5], expected()[10:30]]), atol=1e-6)
    assert cache[3].isnan().all()
