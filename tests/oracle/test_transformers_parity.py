"""Whole-model parity with transformers at equal weights: logits within 1e-4 in fp32."""

# ruff: noqa: E402 -- what may be missing is skipped before it is imported

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="make test-oracle installs it")

from engine.cache.storage import CacheStorage
from engine.model.batch import ForwardBatch, Piece
from engine.model.checkpoint import load_checkpoint
from engine.model.layout import CacheLayout
from engine.model.model import Model
from engine.ops.pack import pack, unpack

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
PAGE = 64
PROMPT = 203
SHAPES = [(4, 4), (5, 4), (8, 8)]


def prompt(n: int) -> list[int]:
    return torch.randint(1, 96, (n,), generator=torch.Generator().manual_seed(3)).tolist()


def expected_logits(oracle: object, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([tokens])).logits[0]  # type: ignore[operator]


def engine(directory: object) -> tuple[Model, CacheLayout]:
    config, weights = load_checkpoint(directory)  # type: ignore[arg-type]
    return Model(config, weights), CacheLayout(config, n_pages=16, n_slots=6, page_tokens=PAGE)


def poisoned(layout: CacheLayout) -> CacheStorage:
    storage = CacheStorage(layout)
    storage.poison(tuple(range(1, layout.n_slots)), tuple(range(1, layout.n_pages)))
    return storage


@pytest.mark.parametrize(("layers", "every"), SHAPES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 64, 100, PROMPT - 1, PROMPT])
def test_prefill_in_any_chunking(make_oracle, layers, every, chunk):
    directory, oracle = make_oracle(layers, every)
    tokens = prompt(PROMPT if chunk >= 64 else 70)
    expected = expected_logits(oracle, tokens)
    model, layout = engine(directory)
    storage = poisoned(layout)
    for start in range(0, len(tokens), chunk):
        piece = Piece(tokens[start : start + chunk], start, 1, [2, 5, 3, 4])
        actual = model.forward(ForwardBatch.build([piece], PAGE), storage)[0]
        assert (actual - expected[piece.end - 1]).abs().max() < TOLERANCE


@pytest.mark.parametrize(("layers", "every"), SHAPES)
def test_decode_after_hand_over(make_oracle, layers, every):
    """Prefill here, send every layer, decode there on other pages and another slot."""
    directory, oracle = make_oracle(layers, every)
    tokens = prompt(PROMPT)
    held = 131
    expected = expected_logits(oracle, tokens)
    model, layout = engine(directory)
    prefill, decode = poisoned(layout), poisoned(layout)
    piece = Piece(tokens[:held], 0, 1, [2, 5, 3])
    model.forward(ForwardBatch.build([piece], PAGE), prefill)
    for layer in range(layers):
        wire = pack(prefill, layer, [2, 5, 3], 1, held)
        unpack(decode, layer, [9, 1, 6], 4, held, wire)
    for n in range(held, len(tokens)):
        piece = Piece([tokens[n]], n, 4, [9, 1, 6, 8])
        assert piece.is_decode
        actual = model.forward(ForwardBatch.build([piece], PAGE), decode)[0]
        assert (actual - expected[n]).abs().max() < TOLERANCE


def test_mixed_batch(make_oracle):
    """One decode row, one first chunk and one later chunk in the same pass."""
    directory, oracle = make_oracle(4, 4)
    tokens = prompt(PROMPT)
    expected = expected_logits(oracle, tokens)
    model, layout = engine(directory)
    storage = poisoned(layout)
    before = [Piece(tokens[:90], 0, 1, [1, 2]), Piece(tokens[:64], 0, 2, [3])]
    model.forward(ForwardBatch.build(before, PAGE), storage)
    pieces = [
        Piece(tokens[64:150], 64, 2, [3, 4, 5]),
        Piece(tokens[90:91], 90, 1, [1, 2]),
        Piece(tokens[:33], 0, 3, [6]),
    ]
    actual = model.forward(ForwardBatch.build(pieces, PAGE), storage)
    assert (actual - expected[[149, 90, 32]]).abs().max() < TOLERANCE


def test_sharded_checkpoint_equals_single(make_oracle, tmp_path):
    directory, oracle = make_oracle(4, 4)
    oracle.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    _, single = load_checkpoint(directory)
    _, sharded = load_checkpoint(tmp_path)
    assert torch.equal(single.layers[2].mixer.project, sharded.layers[2].mixer.project)
    assert torch.equal(single.head, sharded.head)
