"""MLA: expanded prefill with context merge, absorbed decode in splits, both paged."""

from __future__ import annotations

import pytest
import torch

from engine.model.batch import ForwardBatch, Piece
from engine.ops.mla import mla_decode, mla_prefill

H, NOPE, ROPE, RANK, VALUE, PAGE = 3, 12, 8, 16, 20, 8
LENGTH = 150
GENERATOR = torch.Generator().manual_seed(4)
UP_KEY = torch.randn(H, NOPE, RANK, generator=GENERATOR) * RANK**-0.5
UP_VALUE = torch.randn(H, VALUE, RANK, generator=GENERATOR) * RANK**-0.5
ROWS = torch.randn(LENGTH, RANK + ROPE, generator=GENERATOR)
QUERIES = torch.randn(LENGTH, H, NOPE + ROPE, generator=GENERATOR)


def expected() -> torch.Tensor:
    """Plain causal attention in float64, [LENGTH, H, VALUE]."""
    rows, q = ROWS.double(), QUERIES.double()
    key = torch.einsum("hnr,tr->thn", UP_KEY.double(), rows[:, :RANK])
    key = torch.cat([key, rows[:, None, RANK:].expand(-1, H, -1)], -1)
    value = torch.einsum("hvr,tr->thv", UP_VALUE.double(), rows[:, :RANK])
    scores = torch.einsum("thd,shd->hts", q, key) * (NOPE + ROPE) ** -0.5
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hts,shv->thv", weights, value)


def paged(pages: list[int]) -> torch.Tensor:
    """A pool of NaN in which `pages` hold ROWS."""
    pool = torch.full((64, PAGE, RANK + ROPE), torch.nan)
    for i, page in enumerate(pages):
        rows = ROWS[i * PAGE : (i + 1) * PAGE]
        pool[page, : len(rows)] = rows
    return pool


PAGES = torch.randperm(40, generator=GENERATOR)[: -(-LENGTH // PAGE)].add(1).tolist()


@pytest.mark.parametrize("context_block", [16, 50, 2048])
@pytest.mark.parametrize("chunk", [64, 100, LENGTH - 1, LENGTH, 2])
def test_chunked_prefill_equals_one_shot(chunk: int, context_block: int):
    """Small blocks merge up to ten parts of context."""
    pool = paged(PAGES)
    for start in range(0, LENGTH, chunk):
        end = min(start + chunk, LENGTH)
        batch = ForwardBatch.build([Piece([0] * (end - start), start, 1, PAGES, 2)], PAGE)
        actual = mla_prefill(
            QUERIES[start:end], pool, UP_KEY, UP_VALUE, batch.prefill, context_block
        )
        assert (actual - expected()[start:end]).abs().max() < 1e-5


def test_long_chunks_are_taken_in_query_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.ops.mla.QUERY_BLOCK", 32)
    batch = ForwardBatch.build([Piece([0] * 130, 20, 1, PAGES)], PAGE)
    actual = mla_prefill(QUERIES[20:], paged(PAGES), UP_KEY, UP_VALUE, batch.prefill, 7)
    assert (actual - expected()[20:]).abs().max() < 1e-5


@pytest.mark.parametrize("split_tokens", [8, 24, 4096])
def test_decode_of_a_ragged_batch(split_tokens: int):
    """Contexts of 2 to 150 tokens in one batch: most rows have splits with nothing to see, and
    pages hold NaN past a row's context."""
    at = [149, 1, 8, 15, 16, 77]
    pieces = [Piece([0], n, 1 + i, PAGES) for i, n in enumerate(at)]
    rows = ForwardBatch.build(pieces, PAGE).decode
    actual = mla_decode(QUERIES[at], paged(PAGES), UP_KEY, UP_VALUE, rows, split_tokens)
    assert (actual - expected()[at]).abs().max() < 1e-5


def test_decode_does_not_see_what_lies_behind_its_context():
    pool = paged(PAGES)
    pool[PAGES[2], 3:] = torch.nan
    rows = ForwardBatch.build([Piece([0], 18, 1, PAGES)], PAGE).decode
    actual = mla_decode(QUERIES[18:19], pool, UP_KEY, UP_VALUE, rows)
    assert (actual - expected()[18:19]).abs().max() < 1e-5
