"""Regions of a cache, the memory ranges that hold them, and the chunks that cross the wire.

A region is one layer's memory of one kind, seen as a string of bytes: the concatenation of its
ranges in order. Both ends cut that string at the same multiples of `chunk_bytes`, so a chunk is
named by (layer, kind, index) whatever blocks hold it on either side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a region holds. Values are wire format."""

    KV = 0
    STATE = 1
    CONV = 2


class Region(NamedTuple):
    """One layer's memory of one kind."""

    layer: int
    kind: Kind


class Range(NamedTuple):
    """`length` bytes of an arena, from `offset` (bytes)."""

    offset: int
    length: int


class RangeList:
    """A growing list of ranges addressed as one string of bytes."""

    __slots__ = ("_ends", "_offsets")

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._offsets: list[int] = []
        self._ends: list[int] = []
        if ranges:
            self.extend(ranges)

    @classmethod
    def from_flat(cls, numbers: Sequence[int]) -> RangeList:
        """Of offset, length, offset, length, ..."""
        return cls(zip(numbers[::2], numbers[1::2], strict=True))

    def __len__(self) -> int:
        """Total bytes."""
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Range]:
        begin = 0
        for offset, end in zip(self._offsets, self._ends, strict=True):
            yield Range(offset, end - begin)
            begin = end

    def extend(self, ranges: Iterable[Sequence[int]]) -> None:
        """Append ranges; empty ones are dropped. Raises ValueError for a negative number."""
        offsets, ends = self._offsets, self._ends
        end = ends[-1] if ends else 0
        for offset, length in ranges:
            if offset < 0 or length < 0:
                raise ValueError(f"range ({offset}, {length}): offset and length must be >= 0")
            if length:
                end += length
                offsets.append(offset)
                ends.append(end)

    def slice(self, start: int, length: int) -> list[tuple[int, int]]:
        """The arena's (offset, length) ranges of bytes [start, start + length) of the string."""
        offsets, ends = self._offsets, self._ends
        if start < 0 or start + length > len(self):
            raise ValueError(f"bytes [{start}, {start + length}) of a region of {len(self)}")
        if len(ends) == 1:
            return [(offsets[0] + start, length)] if length else []
        index = bisect_right(ends, start)
        pieces: list[tuple[int, int]] = []
        while length:
            skip = start - (ends[index - 1] if index else 0)
            take = min(length, ends[index] - start)
            pieces.append((offsets[index] + skip, take))
            start += take
            length -= take
            index += 1
        return pieces


def checked_ranges(
    region: Region, ranges: Iterable[Sequence[int]], arena_bytes: int
) -> tuple[int, list[int]]:
    """(bytes, flat offsets and lengths) of ranges that a worker gives. Raises ValueError for a
    negative number and beyond the arena."""
    total = 0
    flat: list[int] = []
    for offset, length in ranges:
        if offset < 0 or length < 0:
            raise ValueError(f"range ({offset}, {length}): offset and length must be >= 0")
        if offset + length > arena_bytes:
            raise ValueError(f"{region}: ranges end beyond the arena")
        total += length
        flat += (offset, length)
    return total, flat


class RegionSize(NamedTuple):
    """A region's bytes as the manifest declares them."""

    region: Region
    size_bytes: int


class ChunkPlan:
    """Numbers the chunks of a manifest densely: 0 .. count-1, in region order.

    `regions` must not name a region twice. The number of chunks is known before any allocation
    (`count_chunks`), so a hostile manifest is refused by arithmetic alone.
    """

    __slots__ = ("_bases", "_index", "chunk_bytes", "count", "regions")

    def __init__(self, regions: Sequence[RegionSize], chunk_bytes: int) -> None:
        self.regions = tuple(regions)
        self.chunk_bytes = chunk_bytes
        self._bases: list[int] = []
        self._index = {item.region: position for position, item in enumerate(self.regions)}
        if len(self._index) != len(self.regions):
            raise ValueError("a region is named twice")
        base = 0
        for _, size in self.regions:
            self._bases.append(base)
            base += -(-size // chunk_bytes)
        self.count = base

    @staticmethod
    def count_chunks(regions: Sequence[RegionSize], chunk_bytes: int) -> int:
        return sum(-(-item.size_bytes // chunk_bytes) for item in regions)

    def chunks_of(self, region: Region) -> tuple[int, int, int]:
        """(declared bytes, number of the first chunk, chunks) of a region. Raises KeyError for one
        that the manifest does not name."""
        position = self._index[region]
        size = self.regions[position][1]
        return size, self._bases[position], -(-size // self.chunk_bytes)

    def number(self, region: Region, index: int) -> int | None:
        """The dense number of a chunk, or None where the manifest has no such chunk."""
        position = self._index.get(region)
        if position is None or index * self.chunk_bytes >= self.regions[position].size_bytes:
            return None
        return self._bases[position] + index

    def complete(self, region: Region, available_bytes: int) -> range:
        """Numbers of the chunks of `region` that lie whole in its first `available_bytes`."""
        position = self._index[region]
        size = self.regions[position].size_bytes
        whole = available_bytes // self.chunk_bytes
        if available_bytes == size:
            whole = -(-size // self.chunk_bytes)
        return range(self._bases[position], self._bases[position] + whole)

    def locate(self, number: int) -> tuple[Region, int, int, int]:
        """(region, index in the region, first byte in the region, bytes) of a chunk."""
        # Empty regions share a base with their successor; bisect_right lands on the last of them,
        # which is the one that has chunks.
        position = bisect_right(self._bases, number) - 1
        item = self.regions[position]
        index = number - self._bases[position]
        start = index * self.chunk_bytes
        return item.region, index, start, min(self.chunk_bytes, item.size_bytes - start)

    def bytes_of(self, number: int) -> int:
        """Bytes of a chunk."""
        position = bisect_right(self._bases, number) - 1
        left = self.regions[position][1] - (number - self._bases[position]) * self.chunk_bytes
        return left if left < self.chunk_bytes else self.chunk_bytes
