"""Prompts that wait at a modelled instance: best rank first, equal ranks first come first served.

Those that have ended while they waited (cancelled, say) stay until they surface, and are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from harness.instances.modelled_prompt import PrefillWork

#: (rank, order of coming, prompt)
Entry = tuple[float, int, PrefillWork]


class PromptQueue:
    """A heap of prompts by rank, then by order of coming."""

    __slots__ = ("_entries", "_pushes")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._pushes = 0

    def push(self, work: PrefillWork, rank: float) -> None:
        self._pushes += 1
        heapq.heappush(self._entries, (rank, self._pushes, work))

    def head(self) -> Entry | None:
        """The best that has not ended; it stays."""
        entries = self._entries
        while entries and entries[0][2].done():
            heapq.heappop(entries)
        return entries[0] if entries else None

    def take(self, fits: Callable[[PrefillWork], bool]) -> PrefillWork | None:
        """Out of the queue: its head, or while that does not fit, the best that has begun before.

        Without the second a head could wait for ever for the memory of one that it preempted.
        """
        head, entries = self.head(), self._entries
        if head is None:
            return None
        if fits(head[2]):
            return heapq.heappop(entries)[2]
        begun = [entry for entry in entries if entry[2].started and not entry[2].done()]
        if not begun:
            return None
        best = min(begun)
        entries.remove(best)
        heapq.heapify(entries)
        return best[2]

    def clear(self) -> None:
        self._entries.clear()
