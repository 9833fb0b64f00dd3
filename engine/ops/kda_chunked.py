"""Chunked KDA prefill in torch, for a variable-length batch.

Inside a chunk of C tokens the delta rule is a unit lower triangular system. With G the running sum
of the log decay within the chunk, S0 the state before it (V-first) and e = exp:

    A[i, j] = beta_i sum_d k_i[d] k_j[d] e(G_i - G_j)[d]        (j < i)
    (I + A) U = beta v,   (I + A) W = beta (k e(G)),   R = U - W S0^T
    o_i = (q_i e(G_i)) S0^T + sum_{j <= i} (q_i . e(G_i - G_j) . k_j) R_j
    S1  = S0 Diag(e(G_C)) + R^T (k e(G_C - G))

Decays between tokens are never taken from G: they are products of the tokens' own e(g), the only
exponential.

- In blocks of 8, with m the boundary in their middle, e(G_i - G_j) = D_i / D_j, where D is the
  decay since m behind it and the inverse of the decay to m before it. g is held above -20, so that
  D and 1/D stay within e(+-80): who keeps 2e-9 of the past keeps none of it in fp32.
- From there on blocks are doubled, each token carrying q and k times the decay since its block's
  start and k times that to its end. Where two blocks meet at b, e(G_i - G_j) =
  e(G_i - G_b) e(G_b - G_j) for i behind and j before it: the corner of the doubled block is a
  matrix product of what is at hand.

So nothing overflows that is kept, and no large sums are subtracted. All of it depends on the chunk
alone: a cut at a multiple of C leaves the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

CHUNK = 32
"""A power of two, and a divisor of the tokens between state checkpoints."""

_BLOCK = 8
_LEAST_LOG_DECAY = -20.0

_SPAN_VALUES = 1 << 17
"""Chunks are handled together up to so many values a tensor: what a cache level holds."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How the rows of a batch fall into chunks.

    Sequences are ranked by their number of chunks, most first (`ranked[r]` is a sequence), and
    chunks lie step by step: `steps[s]` sequences, ranks 0 to steps[s] - 1, have an s-th chunk.
    `begins` and `sizes` are the first row of the batch and the number of rows of each chunk. `rows`
    [chunks, CHUNK] is the row at each chunk position; positions past a chunk's end repeat its first
    row and are True in `padding`. `ends[s]` lists the (rank, offset) cuts that the s-th chunks end
    at.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: Tensor
    padding: Tensor
    steps: tuple[int, ...]
    ranked: Tensor
    ends: tuple[tuple[tuple[int, int], ...], ...]

    def is_run(self, chunks: slice) -> bool:
        """Whether these chunks are full and follow one another in the batch."""
        begins = self.begins[chunks]
        return (
            min(self.sizes[chunks]) == CHUNK
            and begins[-1] - begins[0] == (len(begins) - 1) * CHUNK
            and all(a < b for a, b in pairwise(begins))
        )


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
    begins, sizes = zip(*placed, strict=True)
    position = torch.arange(CHUNK)
    padding = position >= torch.tensor(sizes).unsqueeze(1)
    rows = torch.tensor(begins).unsqueeze(1) + position.masked_fill(padding, 0)
    return ChunkPlan(begins, sizes, rows, padding, tuple(steps), torch.tensor(ranked), tuple(ends))


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
    ranked = plan.ranked.tolist()
    n_rows, heads, d_v = v.shape
    inputs = (q, k, g, v, beta.unsqueeze(-1))
    # One row more than there are: padding positions are written there.
    out = v.new_empty(n_rows + 1, heads, d_v)
    # By rank: each sequence's state so far, at the end its final one.
    reached = state.index_select(0, plan.ranked).flatten(0, 1)
    captured: dict[tuple[int, int], Tensor] = {}
    at_once = max(1, _SPAN_VALUES // (heads * CHUNK * max(q.shape[-1], d_v)))
    step = first = 0
    while step < len(plan.steps):
        last, count = step, 0
        while last < len(plan.steps) and (count == 0 or count + plan.steps[last] <= at_once):
            count += plan.steps[last]
            last += 1
        chunks = slice(first, first + count)
        run = plan.is_run(chunks)
        parts = _within_chunks(*(_gathered(x, plan, chunks, run) for x in inputs))
        # A step's states lie where the next step's chunks find them.
        states = state.new_empty((count + plan.steps[step]) * heads, *reached.shape[1:])
        states[: plan.steps[step] * heads] = reached[: plan.steps[step] * heads]
        sizes = [n * heads for n in plan.steps[step:last]]
        at = 0
        for s, (size, u, w, decay, k_end, u_t, before, before_t) in enumerate(
            zip(
                sizes,
                *(x.split(sizes) for x in (*parts.by_step, parts.u.mT)),
                *(x[: count * heads].split(sizes) for x in (states, states.mT)),
                strict=True,
            ),
            step,
        ):
            after = states[at + size : at + 2 * size]
            u.baddbmm_(w, before_t, alpha=-1)
            torch.mul(before, decay, out=after)
            after.baddbmm_(u_t, k_end)
            for rank, offset in plan.ends[s]:
                here = after[rank * heads : (rank + 1) * heads]
                captured[ranked[rank], offset] = here.clone()
            going_on = plan.steps[s + 1] * heads if s + 1 < last else 0
            if going_on < size:
                reached[going_on:size] = after[going_on:]
            at += size
        result = torch.bmm(parts.q_start, states[:at].mT)
        result.baddbmm_(parts.qk, parts.u)
        result = result.view(count, heads, CHUNK, d_v).transpose(1, 2)
        if run:
            begin = plan.begins[first]
            out[begin : begin + count * CHUNK].unflatten(0, (count, CHUNK)).copy_(result)
        else:
            index = plan.rows[chunks].masked_fill(plan.padding[chunks], n_rows)
            out.index_copy_(0, index.flatten(), result.flatten(0, 1))
        step, first = last, first + count
    final = torch.empty_like(state).index_copy_(0, plan.ranked, reached.view_as(state))
    return out[:-1], final, captured


def _gathered(x: Tensor, plan: ChunkPlan, chunks: slice, run: bool) -> Tensor:
    """Rows of x [T, H, .] as [chunks, H, CHUNK, .], a view where they are a `run`; else a copy
    with zeros as padding, which leave a state as it is (no decay, no key, no write strength)."""
    if run:
        begin, count = plan.begins[chunks.start], chunks.stop - chunks.start
        return x[begin : begin + count * CHUNK].unflatten(0, (count, CHUNK)).transpose(1, 2)
    rows = x.index_select(0, plan.rows[chunks].flatten()).unflatten(0, (-1, CHUNK))
    return rows.masked_fill_(plan.padding[chunks, :, None, None], 0).transpose(1, 2)


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

    @property
    def by_step(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the states depend on, step after step."""
        return self.u, self.w, self.decay, self.k_end


def _within_chunks(q: Tensor, k: Tensor, g: Tensor, v: Tensor, beta: Tensor) -> _Chunks:
    """Everything that needs no state, of [n, H, C, .]."""
    chunks, heads, size, d_k = k.shape
    n, d_v = chunks * heads, v.shape[-1]
    # exp2 takes a third of the time of exp.
    decay = g.mul(math.log2(math.e)).clamp_(min=_LEAST_LOG_DECAY * math.log2(math.e)).exp2_()
    since, until, products, decay = _doubled(q, k, decay)
    qk = products[:, :, 0].reshape(n, size, size)
    strength = beta.reshape(n, -1, _BLOCK, 1)
    system = (products[:, :, 1] * strength).view(n, size, size)
    right = v.new_empty(n, size, d_v + d_k)
    torch.mul(v, beta, out=right[..., :d_v].unflatten(0, (chunks, heads)))
    torch.mul(since[:, :, 1], strength, out=right[..., d_v:].unflatten(1, (-1, _BLOCK)))
    # Solved from the right, transposed: so neither side has to be copied into columns.
    solved = torch.linalg.solve_triangular(
        system.mT, right.mT, upper=True, left=False, unitriangular=True
    ).mT
    u, w = solved.split([d_v, d_k], -1)
    return _Chunks(
        u.contiguous(), w, qk, since[:, :, 0].reshape(n, size, d_k), until.flatten(1, 2), decay
    )


def _doubled(q: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and each token's own decay e(g), [chunks, H, C, K]; N = chunks H.

    Returns, with the tokens of a chunk as [blocks, s] and q before k: [N, blocks, 2, s, K], both
    times e(G); [N, blocks, s, K], k e(G_C - G); [N, blocks, 2, s, C], the lower triangles of
    q_i . e(G_i - G_j) . k_j with its diagonal and of k_i . e(G_i - G_j) . k_j without, zero above;
    and e(G_C) [N, 1, K].
    """
    chunks, heads, size, d_k = k.shape
    n, blocks, half = chunks * heads, size // _BLOCK, _BLOCK // 2
    q, k, decay = (x.unflatten(2, (blocks, _BLOCK)) for x in (q, k, decay))
    own = decay.unbind(3)
    from_middle = k.new_empty(chunks, heads, blocks, _BLOCK, d_k)
    at = from_middle.unbind(3)
    at[half].copy_(own[half])
    for i in range(half + 1, _BLOCK):
        torch.mul(at[i - 1], own[i], out=at[i])
    at[half - 1].fill_(1)
    for i in range(half - 1, 0, -1):
        torch.mul(at[i], own[i], out=at[i - 1])
    # The decays of the two halves of a block, and below of two blocks that become one.
    first, second = at[0] * own[0], at[-1].clone()
    from_middle[:, :, :, :half].reciprocal_()

    left = k.new_empty(chunks, heads, blocks, 2, _BLOCK, d_k)
    torch.mul(q, from_middle, out=left[:, :, :, 0])
    torch.mul(k, from_middle, out=left[:, :, :, 1])
    right = torch.div(k, from_middle, out=torch.empty_like(from_middle))
    products = k.new_zeros(n, 2 * size, size)
    met = _met(left.view(-1, 2 * _BLOCK, d_k), right.view(-1, _BLOCK, d_k))
    met.unflatten(1, (2, _BLOCK)).masked_fill_(_above_diagonal(), 0)
    _place(products, met, _BLOCK, 0)

    # From the middle of the block to its start and end, and then of ever longer blocks.
    left *= first[:, :, :, None, None]
    right *= second[:, :, :, None]
    total = first * second
    length = _BLOCK
    while length < size:
        lefts = left.view(-1, 2, 2 * length, d_k)[:, 1]
        rights = right.view(-1, 2, length, d_k)[:, 0]
        _place(products, _met(lefts, rights), length, length)
        first, second = total.view(-1, 2, 1, d_k).unbind(1)
        lefts *= first
        rights *= second
        total = first * second
        length *= 2
    return (
        left.flatten(0, 1),
        right.flatten(0, 1),
        products.view(n, blocks, 2, _BLOCK, size),
        total.view(n, 1, d_k),
    )


def _met(left: Tensor, right: Tensor) -> Tensor:
    """left [B, R, K] @ right [B, S, K]^T, a view of the transposed product: a matrix of few columns
    is slow."""
    return torch.bmm(right, left.mT).mT


def _place(products: Tensor, met: Tensor, length: int, behind: int) -> None:
    """Put `met` [N blocks, 2 s, s] into `products` [N, 2 C, C]: rows `behind` tokens after its
    columns, which come every `length + behind` tokens."""
    n, _, size = products.shape
    parts = met.view(n, -1, 2 * length, length).unbind(1)
    for part, column in zip(parts, range(0, size, length + behind), strict=True):
        row = 2 * (column + behind)
        products[:, row : row + 2 * length, column : column + length] = part


@lru_cache(maxsize=1)
def _above_diagonal() -> Tensor:
    """[2, s, s]: above the diagonal, where nothing belongs and the factors may overflow; for the
    keys the diagonal too."""
    ones = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool)
    return torch.stack([ones.triu(1), ones.triu(0)])
