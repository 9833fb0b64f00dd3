"""Decode steps of fixed sizes, padded with scratch rows, so that CUDA can replay them as graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache.storage import CacheStorage
from engine.model.batch import DecodeRows, ForwardBatch, Piece
from engine.model.model import Model

SIZES = (1, 2, 4, 8, 16, 32, 64)


def padded_decode(batch: ForwardBatch, size: int, max_pages: int) -> ForwardBatch:
    """`batch`, which holds decode tokens only, with scratch rows up to `size` and page tables of
    `max_pages`. A scratch row reads and writes slot 0 and the first row of page 0, nothing else.
    """
    if batch.decode is None or batch.prefill is not None:
        raise ValueError("only a batch of decode tokens can be padded")
    extra = size - batch.n_decode
    width = max_pages - batch.decode.page_table.shape[1]
    if extra < 0 or width < 0:
        raise ValueError(
            f"{batch.n_decode} rows of {batch.decode.page_table.shape[1]} pages exceed "
            f"{size} rows of {max_pages} pages"
        )
    rows = DecodeRows(
        slots=F.pad(batch.decode.slots, (0, extra)),
        context=F.pad(batch.decode.context, (0, extra), value=1),
        page_table=F.pad(batch.decode.page_table, (0, width, 0, extra)),
    )
    return ForwardBatch(
        tokens=F.pad(batch.tokens, (0, extra)),
        latent_rows=F.pad(batch.latent_rows, (0, extra)),
        last_rows=torch.arange(size, device=batch.tokens.device),
        decode=rows,
        prefill=None,
    )


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    logits: Tensor


class DecodeGraph:
    """Replays one captured graph per batch size on CUDA.

    A size is captured when first used (a second or so); `capture_all` does it beforehand. Graphs
    hold the addresses of the storage's tensors and of the weights: both must outlive this object.
    """

    def __init__(
        self, model: Model, storage: CacheStorage, max_pages: int, sizes: Sequence[int] = SIZES
    ) -> None:
        self._model = model
        self._storage = storage
        self.max_pages = max_pages
        self._sizes = tuple(sorted(sizes))
        self._captured: dict[int, _Captured] = {}
        # One pool of working memory for all sizes: graphs replay one at a time, and what a replay
        # returns is copied before the next.
        self._memory = torch.cuda.graph_pool_handle()

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits [pieces, vocab] of one decode step. Every piece must be a decode token; raises
        ValueError where there are more than `max_rows`, or a page table is too long."""
        size = next((s for s in self._sizes if s >= len(pieces)), self.max_rows)
        page_tokens = self._storage.layout.page_tokens
        # Built on the host, so that each static tensor is filled by one copy.
        batch = padded_decode(ForwardBatch.build(pieces, page_tokens), size, self.max_pages)
        captured = self._captured.get(size)
        if captured is None:
            captured = self._captured[size] = self._capture(batch)
        for static, fresh in zip(_tensors(captured.batch), _tensors(batch), strict=True):
            static.copy_(fresh)
        captured.graph.replay()
        return captured.logits[: len(pieces)].clone()

    def capture_all(self) -> None:
        """Capture every size. Touches only the scratch slot and page."""
        scratch = ForwardBatch.build([Piece([0], 1, 0, [0, 0])], self._storage.layout.page_tokens)
        for size in self._sizes:
            if size not in self._captured:
                padded = padded_decode(scratch, size, self.max_pages)
                self._captured[size] = self._capture(padded)

    def _capture(self, example: ForwardBatch) -> _Captured:
        """Warm up on scratch rows only: warming up on live rows would advance their state."""
        device = self._model.device
        static = _scratch_like(example, device)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._model.forward(static, self._storage)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another may be staging a cache, which a global capture forbids.
        with torch.cuda.graph(graph, self._memory, capture_error_mode="thread_local"):
            logits = self._model.forward(static, self._storage)
        return _Captured(graph, static, logits)


def _tensors(batch: ForwardBatch) -> list[Tensor]:
    assert batch.decode is not None
    rows = batch.decode
    return [
        batch.tokens,
        batch.latent_rows,
        batch.last_rows,
        rows.slots,
        rows.context,
        rows.page_table,
    ]


def _scratch_like(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Scratch rows in the shapes of `batch`, on `device`."""
    tokens, latent_rows, last_rows, slots, context, page_table = (
        torch.zeros_like(t, device=device) for t in _tensors(batch)
    )
    last_rows.copy_(batch.last_rows)
    rows = DecodeRows(slots=slots, context=context.fill_(1), page_table=page_table)
    return ForwardBatch(tokens, latent_rows, last_rows, rows, None)
