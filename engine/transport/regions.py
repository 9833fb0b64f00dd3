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

    __slots__ = ("_ends", "_ranges")

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._ranges: list[Range] = []
        self._ends: list[int] = []
        self.extend(ranges)

    def __len__(self) -> int:
        """Total bytes."""
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def extend(self, ranges: Iterable[Sequence[int]]) -> None:
        """Append ranges; empty ones are dropped. Raises ValueError for a negative number."""
        end = len(self)
        for offset, length in ranges:
            if offset < 0 or length < 0:
                raise ValueError(f"range ({offset}, {length}): offset and length must be >= 0")
            if length:
                end += length
                self._ranges.append(Range(offset, length))
                self._ends.append(end)

    def end_offset(self) -> int:
        """One past the highest arena byte named (0 when empty)."""
        return max((r.offset + r.length for r in self._ranges), default=0)

    def slice(self, start: int, length: int) -> list[Range]:
        """The arena ranges that hold bytes [start, start + length) of the string."""
        if start < 0 or start + length > len(self):
            raise ValueError(f"bytes [{start}, {start + length}) of a region of {len(self)}")
        index = bisect_right(self._ends, start)
        if length:
            offset, whole_length = self._ranges[index]
            skip = start - (self._ends[index] - whole_length)
            if length <= whole_length - skip:  # most chunks
                return [Range(offset + skip, length)]
        pieces: list[Range] = []
        while length:
            whole = self._ranges[index]
            skip = start - (self._ends[index] - whole.length)
            take = min(length, whole.length - skip)
            pieces.append(Range(whole.offset + skip, take))
            start += take
            length -= take
            index += 1
        return pieces


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
        self._index: dict[Region, int] = {}
        base = 0
        for position, item in enumerate(self.regions):
            if item.region in self._index:
                raise ValueError(f"region {item.region} is named twice")
            self._index[item.region] = position
            self._bases.append(base)
            base += -(-item.size_bytes // chunk_bytes)
        self.count = base

    @staticmethod
    def count_chunks(regions: Sequence[RegionSize], chunk_bytes: int) -> int:
        return sum(-(-item.size_bytes // chunk_bytes) for item in regions)

    @property
    def total_bytes(self) -> int:
        return sum(item.size_bytes for item in self.regions)

    def size_of(self, region: Region) -> int:
        """Declared bytes of a region. Raises KeyError for one the manifest does not name."""
        return self.regions[self._index[region]].size_bytes

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
