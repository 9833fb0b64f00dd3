"""Caches on their way in, as the worker holds them: what it reserved, admits and lets go.

Keeps the promise of `Callbacks`: once `on_offer` has returned, exactly one of a returning
`on_commit` or `on_abort` follows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from engine.transport.callbacks import Arrival, Callbacks, Destinations, Refusal
from engine.transport.errors import PlaneLost
from engine.transport.incoming import Handle
from engine.transport.ipc import Message
from engine.transport.messages import Key, Manifest
from engine.transport.regions import checked_ranges
from engine.transport.timing import Deadlines


@dataclass(slots=True)
class _Incoming:
    key: Key
    manifest: Manifest
    task: asyncio.Task[None] | None = None
    reserved: bool = False
    admitting: bool = False
    void: bool = False


class Reservations:
    """What a plane was offered, until it is the worker's or nobody's. Without callbacks every offer
    is refused. `tell` answers the plane, `spawn` keeps a task."""

    def __init__(
        self,
        callbacks: Callbacks | None,
        deadlines: Deadlines,
        arena_bytes: int,
        tell: Callable[[Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._callbacks = callbacks
        self._deadlines = deadlines
        self._arena_bytes = arena_bytes
        self._tell = tell
        self._spawn = spawn
        self._incoming: dict[Handle, _Incoming] = {}

    def __len__(self) -> int:
        """Offers that are neither the worker's nor nobody's yet."""
        return len(self._incoming)

    def plane_lost(self) -> None:
        """No plane, no writers: everything reserved is free."""
        for handle in list(self._incoming):
            self.void(handle)

    def offered(self, message: Message) -> None:
        handle = (message["h"][0], message["h"][1])
        incoming = _Incoming(Key(*message["key"]), Manifest.from_json(message["manifest"], True))
        self._incoming[handle] = incoming
        incoming.task = self._spawn(self._reserve(handle, incoming))

    async def _reserve(self, handle: Handle, incoming: _Incoming) -> None:
        refusal = {"op": "refuse", "h": list(handle), "retryable": True}
        try:
            if self._callbacks is None:
                raise Refusal("this instance takes no caches", retryable=False)
            async with asyncio.timeout(self._deadlines.grant_s * 0.9):
                ranges = await self._callbacks.on_offer(incoming.key, incoming.manifest)
            incoming.reserved = True
            if incoming.void:  # withdrawn, and `on_offer` returned all the same
                self._callbacks.on_abort(incoming.key)
                return
            destinations = _checked(ranges, incoming.manifest, self._arena_bytes)
        except Refusal as error:
            self._incoming.pop(handle, None)
            self._answer({**refusal, "reason": error.reason, "retryable": error.retryable})
        except TimeoutError:
            self._incoming.pop(handle, None)
            self._answer({**refusal, "reason": "no memory was free in time"})
        except Exception as error:
            self.void(handle)
            self._answer({**refusal, "reason": f"{type(error).__name__}: {error}"})
        else:
            self._answer({"op": "grant", "h": list(handle), "destinations": destinations})

    def verified(self, message: Message) -> None:
        handle = (message["h"][0], message["h"][1])
        incoming = self._incoming.get(handle)
        if incoming is not None:
            arrival = Arrival(
                incoming.manifest, message["first_token"], message["meta"], message["identity"]
            )
            incoming.admitting = True
            self._spawn(self._admit(handle, incoming, arrival))

    async def _admit(self, handle: Handle, incoming: _Incoming, arrival: Arrival) -> None:
        assert self._callbacks is not None
        try:
            async with asyncio.timeout(self._deadlines.admit_s * 0.9):
                await self._callbacks.on_commit(incoming.key, arrival)
        except Exception as error:
            incoming.admitting = False
            if incoming.void:
                self._callbacks.on_abort(incoming.key)
            reason = f"not admitted: {type(error).__name__}: {error}"
            self._answer({"op": "reject", "h": list(handle), "reason": reason})
        else:
            # The cache is the worker's from here on, whatever becomes of the answer.
            self._incoming.pop(handle, None)
            self._answer({"op": "admit", "h": list(handle)})

    def _answer(self, message: Message) -> None:
        """To an offer or a commit; a plane that is gone needs none."""
        with contextlib.suppress(PlaneLost):
            self._tell(message)

    def void(self, handle: Handle) -> None:
        """An offer is withdrawn, or its memory is quiet again."""
        incoming = self._incoming.pop(handle, None)
        if incoming is None:
            return
        incoming.void = True
        if incoming.admitting:
            return  # `on_commit` decides; only if it raises does `on_abort` follow
        if incoming.reserved:
            assert self._callbacks is not None
            self._callbacks.on_abort(incoming.key)
        elif incoming.task is not None and incoming.task is not asyncio.current_task():
            incoming.task.cancel()


def _checked(ranges: Destinations, manifest: Manifest, arena_bytes: int) -> list[list[int]]:
    """Destinations as a message: flat offsets and lengths of each region, in the manifest's order.
    Raises ValueError unless they fit the manifest and the arena."""
    destinations = []
    for region, size_bytes in manifest.regions:
        given, flat = checked_ranges(region, ranges.get(region, ()), arena_bytes)
        if given != size_bytes:
            raise ValueError(f"{region}: {given} bytes reserved for {size_bytes} in the manifest")
        destinations.append(flat)
    return destinations
