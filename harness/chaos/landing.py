"""The receiving side of a plane: the memory that was granted, chunks being written.

Follows `engine.transport.inbound`; all decisions are `Receiver`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.transport.errors import FrameError
from engine.transport.frames import HEADER_BYTES, Type, checksum, decode_header
from engine.transport.incoming import Handle, Slot
from engine.transport.messages import Manifest
from engine.transport.receiver import Receiver
from engine.transport.regions import RangeList, Region
from engine.transport.settings import Settings
from harness.chaos.memory import Arena, scatter
from harness.chaos.wire import Stream

#: Between the two halves of a chunk that are written.
WRITE_S = 0.004


class Landing:
    """`wake` makes the plane look at what changed."""

    def __init__(self, arena: Arena, settings: Settings, wake: Callable[[], None]) -> None:
        self.receiver = Receiver(settings.incarnation, settings.deadlines, settings.limits)
        self.destinations: dict[Handle, dict[Region, RangeList]] = {}
        self.closed = False
        self._arena = arena
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._writing: dict[Stream, Slot] = {}

    # --- chunks ------------------------------------------------------------------------------

    def chunk(self, source: int, stream: Stream, data: bytes) -> None:
        """A chunk of peer `source` is here: half of it is written now, the rest a moment later."""
        if self.closed:
            return
        try:
            header = decode_header(data[:HEADER_BYTES])
            if header.type is not Type.DATA or header.source != source:
                raise FrameError("not a chunk of this peer")
            slot = self.receiver.begin_chunk(self._loop.time(), header)
        except FrameError:
            stream.cut()
            return
        if slot is None:
            self._wake()
            return
        ranges = self.destinations[slot.handle][slot.region].slice(slot.start, slot.size)
        views = self._arena.views(ranges)
        body = data[HEADER_BYTES:]
        half = len(body) // 2
        scatter(views, 0, body[:half])
        self._writing[stream] = slot

        def written() -> None:
            if self._writing.pop(stream, None) is None or self.closed:
                return
            scatter(views, half, body[half:])
            self.receiver.end_chunk(self._loop.time(), slot, checksum([b"".join(views)]))
            self._wake()

        self._loop.call_later(WRITE_S, written)

    def writing_ended(self, stream: Stream) -> None:
        """The connection broke, perhaps in a chunk."""
        slot = self._writing.pop(stream, None)
        if slot is not None and not self.closed:
            self.receiver.end_chunk(self._loop.time(), slot, None)
            self._wake()

    # --- what the worker answers -------------------------------------------------------------

    def grant(
        self, handle: Handle, destinations: dict[Region, RangeList], manifest: Manifest
    ) -> bool:
        """See `Receiver.grant`."""
        self.destinations[handle] = destinations
        if self.receiver.grant(self._loop.time(), handle):
            return True
        del self.destinations[handle]
        return False

    def refuse(self, handle: Handle, reason: str, retryable: bool) -> None:
        self.receiver.refuse(handle, reason, retryable)

    def admit(self, handle: Handle) -> bool:
        self.destinations.pop(handle, None)
        return self.receiver.admit(handle)

    def reject(self, handle: Handle, reason: str) -> None:
        self.receiver.reject(handle, reason)
