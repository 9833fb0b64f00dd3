"""Chunked KDA prefill in torch, for a variable-length batch.

Inside a chunk of C tokens the delta rule is a unit lower triangular system. With G the running sum
of the log decay within the chunk, S0 the state before it (V-first) and e = exp:

    A[i, j] = beta_i sum_d k_i[d] k_j[d] e(G_i - G_j)[d]        (j < i)
    R   = (I + A)^-1 beta (v - (k e(G)) S0^T)
    o_i = (q_i e(G_i)) S0^T + sum_{j <= i} (q_i . e(G_i - G_j) . k_j) R_j
    S1  = S0 Diag(e(G_C)) + R^T (k e(G_C - G))

All that needs no S0 is computed for many chunks at once. It leaves four products a chunk, one after
the other: of q e(G) and k e(G) with S0; of both matrices that meet what is missing from v; of R.

Sums of logs are never subtracted: decays are products of the tokens' own e(g), the only
exponential. Where a chunk keeps 2^-80 of every channel or more, e(G_i - G_j) = e(G_i) / e(G_j), and
A and the matrix of the outputs are one product. Where it keeps less, 1 / e(G_j) might overflow:

- In blocks of 8, with m the boundary in their middle, e(G_i - G_j) = D_i / D_j, where D is the
  decay since m behind it and the inverse of the decay to m before it. g is held above -20, so that
  D and 1/D stay within e(+-80): who keeps 2e-9 of the past keeps none of it in fp32.
- From there on blocks are doubled, each token carrying q and k times the decay since its block's
  start and k times that to its end. Where two blocks meet at b, e(G_i - G_j) =
  e(G_i - G_b) e(G_b - G_j) for i behind and j before it: the corner of the doubled block is a
  matrix product of what is at hand.

So nothing overflows that is kept. The way taken and all else depend on the chunk and the head
alone: a cut at a multiple of C leaves the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

CHUNK = 32
"""A power of two, and a divisor of the tokens between state checkpoints."""

_BLOCK = 8
_LEAST_LOG_DECAY = -20.0

_LEAST_KEPT = 2.0**-80
"""A chunk that keeps less than this of some channel is taken in blocks."""

_SPAN_VALUES = 1 << 18
_STATE_VALUES = 1 << 17
"""Chunks are handled together up to so many values a tensor, heads up to so many values of their
states, which stay in a cache from chunk to chunk. More would miss it, less be more calls."""


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
    inputs = (v, q, k, g, beta.unsqueeze(-1))
    # One row more than there are: padding positions are written there.
    out = v.new_empty(v.shape[0] + 1, *v.shape[1:])
    final = torch.empty_like(state)
    captured = {
        (i, offset): state.new_empty(state.shape[1:])
        for i, offsets in enumerate(cut_offsets)
        for offset in offsets
    }
    at_once = max(1, _STATE_VALUES // state[0, 0].numel())
    for first in range(0, state.shape[1], at_once):
        heads = slice(first, first + at_once)
        _some_heads(
            [x[:, heads] for x in inputs],
            plan,
            state[:, heads],
            out[:, heads],
            final[:, heads],
            {key: at_cut[heads] for key, at_cut in captured.items()},
        )
    return out[:-1], final, captured


def _some_heads(
    inputs: Sequence[Tensor],
    plan: ChunkPlan,
    state: Tensor,
    out: Tensor,
    final: Tensor,
    captured: Mapping[tuple[int, int], Tensor],
) -> None:
    """`kda_chunked` of some heads, from `inputs` (v, q, k, g, beta) into `out` [T + 1, H, V],
    `final` and `captured`."""
    _, heads, d_v, d_k = state.shape
    ranked = plan.ranked.tolist()
    # By rank: each sequence's state so far, at the end its final one.
    reached = state.index_select(0, plan.ranked).flatten(0, 1)
    at_once = max(1, _SPAN_VALUES // (heads * CHUNK * max(d_k, d_v)))
    step = first = 0
    while step < len(plan.steps):
        last, count = step, 0
        while last < len(plan.steps) and (count == 0 or count + plan.steps[last] <= at_once):
            count += plan.steps[last]
            last += 1
        chunks = slice(first, first + count)
        run = plan.is_run(chunks)
        wanted, *inside = (_gathered(x, plan, chunks, run) for x in inputs)
        if run:
            begin = plan.begins[first]
            result = out[begin : begin + count * CHUNK].unflatten(0, (count, CHUNK))
        else:
            result = out.new_empty(count, CHUNK, heads, d_v)
        by_step = plan.steps[step:last]
        size = 0
        for s, (active, want, gets, start, end, decay, solver) in enumerate(
            zip(
                by_step,
                *(x.split(by_step) for x in (wanted, result.transpose(1, 2))),
                *(x.split([n * heads for n in by_step]) for x in _within_chunks(*inside)),
                strict=True,
            ),
            step,
        ):
            if size != active * heads:
                size = active * heads
                before, before_t = reached[:size], reached[:size].mT
                given, solved = state.new_empty(2, size, 2 * CHUNK, d_v)
                missing = state.new_empty(size, CHUNK, d_v)
                missed = missing.view(want.shape)
                to_queries, to_keys = given.view(active, heads, 2, CHUNK, d_v).unbind(2)
                among = solved[:, :CHUNK].view(want.shape)
                written_t = solved[:, CHUNK:].mT
            torch.bmm(start, before_t, out=given)
            torch.sub(want, to_keys, out=missed)
            torch.bmm(solver, missing, out=solved)
            torch.add(to_queries, among, out=gets)
            before.mul_(decay).baddbmm_(written_t, end)
            for rank, offset in plan.ends[s]:
                here = before[rank * heads : (rank + 1) * heads]
                captured[ranked[rank], offset].copy_(here)
        if not run:
            index = plan.rows[chunks].masked_fill(plan.padding[chunks], len(out) - 1)
            out.index_copy_(0, index.flatten(), result.flatten(0, 1))
        step, first = last, first + count
    final.index_copy_(0, plan.ranked, reached.view_as(state))


def _gathered(x: Tensor, plan: ChunkPlan, chunks: slice, run: bool) -> Tensor:
    """Rows of x [T, H, .] as [chunks, H, CHUNK, .], a view where they are a `run`; else a copy
    with zeros as padding, which leave a state as it is (no decay, no key, no write strength)."""
    if run:
        begin, count = plan.begins[chunks.start], chunks.stop - chunks.start
        return x[begin : begin + count * CHUNK].unflatten(0, (count, CHUNK)).transpose(1, 2)
    rows = x.index_select(0, plan.rows[chunks].flatten()).unflatten(0, (-1, CHUNK))
    return rows.masked_fill_(plan.padding[chunks, :, None, None], 0).transpose(1, 2)


def _within_chunks(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """What needs no state, of [chunks, H, C, .], for N = chunks H.

    [N, 2 C, K], q e(G) above k e(G); [N, C, K], k e(G_C - G); [N, 1, K], e(G_C); [N, 2 C, C],
    what makes R of v - (k e(G)) S0^T, and above it the sums over R in the outputs.
    """
    n, size = k.shape[0] * k.shape[1], k.shape[2]
    # exp2 takes a third of the time of exp.
    since = g.mul(math.log2(math.e)).exp2_()
    for before, here in pairwise(since.unbind(2)):
        here *= before
    forgets = since[:, :, -1].amin(-1) < _LEAST_KEPT
    if forgets.all():
        start, end, decay, products = _doubled(q, k, g)
    else:
        start, end, decay, products = parts = _from_start(q, k, since)
        if forgets.any():
            apart = _doubled(*(x[forgets].unsqueeze(1) for x in (q, k, g)))
            for part, again in zip(parts, apart, strict=True):
                part[forgets.flatten()] = again
    of_queries, of_keys = products.view(n, size, 2, size).unbind(2)
    of_queries.view(torch.int32).bitwise_and_(_upper_bits(size))
    # Of a triangular matrix the solver reads the triangle only; so laid out it copies nothing.
    strength = beta.reshape(n, 1, size)
    residual = torch.linalg.solve_triangular(
        of_keys * strength, torch.eye(size).mT, upper=True, left=False, unitriangular=True
    ).mT.mul_(strength)
    return start, end, decay, torch.cat([torch.bmm(of_queries.mT, residual), residual], 1)


def _from_start(q: Tensor, k: Tensor, since: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_doubled`, where e(G), `since`, does not fall below _LEAST_KEPT."""
    chunks, heads, size, d_k = k.shape
    left = k.new_empty(chunks, heads, 2, size, d_k)
    torch.mul(q, since, out=left[:, :, 0])
    torch.mul(k, since, out=left[:, :, 1])
    right = torch.div(k, since, out=k.new_empty(k.shape))
    start, end, decay = left.view(-1, 2 * size, d_k), right.view(-1, size, d_k), since[:, :, -1:]
    products = torch.bmm(end, start.mT)
    right *= decay
    return start, end, decay.reshape(-1, 1, d_k), products


def _doubled(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of [chunks, H, C, K] the first three of `_within_chunks`; and [N, C, 2 C], at (j, i)
    q_i . e(G_i - G_j) . k_j and beside it k_i . e(G_i - G_j) . k_j, undefined for j > i and, of
    the keys, j = i."""
    chunks, heads, size, d_k = k.shape
    n, blocks, half = chunks * heads, size // _BLOCK, _BLOCK // 2
    decay = g.mul(math.log2(math.e)).clamp_(min=_LEAST_LOG_DECAY * math.log2(math.e)).exp2_()
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
    right = torch.div(k, from_middle, out=from_middle)
    products = k.new_empty(n, size, 2 * size)
    _place(products, left.view(-1, 2 * _BLOCK, d_k), right.view(-1, _BLOCK, d_k), 0)
    # From the middle of the block to its start and end, and then of ever longer blocks.
    left *= first[:, :, :, None, None]
    right *= second[:, :, :, None]
    total = first * second
    length = _BLOCK
    while length < size:
        lefts = left.view(-1, 2, 2 * length, d_k)[:, 1]
        rights = right.view(-1, 2, length, d_k)[:, 0]
        _place(products, lefts, rights, length)
        first, second = total.view(-1, 2, 1, d_k).unbind(1)
        lefts *= first
        rights *= second
        total = first * second
        length *= 2
    return (
        left.transpose(2, 3).reshape(n, 2 * size, d_k),
        right.view(n, size, d_k),
        total.view(n, 1, d_k),
        products.view(n, size, blocks, 2, _BLOCK).transpose(2, 3).reshape(n, size, 2 * size),
    )


def _place(products: Tensor, left: Tensor, right: Tensor, behind: int) -> None:
    """Put right [N blocks, s, K] @ left [N blocks, 2 s, K]^T into `products` [N, C, 2 C]: columns
    `behind` tokens after the rows, which come every s + behind tokens."""
    n, size, _ = products.shape
    length = right.shape[1]
    met = torch.bmm(right, left.mT).view(n, -1, length, 2 * length)
    strides = (2 * size * size, (length + behind) * 2 * (size + 1), 2 * size, 1)
    products.as_strided(met.shape, strides, 2 * behind).copy_(met)


@lru_cache(maxsize=1)
def _upper_bits(size: int) -> Tensor:
    """[size, size] int32: all ones from the diagonal on, none below."""
    return -torch.ones(size, size, dtype=torch.int32).triu()
