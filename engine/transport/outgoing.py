"""What a `Sender` keeps of a transfer, hands to lanes, and tells its driver."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from engine.transport.messages import Key, Manifest
from engine.transport.regions import ChunkPlan, Region


class ChunkTask(NamedTuple):
    """One chunk for a lane to send: bytes [start, start + size) of `region`, its `chunk`-th."""

    transfer: int
    attempt: int
    number: int
    region: Region
    chunk: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The receiver has reserved memory for the whole transfer."""

    transfer: int
    key: Key


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a transfer. `committed`: the receiver admitted the whole, verified cache.

    wire_bytes: header and body bytes given to the network, resends included. resent: chunks sent
    more than once. digest: what both ends agree the bytes were.
    """

    transfer: int
    key: Key
    committed: bool
    reason: str
    retryable: bool
    refused: bool
    wire_bytes: int
    resent: int
    digest: int
    started_s: float
    ended_s: float


SenderEvent = Granted | Ended


class OutgoingState(Enum):
    """GRANTED may send. ENDING waits for lanes that still read its memory."""

    OFFERED = auto()
    GRANTED = auto()
    CANCELLING = auto()
    ENDING = auto()


@dataclass(slots=True)
class Outgoing:
    """One transfer. Chunk numbers are dense (`ChunkPlan`); `ready` are pushed, not acknowledged and
    not under way."""

    id: int
    key: Key
    manifest: Manifest
    plan: ChunkPlan
    started_s: float
    state: OutgoingState = OutgoingState.OFFERED
    granted_once: bool = False
    available: dict[Region, int] = field(default_factory=dict)
    ready: deque[int] = field(default_factory=deque)
    in_flight: dict[int, int] = field(default_factory=dict)  # chunk -> lane
    in_flight_bytes: int = 0
    acked: bytearray = field(default_factory=bytearray)
    acked_count: int = 0
    unacked_bytes: int = 0  # pushed, not yet acknowledged
    hashed: bytearray = field(default_factory=bytearray)
    hashed_count: int = 0
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    corrupt: dict[int, int] = field(default_factory=dict)  # chunk -> times found corrupt
    credit_bytes: int = 0
    commit: tuple[int, dict] | None = None  # first_token, meta
    commit_sent: bool = False
    digest: int = 0
    readers: int = 0  # lanes that read from the source memory now
    wire_bytes: int = 0
    resent: int = 0
    committed: bool = False
    refused: bool = False
    reason: str = ""
    retryable: bool = True
    waiting_since_s: float = 0.0
