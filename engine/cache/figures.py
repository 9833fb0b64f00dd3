"""What a cache pool tells about itself: hits, events, counters and occupancy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Group(StrEnum):
    """The two kinds of memory."""

    KV = "kv"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Hit:
    """What a prompt finds: `kv_tokens` of whole blocks matched; `tokens` of them usable, because
    the state at that length is there too and at least one token is left to compute.
    """

    kv_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A cached entry appeared (`stored`) or went (`evicted`), for a prefix directory."""

    group: Group
    stored: bool
    key: int


@dataclass(slots=True)
class GroupFigures:
    """Counters since the start, and occupancy now, of one kind of memory.

    `owned` is held by leases alone (transfer-cache pages, live states); `cached` can be shared or
    evicted, `pinned` of it not now. capacity = free + owned + cached.
    """

    capacity: int
    free: int = 0
    owned: int = 0
    cached: int = 0
    pinned: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    stored: int = 0
    evicted: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0
