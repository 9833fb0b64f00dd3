"""Multi-head latent attention over a paged latent cache, in torch.

A cached row is [c | r]: `rank` latent values and `rope` values shared by all heads (kept although
no rotation is applied). With W_uk [H, nope, rank] and W_uv [H, v, rank]:

    key_h = [W_uk[h] c | r],  value_h = W_uv[h] c,  scale = (nope + rope)^-0.5

Prefill expands keys and values. Decode absorbs W_uk into the query and W_uv into the output, and
attends to the latent rows themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.batch import DecodeRows, Piece, PrefillRows

CONTEXT_BLOCK = 2048
"""Cached tokens that prefill expands at a time."""

QUERY_BLOCK = 256
SPLIT_TOKENS = 4096
"""Context tokens of one part of a decode step."""

_MASKED = -1e30
"""Finite, so that a part without a single valid row weighs nothing instead of being NaN."""


def _attend(q: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [.., Q, D] (scaled), key [.., S, D], value [.., S, V] -> softmax output [.., Q, V] and the
    log of the softmax's denominator [.., Q, 1]. `mask` is True where a key must not be seen."""
    scores = q @ key.transpose(-1, -2)
    if mask is not None:
        scores.masked_fill_(mask, _MASKED)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    return (weights @ value).div_(total), total.log_().add_(top)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Join attention over disjoint sets of keys, given each part's output and log denominator."""
    if len(parts) == 1:
        return parts[0][0]
    outputs, logs = (torch.stack(x) for x in zip(*parts, strict=True))
    return (outputs * torch.softmax(logs, 0)).sum(0)


def mla_prefill(
    q: Tensor,
    latents: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    rows: PrefillRows,
    context_block: int = CONTEXT_BLOCK,
) -> Tensor:
    """q: [T, H, nope + rope]; latents: [n_pages, page_tokens, rank + rope], which already holds
    the new tokens. Each piece attends to its cached context, block by block, and causally to
    itself; the parts are merged by their denominators. Returns [T, H, v]."""
    flat = latents.view(-1, latents.shape[-1])
    page_tokens = latents.shape[1]
    scale = q.shape[-1] ** -0.5
    out = q.new_empty(q.shape[0], q.shape[1], w_uv.shape[1])
    for piece, begin, end in rows.spans():
        index = piece_rows(piece, page_tokens, q.device)
        queries = (q[begin:end] * scale).transpose(0, 1)
        context = [
            expand(flat, index[at : min(at + context_block, piece.start)], w_uk, w_uv, q.dtype)
            for at in range(0, piece.start, context_block)
        ]
        own_key, own_value = expand(flat, index[piece.start :], w_uk, w_uv, q.dtype)
        size = end - begin
        for top in range(0, size, QUERY_BLOCK):
            bottom = min(top + QUERY_BLOCK, size)
            block = queries[:, top:bottom]
            future = torch.ones(bottom - top, bottom, dtype=torch.bool, device=q.device).triu_(
                top + 1
            )
            parts = [_attend(block, key, value, None) for key, value in context]
            parts.append(_attend(block, own_key[:, :bottom], own_value[:, :bottom], future))
            out[begin + top : begin + bottom] = _merge(parts).transpose(0, 1)
    return out


def piece_rows(piece: Piece, page_tokens: int, device: torch.device) -> Tensor:
    """Row of each position 0 .. piece.end - 1 in a flat view of the pages."""
    pages = torch.tensor(piece.pages, device=device)
    positions = torch.arange(piece.end, device=device)
    return pages[positions // page_tokens] * page_tokens + positions % page_tokens


def expand(
    flat: Tensor, index: Tensor, w_uk: Tensor, w_uv: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys [H, S, nope + rope] and values [H, S, v] of the cached rows `index`."""
    rank = w_uk.shape[-1]
    rows = flat.index_select(0, index).to(dtype)
    latent, shared = rows[:, :rank], rows[:, rank:]
    heads = w_uk.shape[0]
    key = torch.cat([latent @ w_uk.transpose(-1, -2), shared.expand(heads, -1, -1)], -1)
    return key, latent @ w_uv.transpose(-1, -2)


def absorb_query(q: Tensor, w_uk: Tensor) -> Tensor:
    """[B, H, nope + rope] -> scaled query against latent rows, [B, H, rank + rope]."""
    nope = w_uk.shape[1]
    latent = torch.bmm(q[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    return torch.cat([latent, q[..., nope:]], -1).mul_(q.shape[-1] ** -0.5)


def release_output(attended: Tensor, w_uv: Tensor) -> Tensor:
    """Attended latents [B, H, rank] -> [B, H, v]."""
    return torch.bmm(attended.transpose(0, 1), w_uv.transpose(-1, -2)).transpose(0, 1)


def mla_decode(
    q: Tensor,
    latents: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    rows: DecodeRows,
    split_tokens: int = SPLIT_TOKENS,
) -> Tensor:
    """One query a row: q [B, H, nope + rope]; latents as in `mla_prefill`. Returns [B, H, v]."""
    rank, page_tokens = w_uk.shape[-1], latents.shape[1]
    query = absorb_query(q, w_uk)
    flat = latents.view(-1, latents.shape[-1])
    last = rows.context.unsqueeze(1) - 1
    longest = rows.page_table.shape[1] * page_tokens
    parts = []
    for first in range(0, longest, split_tokens):
        positions = torch.arange(first, min(first + split_tokens, longest), device=q.device)
        # Past its context a row reads its own last token again: masking the scores is not enough,
        # because 0 x NaN from a freed page would reach the output.
        held_at = torch.minimum(positions, last)
        index = rows.page_table.gather(1, held_at // page_tokens) * page_tokens
        index += held_at % page_tokens
        held = flat.index_select(0, index.flatten()).view(*index.shape, -1).to(q.dtype)
        unseen = (positions > last).unsqueeze(1)
        parts.append(_attend(query, held, held[..., :rank], unseen))
    return release_output(_merge(parts), w_uv)
