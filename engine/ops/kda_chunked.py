"""Chunked KDA prefill in torch, for a variable-length batch.

Inside a chunk of C tokens the delta rule is a unit lower triangular system. With G the running sum
of the log decay within the chunk, S0 the state before it (V-first) and e = exp:

    A[i, j] = beta_i sum_d k_i[d] k_j[d] e(G_i - G_j)[d]        (j < i)
    (I + A) U = beta v,   (I + A) W = beta (k e(G)),   R = U - W S0^T
    o_i = (q_i e(G_i)) S0^T + sum_{j <= i} (q_i . e(G_i - G_j) . k_j) R_j
    S1  = S0 Diag(e(G_C)) + R^T (k e(G_C - G))

All of it is built by doubling blocks of s = 1, 2, 4 .. tokens. Each token carries its decay since
its block's start and to its block's end. Where two blocks meet at a boundary b,
e(G_i - G_j) = e(G_i - G_b) e(G_b - G_j) for i behind and j before it, so the new corner of a C x C
matrix is a product of two factors <= 1 that are at hand; then the decays are extended to the
doubled block. The only exponential taken is e(g): strong gates underflow to zero, nothing
overflows, and no large sums are subtracted. The system is solved by block substitution in the same
steps: with P, Q the inverses of both blocks and A21 the new corner, the corner of the doubled
inverse is -Q A21 P. An entry of any of these inverses is -beta_i k_i^T (product of decays and of
I - beta k k^T) k_j, so at most 1: nothing grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

CHUNK = 32
"""A power of two, and a divisor of the tokens between state checkpoints."""

_SPAN = 32
"""Chunks handled together: bounds the temporaries to what a cache level holds."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How the rows of a batch fall into chunks.

    Sequences are ranked by their number of chunks, most first (`ranked[r]` is a sequence), and
    chunks lie step by step: `steps[s]` sequences, ranks 0 to steps[s] - 1, have an s-th chunk.
    `rows` [chunks, CHUNK] is the row of the batch at each chunk position; positions past a chunk's
    end repeat its first row and are True in `padding`. `ends[s]` lists the (rank, offset) cuts
    that the s-th chunks end at.
    """

    rows: Tensor
    padding: Tensor
    steps: tuple[int, ...]
    ranked: tuple[int, ...]
    ends: tuple[tuple[tuple[int, int], ...], ...]


@lru_cache(maxsize=32)
def plan_chunks(lengths: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]) -> ChunkPlan:
    """Chunks of sequences of `lengths` rows; a chunk also ends at each offset in `cuts[i]`."""
    chunks: list[list[tuple[int, int]]] = []
    first = [0, *accumulate(lengths)]
    for i, length in enumerate(lengths):
        bounds = [0, *sorted({*cuts[i], length})]
        chunks.append(
            [
                (first[i] + at, min(CHUNK, end - at))
                for begin, end in pairwise(bounds)
                for at in range(begin, end, CHUNK)
            ]
        )
    ranked = sorted(range(len(lengths)), key=lambda i: -len(chunks[i]))
    steps: list[int] = []
    ends: list[tuple[tuple[int, int], ...]] = []
    placed: list[tuple[int, int]] = []
    for step in range(len(chunks[ranked[0]])):
        active = [i for i in ranked if step < len(chunks[i])]
        reached: list[tuple[int, int]] = []
        for rank, i in enumerate(active):
            at, size = chunks[i][step]
            placed.append((at, size))
            if at + size - first[i] in cuts[i]:
                reached.append((rank, at + size - first[i]))
        steps.append(len(active))
        ends.append(tuple(reached))
    begins, sizes = torch.tensor(placed).unbind(1)
    position = torch.arange(CHUNK)
    padding = position >= sizes.unsqueeze(1)
    rows = begins.unsqueeze(1) + position.masked_fill(padding, 0)
    return ChunkPlan(rows, padding, tuple(steps), tuple(ranked), tuple(ends))


def kda_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    lengths: Sequence[int],
    cuts: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor, dict[tuple[int, int], Tensor]]:
    """Sequences of `lengths` rows each, one after the other.

    q (already scaled), k, g (log decay, <= 0): [T, H, K]; v: [T, H, V]; beta: [T, H]; all fp32.
    state: [N, H, V, K] before each sequence. `cuts[i]` are offsets (1 .. lengths[i]) at which the
    state of sequence i is wanted. Returns outputs [T, H, V], final states [N, H, V, K], and the
    states at the cuts, [H, V, K] by (sequence, offset).
    """
    cut_offsets = tuple(tuple(c) for c in cuts) if cuts else ((),) * len(lengths)
    plan = plan_chunks(tuple(lengths), cut_offsets)
    n_rows, heads, d_v = v.shape
    flat = [x.reshape(n_rows * heads, -1) for x in (q, k, g, v, beta)]
    # One row more than there are: padding positions are written there.
    out = v.new_empty(n_rows * heads + 1, d_v)
    current = state[list(plan.ranked)].flatten(0, 1)
    captured: dict[tuple[int, int], Tensor] = {}
    step = first = 0
    while step < len(plan.steps):
        last, count = step, 0
        while last < len(plan.steps) and (count == 0 or count + plan.steps[last] <= _SPAN):
            count += plan.steps[last]
            last += 1
        chunk_rows = plan.rows[first : first + count].unsqueeze(1) * heads
        index = (chunk_rows + torch.arange(heads).unsqueeze(1)).flatten()
        padding = plan.padding[first : first + count]
        padded = bool(padding.any())
        parts = _within_chunks(
            [x.index_select(0, index).view(count, heads, CHUNK, -1) for x in flat],
            padding if padded else None,
        )
        before = torch.empty(count * heads, *current.shape[1:])
        at = 0
        for s in range(step, last):
            n = plan.steps[s] * heads
            here, live = slice(at, at + n), current[:n]
            before[here] = live
            residual = parts.u[here]
            residual.baddbmm_(parts.w[here], live.transpose(-1, -2), alpha=-1)
            live *= parts.decay[here]
            live.baddbmm_(residual.transpose(-1, -2), parts.k_end[here])
            for rank, offset in plan.ends[s]:
                captured[plan.ranked[rank], offset] = current.view_as(state)[rank].clone()
            at += n
        result = parts.q_start @ before.transpose(-1, -2)
        result.baddbmm_(parts.qk, parts.u)
        if padded:
            aside = padding.unsqueeze(1).expand(-1, heads, -1).flatten()
            index = index.masked_fill(aside, n_rows * heads)
        out.index_copy_(0, index, result.view(-1, d_v))
        step, first = last, first + count
    final = torch.empty_like(state)
    final[list(plan.ranked)] = current.view_as(state)
    return out[:-1].view(n_rows, heads, d_v), final, captured


@dataclass(frozen=True, slots=True)
class _Chunks:
    """For n chunks of H heads, [n H, ., .]: u [C, V] (becomes the residual R), w [C, K], qk [C, C],
    q_start = q e(G) [C, K], k_end = k e(G_C - G) [C, K], decay = e(G_C) [1, K]."""

    u: Tensor
    w: Tensor
    qk: Tensor
    q_start: Tensor
    k_end: Tensor
    decay: Tensor


def _within_chunks(gathered: list[Tensor], padding: Tensor | None) -> _Chunks:
    """Everything that needs no state, of q, k, g, v, beta [n, H, C, .], which are overwritten. A
    position that is True in `padding` [n, C] leaves the state as it is."""
    q, k, g, v, beta = gathered
    if padding is not None:
        for x in (k, g, beta):
            x.masked_fill_(padding[:, None, :, None], 0)
    qk, inverse, since_start, to_end = _doubled(q, k, g.exp_(), beta)
    u = inverse @ v.mul_(beta)
    w = inverse @ (k * since_start).mul_(beta)
    decay = since_start[..., -1:, :]
    parts = (u, w, qk, q.mul_(since_start), to_end.mul_(k), decay)
    return _Chunks(*(part.flatten(0, 1) for part in parts))


def _doubled(
    q: Tensor, k: Tensor, since_start: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`since_start` is each token's own decay e(g) and is overwritten.

    Returns the lower triangle of q_i . e(G_i - G_j) . k_j with its diagonal and the inverse of
    I + A, both [n, H, C, C] with zeros above the diagonal; and e(G) and e(G_C - G) [n, H, C, K].
    """
    n, heads, size, d_k = q.shape
    both = torch.stack([q, k], 2)
    blocks, half = size, 1
    to_end = torch.ones_like(k)
    qk = (q * k).sum(-1).view(n, heads, size, 1, 1)
    inverse = torch.ones_like(qk)
    while blocks > 1:
        blocks //= 2
        shape = (n, heads, blocks, 2, half)
        first_since, second_since = since_start.view(*shape, d_k).unbind(3)
        first_to_end = to_end.view(*shape, d_k)[:, :, :, 0]
        rows = both.view(n, heads, 2, blocks, 2, half, d_k)[:, :, :, :, 1].transpose(2, 3)
        left = q.new_empty(n, heads, blocks, 2, half, d_k)
        torch.mul(rows, second_since.unsqueeze(3), out=left)
        right = first_to_end * k.view(*shape, d_k)[:, :, :, 0]
        met = left.view(n, heads, blocks, 2 * half, d_k) @ right.transpose(-1, -2)
        corner, lower = met.split(half, -2)
        lower = lower * beta.view(*shape, 1)[:, :, :, 1]
        first, second = inverse.view(*shape, half).unbind(3)
        inverse = _joined(first, second, -(second @ lower @ first))
        first, second = qk.view(*shape, half).unbind(3)
        qk = _joined(first, second, corner)
        first_to_end *= second_since[..., -1:, :]
        second_since *= first_since[..., -1:, :]
        half *= 2
    return qk.squeeze(2), inverse.squeeze(2), since_start, to_end


def _joined(first: Tensor, second: Tensor, corner: Tensor) -> Tensor:
    """[[first, 0], [corner, second]] of blocks [.., s, s]."""
    half = first.shape[-1]
    whole = first.new_zeros(*first.shape[:-2], 2 * half, 2 * half)
    whole[..., :half, :half] = first
    whole[..., half:, :half] = corner
    whole[..., half:, half:] = second
    return whole
