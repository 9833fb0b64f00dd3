"""What a receiver remembers of transfers that ended and of attempts that were made, bounded.

Frames come again after reconnects, and attempts out of order: both must be answered as before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.transport.frames import Type
from engine.transport.incoming import Handle
from engine.transport.messages import Key, Reason


@dataclass(frozen=True, slots=True)
class Past:
    """How a transfer ended, kept to answer frames that come again."""

    key: Key
    answer: Type
    reason: Reason


class History:
    """Keeps `most` of each; the oldest give way."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._past: OrderedDict[Handle, Past] = OrderedDict()
        self._newest: OrderedDict[str, int] = OrderedDict()

    def of(self, handle: Handle) -> Past | None:
        return self._past.get(handle)

    def ended(self, handle: Handle, past: Past) -> None:
        self._past[handle] = past
        while len(self._past) > self._most:
            self._past.popitem(last=False)

    def newest_attempt(self, request_id: str) -> int:
        """0 where none is known."""
        return self._newest.get(request_id, 0)

    def attempted(self, key: Key) -> None:
        """`key` is the newest attempt at its request."""
        self._newest[key.request_id] = key.attempt
        self._newest.move_to_end(key.request_id)
        while len(self._newest) > self._most:
            self._newest.popitem(last=False)
