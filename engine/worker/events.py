"""Cache entries that appeared or went, for a prefix directory that asks for them."""

from __future__ import annotations

from collections import deque
from typing import Any

from engine.cache.figures import CacheEvent
from engine.cache.pool import HybridPool

#: Kept until they are fetched, once somebody fetches them.
KEPT_EVENTS = 16_384


class CacheEvents:
    """Of one pool, which tells `note`."""

    def __init__(self) -> None:
        self._kept: deque[CacheEvent] | None = None

    def note(self, event: CacheEvent) -> None:
        # A worker that nobody asks keeps nothing for them.
        if self._kept is not None:
            self._kept.append(event)

    def take(self, pool: HybridPool) -> list[list[Any]]:
        """[group, stored, key in hexadecimal] of each entry of `pool` that appeared or went since
        the last call; the first is told what is cached by then. The oldest of more than KEPT_EVENTS
        are lost: a directory is a hint.
        """
        events = list(pool.entries() if self._kept is None else self._kept)
        self._kept = deque(maxlen=KEPT_EVENTS)
        return [[str(event.group), event.stored, f"{event.key:x}"] for event in events]
