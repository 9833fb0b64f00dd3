"""Paged, absorbed MLA decode in Triton, split over the context.

Stage one: a program takes one row, a block of heads and one split of the row's context, and
computes attention over the split's latent rows with a running maximum. Stage two merges the splits
by their log denominators. Launch shapes depend on tensor shapes only, so both stages can be
captured in a graph; a row's splits are cut by its own context when the kernel runs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A kernel's arguments are typed by the launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model.batch import DecodeRows
from engine.ops.mla import absorb_query, release_output

BLOCK_TOKENS = 32
BLOCK_HEADS = 16
MAX_SPLITS = 32
_SPLIT_TOKENS = 256
"""A split shorter than this costs more to merge than it saves."""


@triton.jit
def _attend_split(
    query, latents, page_table, context, partial, logs,
    stride_table, heads, splits,
    PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < heads
    rank = tl.arange(0, RANK_PAD)
    rope = tl.arange(0, ROPE_PAD)
    rank_ok = rank < RANK
    rope_ok = rope < ROPE

    q_row = query + (row * heads + head)[:, None] * (RANK + ROPE)
    q_rank = tl.load(q_row + rank[None, :], mask=head_ok[:, None] & rank_ok[None, :], other=0.0)
    q_rope = tl.load(
        q_row + RANK + rope[None, :], mask=head_ok[:, None] & rope_ok[None, :], other=0.0
    )

    length = tl.load(context + row).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)

    top = tl.full([BLOCK_H], -1e30, dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    out = tl.zeros([BLOCK_H, RANK_PAD], dtype=tl.float32)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        seen = position < end
        page = tl.load(page_table + row * stride_table + position // PAGE, mask=seen, other=0)
        held = latents + (page.to(tl.int64) * PAGE + position % PAGE)[:, None] * (RANK + ROPE)
        # Unseen rows are never loaded: whatever a page holds past the context, it stays there.
        latent = tl.load(held + rank[None, :], mask=seen[:, None] & rank_ok[None, :], other=0.0)
        shared = tl.load(
            held + RANK + rope[None, :], mask=seen[:, None] & rope_ok[None, :], other=0.0
        )
        scores = tl.dot(q_rank, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(q_rope, tl.trans(shared), input_precision="ieee")
        scores = tl.where(seen[None, :], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        rescale = tl.exp(top - new_top)
        weight = tl.exp(scores - new_top[:, None])
        total = total * rescale + tl.sum(weight, 1)
        out = out * rescale[:, None]
        out += tl.dot(weight.to(latent.dtype), latent, input_precision="ieee")
        top = new_top

    # A split without tokens has log denominator -1e30 and so no weight in the merge.
    log = tl.where(total > 0, top + tl.log(tl.maximum(total, 1e-30)), -1e30)
    at = (row * heads + head) * splits + split
    tl.store(
        partial + at[:, None] * RANK + rank[None, :],
        out / tl.maximum(total, 1e-30)[:, None],
        mask=head_ok[:, None] & rank_ok[None, :],
    )
    tl.store(logs + at, log, mask=head_ok)


@triton.jit
def _merge_splits(
    partial, logs, merged, splits,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    split = tl.arange(0, SPLITS_PAD)
    rank = tl.arange(0, RANK_PAD)
    split_ok = split < splits
    rank_ok = rank < RANK
    log = tl.load(logs + at * splits + split, mask=split_ok, other=-1e30)
    weight = tl.where(split_ok, tl.exp(log - tl.max(log, 0)), 0.0)
    weight = weight / tl.sum(weight, 0)
    part = tl.load(
        partial + (at * splits + split)[:, None] * RANK + rank[None, :],
        mask=split_ok[:, None] & rank_ok[None, :],
        other=0.0,
    )
    out = tl.sum(part * weight[:, None], 0)
    tl.store(merged + at * RANK + rank, out.to(merged.dtype.element_ty), mask=rank_ok)


def attend_latents(query: Tensor, latents: Tensor, rows: DecodeRows, rank: int) -> Tensor:
    """query [B, H, rank + rope], scaled; latents [n_pages, page_tokens, rank + rope] of the same
    dtype -> attended latents [B, H, rank]."""
    batch, heads, width = query.shape
    page_tokens = latents.shape[1]
    longest = rows.page_table.shape[1] * page_tokens
    splits = max(1, min(MAX_SPLITS, triton.cdiv(longest, _SPLIT_TOKENS)))
    rank_pad = max(16, triton.next_power_of_2(rank))
    partial = query.new_empty(batch, heads, splits, rank, dtype=torch.float32)
    logs = query.new_empty(batch, heads, splits, dtype=torch.float32)
    merged = query.new_empty(batch, heads, rank)
    _attend_split[(batch, triton.cdiv(heads, BLOCK_HEADS), splits)](
        query.contiguous(), latents, rows.page_table, rows.context, partial, logs,
        rows.page_table.stride(0), heads, splits,
        PAGE=page_tokens, RANK=rank, ROPE=width - rank,
        RANK_PAD=rank_pad, ROPE_PAD=max(16, triton.next_power_of_2(width - rank)),
        BLOCK_H=BLOCK_HEADS, BLOCK_N=BLOCK_TOKENS,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge_splits[(batch * heads,)](
        partial, logs, merged, splits,
        RANK=rank, RANK_PAD=rank_pad, SPLITS_PAD=triton.next_power_of_2(splits),
    )  # fmt: skip
    return merged


def mla_decode(q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, rows: DecodeRows) -> Tensor:
    """As `engine.ops.mla.mla_decode`."""
    query = absorb_query(q, w_uk).to(latents.dtype)
    return release_output(attend_latents(query, latents, rows, w_uk.shape[-1]).to(q.dtype), w_uv)
