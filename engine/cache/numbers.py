"""Free pages or slots, by number."""

from __future__ import annotations

from collections.abc import Sequence


class Numbers:
    """Hands out the numbers first..first+count-1; freed ones are reused before fresh ones."""

    __slots__ = ("_end", "_freed", "_fresh")

    def __init__(self, first: int, count: int) -> None:
        self._fresh = first
        self._end = first + count
        self._freed: list[int] = []

    def __len__(self) -> int:
        return self._end - self._fresh + len(self._freed)

    def take(self) -> int:
        """The next number; only when len(self) > 0."""
        if self._freed:
            return self._freed.pop()
        self._fresh += 1
        return self._fresh - 1

    def give(self, numbers: Sequence[int]) -> None:
        self._freed += numbers
