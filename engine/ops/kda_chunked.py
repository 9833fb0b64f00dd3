"""Chunked KDA prefill in torch, for a variable-length batch.

Inside a chunk of C tokens the delta rule is a unit lower triangular system. With G the running sum
of the log decay within the chunk, S0 the state before it (V-first) and e = exp:

    A[i, j] = beta_i sum_d k_i[d] k_j[d] e(G_i - G_j)[d]        (j < i)
    (I + A) U = beta v,   (I + A) W = beta (k e(G)),   R = U - W S0^T
    o_i = (q_i e(G_i)) S0^T + sum_{j <= i} (q_i . e(G_i - G_j) . k_j) R_j
    S1  = S0 Diag(e(G_C)) + R^T (k e(G_C - G))

Every exponent that is taken is <= 0, so strong gates underflow to zero and never overflow: the
C x C products are split into blocks of B tokens. Off the diagonal, G at the start of the row block
lies between both factors and each is scaled towards it; on the diagonal, pairs are taken one
offset at a time. The system is solved by substitution, not through an inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

CHUNK = 32
BLOCK = 8
_SPAN = 16
"""Chunks handled together: bounds the temporaries to what a cache level holds."""

_MIN_LOG_DECAY = -30.0
"""e(-30) is below fp32 resolution; the clamp keeps the running sums small enough to subtract."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How the rows of a batch fall into chunks.

    Sequences are ranked by their number of chunks, most first (`ranked[r]` is a sequence), and
    chunks lie step by step: `steps[s]` sequences, ranks 0 to steps[s] - 1, have an s-th chunk.
    `rows` [chunks * CHUNK] is the row of the batch at each chunk position, or the number of rows
    (a zero row) for padding. `ends[s]` lists the (rank, offset) cuts that the s-th chunks end at.
    """

    rows: Tensor
    steps: tuple[int, ...]
    ranked: tuple[int, ...]
    ends: tuple[tuple[tuple[int, int], ...], ...]


@lru_cache(maxsize=32)
def plan_chunks(lengths: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]) -> ChunkPlan:
    """Chunks of sequences of `lengths` rows; a chunk also ends at each offset in `cuts[i]`."""
    chunks: list[list[tuple[int, int]]] = []
    base = 0
    for length, inner in zip(lengths, cuts, strict=True):
        bounds = [0, *sorted({*inner, length})]
        chunks.append(
            [
                (base + at, min(CHUNK, end - at))
                for begin, end in pairwise(bounds)
                for at in range(begin, end, CHUNK)
            ]
        )
        base += length
    ranked = sorted(range(len(lengths)), key=lambda i: -len(chunks[i]))
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    steps: list[int] = []
    ends: list[tuple[tuple[int, int], ...]] = []
    rows: list[int] = []
    for step in range(len(chunks[ranked[0]])):
        active = [i for i in ranked if step < len(chunks[i])]
        reached: list[tuple[int, int]] = []
        for rank, i in enumerate(active):
            at, size = chunks[i][step]
            rows.extend(range(at, at + size))
            rows.extend([base] * (CHUNK - size))
            if at + size - first[i] in cuts[i]:
                reached.append((rank, at + size - first[i]))
        steps.append(len(active))
        ends.append(tuple(reached))
    return ChunkPlan(torch.tensor(rows), tuple(steps), tuple(ranked), tuple(ends))


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
    n_rows, heads, d_k = q.shape
    d_v = v.shape[-1]
    joined = torch.cat([q, k, g.clamp(min=_MIN_LOG_DECAY), v, beta.unsqueeze(-1)], -1)
    joined = torch.nn.functional.pad(joined, (0, 0, 0, 0, 0, 1))
    out = joined.new_empty(n_rows + 1, heads, d_v)
    current = state[list(plan.ranked)]
    captured: dict[tuple[int, int], Tensor] = {}
    step = first = 0
    while step < len(plan.steps):
        last, count = step, 0
        while last < len(plan.steps) and (count == 0 or count + plan.steps[last] <= _SPAN):
            count += plan.steps[last]
            last += 1
        rows = plan.rows[first * CHUNK : (first + count) * CHUNK]
        span = joined.index_select(0, rows).view(count, CHUNK, heads, -1).transpose(1, 2)
        parts = _within_chunks(span, d_k, d_v)
        before = joined.new_empty(count, heads, d_v, d_k)
        at = 0
        for s in range(step, last):
            n = plan.steps[s]
            here = slice(at, at + n)
            before[here] = current[:n]
            residual = parts.u[here]
            residual -= parts.w[here] @ current[:n].transpose(-1, -2)
            current[:n] *= parts.decay[here]
            current[:n] += residual.transpose(-1, -2) @ parts.k_end[here]
            for rank, offset in plan.ends[s]:
                captured[plan.ranked[rank], offset] = current[rank].clone()
            at += n
        result = parts.q_start @ before.transpose(-1, -2)
        result += parts.qk @ parts.u
        out.index_copy_(0, rows, result.transpose(1, 2).reshape(count * CHUNK, heads, d_v))
        step, first = last, first + count
    final = torch.empty_like(current)
    final[list(plan.ranked)] = current
    return out[:n_rows], final, captured


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Per chunk and head: u [C, V] (becomes the residual R), w [C, K], qk [C, C],
    q_start = q e(G) [C, K], k_end = k e(G_C - G) [C, K], decay = e(G_C) [1, K]."""

    u: Tensor
    w: Tensor
    qk: Tensor
    q_start: Tensor
    k_end: Tensor
    decay: Tensor


def _within_chunks(span: Tensor, d_k: int, d_v: int) -> _Chunks:
    """Everything that needs no state. span: [n, H, C, q | k | g | v | beta]."""
    q, k, g, v, beta = span.split([d_k, d_k, d_k, d_v, 1], -1)
    total = g.cumsum(-2)
    grown = total.exp()
    qk, kk = _decayed_products(q, k, total)
    lower = (beta * kk).tril_(-1)
    k_start = k * grown
    right = torch.cat([v, k_start], -1).mul_(beta)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u, w = solved.split([d_v, d_k], -1)
    k_end = k * (total[..., -1:, :] - total).exp_()
    return _Chunks(u, w, qk, q * grown, k_end, grown[..., -1:, :])


def _decayed_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Lower triangles, [n, H, C, C], of sum_d x_i[d] k_j[d] e(total_i - total_j)[d], x = q, k."""
    n, heads, size, d_k = q.shape
    products = q.new_zeros(2, n, heads, size, size)
    both = torch.stack([q, k])
    for begin in range(BLOCK, size, BLOCK):
        base = total[:, :, begin - 1 : begin]
        rows = slice(begin, begin + BLOCK)
        left = both[:, :, :, rows] * (total[:, :, rows] - base).exp_()
        right = k[:, :, :begin] * (base - total[:, :, :begin]).exp_()
        products[:, :, :, rows, :begin] = left @ right.transpose(-1, -2)
    blocks = (n, heads, size // BLOCK, BLOCK)
    both, k, total = both.view(2, *blocks, d_k), k.reshape(*blocks, d_k), total.view(*blocks, d_k)
    diagonal = products.view(2, *blocks, size // BLOCK, BLOCK).diagonal(dim1=3, dim2=5)
    # diagonal: [2, n, H, BLOCK, BLOCK, size // BLOCK], a view of the diagonal blocks.
    for offset in range(BLOCK):
        ahead, behind = slice(offset, None), slice(None, BLOCK - offset)
        paired = (total[..., ahead, :] - total[..., behind, :]).exp_()
        paired *= k[..., behind, :]
        sums = (both[..., ahead, :] * paired).sum(-1)
        diagonal.diagonal(-offset, 3, 4).copy_(sums)
    return products[0], products[1]
