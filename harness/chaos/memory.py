"""Memory of one worker of a campaign, and writing a part of what is spread over it."""

from __future__ import annotations

from typing import Any


class Arena:
    """Memory of one worker (`engine.transport.arena.SharedArena` without a descriptor)."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.buffer = memoryview(bytearray(size_bytes))

    def views(self, ranges: Any) -> list[memoryview]:
        buffer = self.buffer
        return [buffer[offset : offset + length] for offset, length in ranges]


def scatter(views: list[memoryview], start: int, data: bytes) -> None:
    """Write `data` at byte `start` of the string of bytes that `views` are."""
    at, done = 0, 0
    for view in views:
        end = at + len(view)
        if done < len(data) and start + done < end:
            inside = start + done - at
            take = min(len(view) - inside, len(data) - done)
            view[inside : inside + take] = data[done : done + take]
            done += take
        at = end
