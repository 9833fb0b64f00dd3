"""The real worker on virtual time: only its device, its memory and its data plane are stood in for.

Scheduler, engine loop, cache pool, arrivals, courier and the asyncio face of the transport are the
code that serves; `Checked` computes, and looks at every byte that it is about to attend to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from engine.cache.figures import Group
from engine.prefill_time import MeasuredTime
from engine.scheduler import Item, Scheduler, Step
from engine.sequence import Sequence
from engine.transport.callbacks import Callbacks
from engine.transport.timing import Deadlines, Limits
from engine.worker.courier import Courier
from engine.worker.engine import EngineLoop
from engine.worker.media import Direct
from engine.worker.options import WorkerOptions
from engine.worker.worker import Worker
from harness.chaos.clock import Device
from harness.chaos.connection import Switch
from harness.chaos.content import (
    MODEL,
    PAGE_TOKENS,
    POISON,
    TOKEN_BYTES,
    History,
    describe,
    layout_of,
)
from harness.chaos.memory import Arena
from harness.chaos.plane import VirtualPlane

#: Work of a step: `STEP_S`, and so much a prompt token.
STEP_S = 0.01
TOKEN_S = 0.003
#: Small, so that every transfer meets them.
CREDIT_BYTES = 400
DEADLINES = Deadlines(grant_s=4.0, admit_s=4.0)
#: Blocks between checkpoints.
CHECKPOINT_BLOCKS = 2


class Checked:
    """Computes by writing the right bytes, after checking those that it builds on
    (`engine.worker.engine.StepRunner`)."""

    def __init__(
        self, layout: Any, arena: Arena, device: Device, violate: Callable[[str], None]
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._device = device
        self._violate = violate
        self._histories: dict[Sequence, History] = {}
        self.checks = 0

    def fence(self) -> None:
        return None

    def execute(
        self, step: Step, on_layer: Callable[[int, tuple[int, ...]], None] | None = None
    ) -> list[int]:
        """Layer after layer on the device; see `engine.runner.Runner.execute`."""
        items = step.items
        work_s = STEP_S + TOKEN_S * sum(item.stop - item.start for item in items)
        histories = [self._check(item) for item in items]
        stops = tuple(item.stop for item in items)
        layer_s = work_s / (MODEL.layers + 1)

        def write(layer: int) -> None:
            for item, history in zip(items, histories, strict=True):
                self._write(item, history, layer)
            if on_layer is not None:
                on_layer(layer, stops)

        for layer in range(MODEL.layers):
            self._device.after((layer + 1) * layer_s, partial(write, layer))
        self._device.work_s = work_s
        for item in items:
            if item.samples and item.sequence.hand_over:
                self._histories.pop(item.sequence, None)
        return [
            history.next_token(item.stop)
            for item, history in zip(items, histories, strict=True)
            if item.samples
        ]

    def poison(self, group: Group, index: int) -> None:
        """A page or slot became free: nobody may read it before it is written again."""
        layout = self._layout
        tensors = [layout.latents] if group is Group.KV else [layout.state, layout.conv]
        for by_layer in tensors:
            for tensor in by_layer.values():
                start = tensor.offset + index * tensor.row_bytes
                self._arena.buffer[start : start + tensor.row_bytes] = (
                    bytes([POISON]) * tensor.row_bytes
                )

    def _check(self, item: Item) -> History:
        sequence, lease = item.sequence, item.sequence.lease
        assert lease is not None
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = History(sequence.tenant)
        history.grow(sequence.tokens, item.stop)
        if not item.start:
            return history
        self.checks += 1
        for layer, rows in history.rows.items():
            expected = bytes(rows[: item.start * TOKEN_BYTES])
            found = self._latents(lease.pages, layer, item.start)
            if found != expected:
                self._wrong(sequence, layer, describe(found, expected, TOKEN_BYTES))
        slot = item.source_slot if item.source_slot >= 0 else lease.slot
        for layer in self._layout.state:
            expected = history.state(layer, item.start)
            found = self._state(layer, slot)
            if found != expected:
                self._wrong(sequence, layer, "state: " + describe(found, expected, 32))
        return history

    def _wrong(self, sequence: Sequence, layer: int, what: str) -> None:
        self._violate(f"wrong cache: request {sequence.id}, layer {layer}: {what}")

    def _rows(self, layer: int, pages: list[int], start: int, stop: int) -> list[memoryview]:
        tensor, buffer = self._layout.latents[layer], self._arena.buffer
        views = []
        for index in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            first = max(start, index * PAGE_TOKENS) - index * PAGE_TOKENS
            last = min(stop, (index + 1) * PAGE_TOKENS) - index * PAGE_TOKENS
            page = tensor.offset + pages[index] * tensor.row_bytes
            views.append(buffer[page + first * TOKEN_BYTES : page + last * TOKEN_BYTES])
        return views

    def _latents(self, pages: list[int], layer: int, n_tokens: int) -> bytes:
        return b"".join(self._rows(layer, pages, 0, n_tokens))

    def _state(self, layer: int, slot: int) -> bytes:
        buffer = self._arena.buffer
        parts = []
        for tensor in (self._layout.state[layer], self._layout.conv[layer]):
            start = tensor.offset + slot * tensor.row_bytes
            parts.append(buffer[start : start + tensor.row_bytes])
        return b"".join(parts)

    def _write(self, item: Item, history: History, layer: int) -> None:
        lease = item.sequence.lease
        if lease is None:
            self._violate(f"step memory: request {item.sequence.id} lost its lease in a step")
            return
        if layer in self._layout.latents:
            at = item.start * TOKEN_BYTES
            for view in self._rows(layer, lease.pages, item.start, item.stop):
                view[:] = history.rows[layer][at : at + len(view)]
                at += len(view)
            return
        targets = [(item.stop, lease.slot), *item.checkpoints]
        for n_tokens, slot in targets:
            row = history.state(layer, n_tokens)
            for tensor in (self._layout.state[layer], self._layout.conv[layer]):
                start = tensor.offset + slot * tensor.row_bytes
                self._arena.buffer[start : start + tensor.row_bytes] = row[: tensor.row_bytes]
                row = row[tensor.row_bytes :]


class _Courier(Courier):
    """The courier, over a virtual plane."""

    def __init__(self, switch: Switch, host: str, cluster: str, *parts: Any) -> None:
        super().__init__(*parts)
        self._switch = switch
        self._host, self._cluster = host, cluster

    async def start(self, arena: Any) -> None:
        callbacks = Callbacks(self._on_offer, self._on_commit, self._on_abort)
        self._plane = VirtualPlane(
            self._switch, self._host, self._cluster, arena, self._settings, callbacks
        )


class _Loop(EngineLoop):
    """The engine loop, with a device for its thread."""

    def __init__(self, scheduler: Scheduler, runner: Checked, device: Any) -> None:
        super().__init__(scheduler, runner, MeasuredTime())
        self._thread = device


class VirtualWorker(Worker):
    """One life of a worker. `crash` ends it as SIGKILL does, `freeze` stops it as SIGSTOP does."""

    plane: VirtualPlane

    def __init__(
        self,
        switch: Switch,
        name: str,
        cluster: str,
        role: str,
        pages: int,
        slots: int,
        discipline: str,
        violate: Callable[[str], None],
    ) -> None:
        layout = layout_of(pages, slots)
        arena = Arena(layout.nbytes)
        options = WorkerOptions(
            socket=None,
            listen=None,
            name=name,
            cluster=cluster,
            role=role,
            page_tokens=PAGE_TOKENS,
            pages=pages,
            slots=slots,
            max_batch=4,
            step_tokens=32,
            checkpoint_interval=CHECKPOINT_BLOCKS,
            queue_discipline=discipline,
        )
        storage = SimpleNamespace(layout=layout, device=SimpleNamespace(type="cpu"))
        model = SimpleNamespace(config=MODEL)
        engine: Any = SimpleNamespace(
            model=model,
            storage=storage,
            arena=arena,
            stop_tokens=frozenset(),
            staged=False,
            layout=layout,
        )
        super().__init__(options, engine, None)
        self.incarnation = switch.incarnation()
        self.violate = violate
        self.device = Device()
        self.frozen = False
        self.dead = False
        self.runner = Checked(layout, arena, self.device, violate)
        self.pool._on_freed = self.runner.poison
        self.loop = _Loop(self.scheduler, self.runner, self.device)
        settings = replace(
            self.courier._settings,
            incarnation=self.incarnation,
            deadlines=DEADLINES,
            limits=Limits(credit_bytes=CREDIT_BYTES),
        )
        self.courier = _Courier(
            switch,
            name,
            cluster,
            layout,
            Direct(layout),
            self.pool,
            self.scheduler,
            self.arrivals,
            settings,
        )
        self._thawed = asyncio.Event()
        self._thawed.set()

    async def begin(self) -> None:
        await self.start(lambda error: self.violate(f"worker loop: {self.options.name}: {error!r}"))
        self.plane = self.courier.plane  # type: ignore[assignment]

    async def running(self) -> None:
        """Returns at once, or when a stopped process goes on."""
        while self.frozen:
            await self._thawed.wait()

    def freeze(self) -> None:
        if not self.dead:
            self.frozen = True
            self._thawed.clear()
            self.device.pause()
            self.plane.freeze()

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            self._thawed.set()
            self.device.resume()
            self.plane.thaw()

    def crash(self) -> None:
        self.dead = True
        self.frozen = False
        self._thawed.set()
        self.device.shutdown()
        self.plane.die("the worker was killed")
        if self._running is not None:
            self._running.cancel()
