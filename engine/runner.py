"""Runs a scheduler's step on the model. Touches storage only; all accounting is the scheduler's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.model.batch import ForwardBatch, Piece
from engine.sampling import sample
from engine.scheduler import Item, Step

if TYPE_CHECKING:
    from engine.cache.storage import CacheStorage
    from engine.model.decode_graph import DecodeGraph
    from engine.model.model import Model

#: Called in the computing thread.
OnLayer = Callable[[int, tuple[int, ...]], None]

#: Widest page table of captured decode steps; a sequence with more pages takes the plain path.
GRAPH_PAGES = 4096


class Runner:
    """`forward_tokens` bounds one forward pass (and so its working memory); longer items are cut
    into passes at multiples of the page. May be called from any one thread at a time.
    """

    def __init__(self, model: Model, storage: CacheStorage, forward_tokens: int = 8192) -> None:
        self.model = model
        self.storage = storage
        page = storage.layout.page_tokens
        self._pass_tokens = max(page, forward_tokens // page * page)
        self._graph: DecodeGraph | None = None
        if storage.device.type == "cuda":
            from engine.model.decode_graph import DecodeGraph

            self._graph = DecodeGraph(model, storage, min(GRAPH_PAGES, storage.layout.n_pages))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """On CUDA compile the kernels and capture the decode steps, on scratch memory: it takes
        minutes the first time, which would fall into the first requests. Else nothing.
        """
        if self._graph is None:
            return
        page = self.storage.layout.page_tokens
        whole = Piece([0] * (page + 1), 0, 0, [0, 0], checkpoints=((page, 0),))
        self._forward([whole], None)
        self._forward([whole, Piece([0] * page, page, 0, [0, 0])], None)
        self._graph.capture_all()
        self._finish()

    def fence(self) -> torch.cuda.Event | None:
        """Passes when what was written so far on this thread's stream is there; None on a CPU."""
        if self.storage.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @torch.inference_mode()
    def execute(self, step: Step, on_layer: OnLayer | None = None) -> list[int]:
        """Compute all items; returns the sampled tokens of those that sample, in order.

        `on_layer(layer, stops)` is called when a pass has written a layer's cache: that of item i
        is complete for its first `stops[i]` tokens. On return all is computed, not only enqueued:
        memory that the step read or wrote may go to others, who use it on other streams.
        """
        starts = [item.start for item in step.items]
        results: dict[int, int] = {}
        while True:
            pieces: list[Piece] = []
            chosen: list[int] = []
            budget = self._pass_tokens
            for index, item in enumerate(step.items):
                start = starts[index]
                if start == item.stop or budget <= 0:
                    continue
                stop = min(item.stop, start + budget)
                if stop < item.stop:
                    stop -= stop % self.storage.layout.page_tokens
                    if stop <= start:
                        continue
                pieces.append(_piece(item, start, stop))
                chosen.append(index)
                starts[index] = stop
                budget -= stop - start
            if not pieces:
                self._finish()
                return [results[i] for i, item in enumerate(step.items) if item.samples]
            written = None if on_layer is None else partial(_tell, on_layer, tuple(starts))
            logits = self._forward(pieces, written)
            rows = [
                row
                for row, index in enumerate(chosen)
                if starts[index] == step.items[index].stop and step.items[index].samples
            ]
            if rows:
                sequences = [step.items[chosen[row]].sequence for row in rows]
                tokens = sample(
                    logits[rows],
                    [sequence.sampling for sequence in sequences],
                    [len(sequence.tokens) for sequence in sequences],
                )
                results.update(zip([chosen[row] for row in rows], tokens, strict=True))

    def _finish(self) -> None:
        if self.storage.device.type == "cuda":
            torch.cuda.current_stream(self.storage.device).synchronize()

    def _forward(self, pieces: list[Piece], on_layer: Callable[[int], None] | None) -> torch.Tensor:
        graph = self._graph
        if (
            graph is not None
            and on_layer is None
            and len(pieces) <= graph.max_rows
            and all(piece.is_decode and len(piece.pages) <= graph.max_pages for piece in pieces)
        ):
            return graph.forward(pieces)
        batch = ForwardBatch.build(pieces, self.storage.layout.page_tokens, self.storage.device)
        return self.model.forward(batch, self.storage, on_layer)


def _tell(on_layer: OnLayer, stops: tuple[int, ...], layer: int) -> None:
    on_layer(layer, stops)


def _piece(item: Item, start: int, stop: int) -> Piece:
    lease = item.sequence.lease
    assert lease is not None
    fresh = start == item.start
    return Piece(
        tokens=item.sequence.tokens[start:stop],
        start=start,
        slot=lease.slot,
        pages=lease.pages,
        source_slot=item.source_slot if fresh and item.source_slot >= 0 else None,
        checkpoints=tuple(c for c in item.checkpoints if start < c[0] <= stop),
    )
