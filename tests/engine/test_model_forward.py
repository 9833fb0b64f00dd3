"""The whole model: however a sequence is cut, batched, resumed or moved, its logits are the same.

Slots and pages that a request does not own are NaN throughout, so that any stray read shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from engine.cache.storage import CacheStorage
from engine.model.batch import ForwardBatch, Piece
from engine.model.config import shape
from engine.model.layout import CacheLayout
from engine.model.model import Model
from engine.model.weights import random_weights
from engine.ops.pack import pack, unpack

PAGE = 16
N_PAGES, N_SLOTS = 120, 12
TOLERANCE = 2e-5
SHAPES = ["tiny", "tiny-7to1", "bench"]


@cache
def model(name: str) -> Model:
    return Model(shape(name), random_weights(shape(name), seed=1))


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def storage_for(name: str) -> CacheStorage:
    storage = CacheStorage(CacheLayout(shape(name), N_PAGES, N_SLOTS, PAGE))
    storage.poison(tuple(range(1, N_SLOTS)), tuple(range(1, N_PAGES)))
    return storage


def pages(first: int, n_tokens: int) -> list[int]:
    """A page table in descending order, so that order matters."""
    count = -(-n_tokens // PAGE)
    return list(range(first + count - 1, first - 1, -1))


def run(name: str, storage: CacheStorage, *pieces: Piece) -> torch.Tensor:
    return model(name).forward(ForwardBatch.build(pieces, PAGE), storage)


@cache
def cold(name: str, n: int, seed: int = 0) -> torch.Tensor:
    """Logits after the first `n` tokens, computed in one pass in an empty engine."""
    return run(name, storage_for(name), Piece(tokens(n, seed), 0, 1, pages(1, n)))[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE):
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() < tolerance


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 64, 100, 149])
def test_any_chunking_equals_one_shot(name: str, chunk: int):
    n = 150 if chunk > 3 else 40
    storage, text = storage_for(name), tokens(n)
    for start in range(0, n, chunk):
        piece = Piece(text[start : start + chunk], start, 3, pages(5, n))
        logits = run(name, storage, piece)
    assert_close(logits[0], cold(name, n))


def test_lengths_around_page_and_chunk_boundaries():
    for n in (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65):
        storage = storage_for("tiny")
        run("tiny", storage, Piece(tokens(n), 0, 1, pages(1, n + 1)))
        logits = run("tiny", storage, Piece(tokens(n + 1)[n:], n, 1, pages(1, n + 1)))
        assert_close(logits[0], cold("tiny", n + 1))


def test_cuts_at_multiples_of_64_leave_the_same_bits():
    """State checkpoints lie there, so a prefix hit repeats the arithmetic of a cold run.

    Only the recurrence promises it: matrix products may round by the number of their rows.
    """
    from engine.ops.kda_chunked import kda_chunked

    torch.manual_seed(0)
    q, k, v = torch.randn(192, 2, 16), torch.randn(192, 2, 16), torch.randn(192, 2, 24)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    x = (q, k, v, -torch.rand(192, 2, 16), torch.rand(192, 2))
    state = torch.zeros(1, 2, 24, 16)
    _, whole, at = kda_chunked(*x, state, [192], [[64, 128]])
    for begin in (0, 64, 128):
        rows = (part[begin : begin + 64] for part in x)
        _, state, _ = kda_chunked(*rows, state, [64])
        expected = whole[0] if begin == 128 else at[0, begin + 64]
        assert torch.equal(state[0], expected)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tail", [1, 2, 3, 17, 70])
def test_prefix_hit_equals_cold_run(name: str, tail: int):
    """State from the checkpoint's slot, pages shared, own pages for the tail. A tail of one token
    is a prompt of n = 1 mod 64."""
    n = 64 + tail
    storage, text = storage_for(name), tokens(n)
    prefix = pages(1, 64)
    owner = Piece(tokens(90), 0, 1, [*prefix, 20, 21], checkpoints=((64, 2),))
    run(name, storage, owner)
    storage.poison(slots=(1,), pages=(20, 21))
    kept = [t[2].clone() for part in (storage.state, storage.conv) for t in part.values()]
    hit = Piece(text[64:], 64, 5, [*prefix, *pages(30, tail)], source_slot=2)
    assert_close(run(name, storage, hit)[0], cold(name, n))
    left = [t[2] for part in (storage.state, storage.conv) for t in part.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, left, strict=True))


def test_every_checkpoint_of_a_varlen_batch_mixed_with_decode_is_warm():
    """Checkpoints at several depths in several sequences of one pass, one of them resumed."""
    name, storage = "tiny", storage_for("tiny")
    run(name, storage, Piece(tokens(50, 1), 0, 1, pages(1, 64)))
    run(name, storage, Piece(tokens(23, 2), 0, 2, pages(10, 160)))
    chunk = tokens(160, 2)[23:130]
    logits = run(
        name,
        storage,
        Piece(tokens(130, 3), 0, 3, pages(30, 130), checkpoints=((48, 4), (128, 5))),
        Piece(tokens(51, 1)[50:], 50, 1, pages(1, 64)),
        Piece(chunk, 23, 2, pages(10, 160), checkpoints=((32, 6), (112, 7), (130, 8))),
    )
    expected = [cold(name, 130, 3), cold(name, 51, 1), cold(name, 130, 2)]
    assert_close(logits, torch.stack(expected))
    for seed, position, slot, table in (
        (3, 48, 4, pages(30, 130)),
        (3, 128, 5, pages(30, 130)),
        (2, 32, 6, pages(10, 160)),
        (2, 112, 7, pages(10, 160)),
        (2, 130, 8, pages(10, 160)),
    ):
        shared = table[: -(-position // PAGE)]
        rest = tokens(position + 9, seed)[position:]
        warm = Piece(rest, position, 9, [*shared, 90, 91], source_slot=slot)
        assert_close(run(name, storage, warm)[0], cold(name, position + 9, seed))


@pytest.mark.parametrize("name", SHAPES)
def test_decode_batch_of_different_contexts(name: str):
    storage = storage_for(name)
    lengths = [3, 40, 70, 16]
    for i, n in enumerate(lengths):
        run(name, storage, Piece(tokens(n, i), 0, 1 + i, pages(1 + 10 * i, 100)))
    for step in range(20):
        pieces = [
            Piece([tokens(n + step + 1, i)[-1]], n + step, 1 + i, pages(1 + 10 * i, 100))
            for i, n in enumerate(lengths)
        ]
        assert all(piece.is_decode for piece in pieces)
        logits = run(name, storage, *pieces)
    expected = [cold(name, n + 20, i) for i, n in enumerate(lengths)]
    assert_close(logits, torch.stack(expected))


def test_logits_come_in_the_order_of_the_pieces():
    storage = storage_for("tiny")
    run("tiny", storage, Piece(tokens(20), 0, 1, pages(1, 40)))
    logits = run(
        "tiny",
        storage,
        Piece(tokens(9, 5), 0, 2, pages(8, 9)),
        Piece(tokens(21)[20:], 20, 1, pages(1, 40)),
    )
    assert_close(logits, torch.stack([cold("tiny", 9, 5), cold("tiny", 21)]))


@pytest.mark.parametrize("name", SHAPES)
def test_a_reused_slot_with_nan_gives_a_clean_request(name: str):
    storage = storage_for(name)
    run(name, storage, Piece(tokens(30, 8), 0, 1, pages(1, 30)))
    storage.poison(slots=(1,), pages=tuple(pages(1, 30)))
    logits = run(name, storage, Piece(tokens(30), 0, 1, pages(1, 30)))
    assert_close(logits[0], cold(name, 30))


def test_a_neighbour_with_nan_does_not_reach_the_batch():
    """One request's state is broken; the others of its pass do not notice."""
    storage = storage_for("tiny")
    for slot in (1, 2):
        run("tiny", storage, Piece(tokens(20, slot), 0, slot, pages(10 * slot, 30)))
    storage.poison(slots=(1,))
    broken = Piece([7], 20, 1, pages(10, 30))
    sound = Piece(tokens(21, 2)[20:], 20, 2, pages(20, 30))
    fresh = Piece(tokens(12, 3), 0, 3, pages(40, 12))
    logits = run("tiny", storage, broken, sound, fresh)
    assert logits[0].isnan().all()
    assert_close(logits[1:], torch.stack([cold("tiny", 21, 2), cold("tiny", 12, 3)]))


@pytest.mark.parametrize("name", ["tiny", "tiny-7to1"])
def test_hand_over_of_every_layer_continues_the_request(name: str):
    """Packed on one side, unpacked on the other into other pages and another slot."""
    here, there = storage_for(name), storage_for(name)
    n = 75
    run(name, here, Piece(tokens(n), 0, 1, pages(1, n)))
    for layer in range(shape(name).layers):
        wire = pack(here, layer, pages(1, n), 1, n)
        unpack(there, layer, pages(50, n), 6, n, wire)
    for step in range(10):
        piece = Piece(tokens(n + step + 1)[-1:], n + step, 6, [*pages(50, n), 100])
        logits = run(name, there, piece)
    assert_close(logits[0], cold(name, n + 10))


def test_hand_over_without_one_layer_is_noticed_in_the_logits():
    """The destination is NaN before, so a missing layer cannot pass for a whole cache."""
    for missing in range(4):
        here, there = storage_for("tiny"), storage_for("tiny")
        run("tiny", here, Piece(tokens(20), 0, 1, pages(1, 20)))
        for layer in range(4):
            if layer != missing:
                unpack(there, layer, pages(9, 20), 2, 20, pack(here, layer, pages(1, 20), 1, 20))
        logits = run("tiny", there, Piece([5], 20, 2, pages(9, 21)))
        assert logits.isnan().any()


def test_on_layer_comes_after_the_layer_is_written_and_in_order():
    storage, seen = storage_for("tiny"), []
    table = pages(1, 20)
    piece = Piece(tokens(20), 0, 1, table)

    def on_layer(layer: int) -> None:
        seen.append((layer, contents(storage, layer, table)))

    model("tiny").forward(ForwardBatch.build([piece], PAGE), storage, on_layer)
    assert [layer for layer, _ in seen] == [0, 1, 2, 3]
    for layer, at_call in seen:
        assert torch.equal(at_call, contents(storage, layer, table))
        assert at_call.isfinite().all()


def contents(storage: CacheStorage, layer: int, table: Sequence[int]) -> torch.Tensor:
    return pack(storage, layer, table, 1, 20).view(torch.float32).clone()


def test_the_bf16_state_codec_is_close_at_once_and_forgotten_later():
    """Within 1 % of the logits' range one token after the hand-over."""
    from engine.ops.pack import StateCodec

    here, there = storage_for("tiny"), storage_for("tiny")
    run("tiny", here, Piece(tokens(60), 0, 1, pages(1, 60)))
    for layer in range(4):
        wire = pack(here, layer, pages(1, 60), 1, 60, StateCodec.BF16)
        unpack(there, layer, pages(1, 60), 1, 60, wire, StateCodec.BF16)
    logits = run("tiny", there, Piece(tokens(61)[60:], 60, 1, [*pages(1, 60), 99]))
    error = (logits[0] - cold("tiny", 61)).abs().max()
    assert 0 < error < 0.01 * cold("tiny", 61).abs().max()


def test_a_piece_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match="2 pages do not hold 33 tokens"):
        ForwardBatch.build([Piece(tokens(33), 0, 1, [1, 2])], PAGE)
    with pytest.raises(ValueError, match="checkpoints"):
        Piece(tokens(8), 8, 1, [1], checkpoints=((8, 2),))
    with pytest.raises(ValueError, match="at least one token"):
        Piece([], 0, 1, [1])


def test_weights_follow_from_the_seed():
    first, same, other = (random_weights(shape("tiny"), seed) for seed in (3, 3, 4))
    assert torch.equal(first.layers[2].ffn.experts.down, same.layers[2].ffn.experts.down)
    assert not torch.equal(first.head, other.head)
    half = first.to("cpu", torch.bfloat16)
    assert half.layers[0].mixer.a_log.dtype == torch.float32
    assert half.layers[1].ffn.experts.router.dtype == torch.float32
    assert half.layers[0].mixer.project.dtype == torch.bfloat16
    assert 1.9 < first.nbytes() / half.nbytes() < 2
