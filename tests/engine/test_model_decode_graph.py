"""Padding of decode steps: what a captured graph would do, run eagerly."""

from __future__ import annotations

import pytest
import torch

from engine.cache.storage import CacheStorage
from engine.model.batch import ForwardBatch, Piece
from engine.model.config import shape
from engine.model.decode_graph import DecodeGraph, padded_decode
from engine.model.layout import CacheLayout
from engine.model.model import Model
from engine.model.weights import random_weights

PAGE = 8
MODEL = Model(shape("tiny"), random_weights(shape("tiny"), seed=2))


def prepared(device: str = "cpu") -> tuple[CacheStorage, list[Piece]]:
    """Three requests that hold 5, 17 and 8 tokens, and their next tokens."""
    storage = CacheStorage(CacheLayout(shape("tiny"), 20, 8, PAGE), device)
    storage.poison(tuple(range(1, 8)), tuple(range(1, 20)))
    held, tables = [5, 17, 8], [[1, 2], [3, 4, 5], [6, 7]]
    for i, (n, table) in enumerate(zip(held, tables, strict=True)):
        first = Piece(list(range(n)), 0, 2 + i, table)
        MODEL.forward(ForwardBatch.build([first], PAGE), storage)
    steps = zip(held, tables, strict=True)
    return storage, [Piece([9 + i], n, 2 + i, t) for i, (n, t) in enumerate(steps)]


def test_padded_equals_unpadded_and_touches_only_scratch():
    plain, pieces = prepared()
    padded, _ = prepared()
    batch = ForwardBatch.build(pieces, PAGE)
    expected = MODEL.forward(batch, plain)
    actual = MODEL.forward(padded_decode(batch, 8, 6), padded)[:3]
    assert (actual - expected).abs().max() < 1e-5
    for name in ("state", "conv", "latents"):
        for layer, tensor in getattr(plain, name).items():
            other = getattr(padded, name)[layer]
            assert torch.allclose(other[1:], tensor[1:], atol=1e-5, equal_nan=True)


def test_scratch_rows_stay_finite_over_many_steps():
    storage, pieces = prepared()
    batch = padded_decode(ForwardBatch.build(pieces[:1], PAGE), 4, 4)
    for _ in range(200):
        MODEL.forward(batch, storage)
    assert all(tensor[0].isfinite().all() for tensor in storage.state.values())


def test_what_does_not_fit_is_refused():
    _, pieces = prepared()
    batch = ForwardBatch.build(pieces, PAGE)
    with pytest.raises(ValueError, match="3 rows of 3 pages exceed 2 rows of 6 pages"):
        padded_decode(batch, 2, 6)
    chunk = ForwardBatch.build([Piece([1, 2], 0, 1, [1])], PAGE)
    with pytest.raises(ValueError, match="only a batch of decode tokens"):
        padded_decode(chunk, 2, 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replayed_graph_equals_eager():
    model = Model(MODEL.config, MODEL.weights.to("cuda", torch.bfloat16))
    storage = CacheStorage(CacheLayout(MODEL.config, 20, 8, PAGE, "bfloat16"), "cuda")
    eager = CacheStorage(storage.layout, "cuda")
    graph = DecodeGraph(model, storage, max_pages=6, sizes=(4,))
    pieces = [Piece([3], 1, 2, [1]), Piece([4], 1, 3, [2])]
    expected = model.forward(ForwardBatch.build(pieces, PAGE, "cuda"), eager)
    assert torch.allclose(graph.forward(pieces), expected, atol=2e-2)
