"""Hands out byte ranges of one buffer: first fit, freed neighbours joined."""

from __future__ import annotations

from bisect import insort

ALIGN_BYTES = 256


class Heap:
    """`size_bytes` bytes from offset 0; every range starts at a multiple of ALIGN_BYTES."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free = [(0, size_bytes)]
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        return sum(self._taken.values())

    def take(self, size_bytes: int) -> int | None:
        """The offset of a range of at least `size_bytes`, or None when no gap is large enough."""
        wanted = max(1, -(-size_bytes // ALIGN_BYTES)) * ALIGN_BYTES
        for index, (offset, length) in enumerate(self._free):
            if length >= wanted:
                rest = (offset + wanted, length - wanted)
                self._free[index : index + 1] = [rest] if rest[1] else []
                self._taken[offset] = wanted
                return offset
        return None

    def give(self, offset: int) -> None:
        """Free a range that `take` returned; raises KeyError for any other."""
        insort(self._free, (offset, self._taken.pop(offset)))
        joined: list[tuple[int, int]] = []
        for start, length in self._free:
            if joined and joined[-1][0] + joined[-1][1] == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self._free = joined
