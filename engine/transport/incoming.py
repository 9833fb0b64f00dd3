"""What a `Receiver` keeps of a transfer, tells lanes, and tells its driver."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from engine.transport.frames import Type
from engine.transport.messages import Commit, Key, Manifest, Reason
from engine.transport.regions import ChunkPlan, Region

#: A transfer at the receiver: (the sender's incarnation, the sender's number of the transfer).
Handle = tuple[int, int]
NOTHING, WRITING, HERE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Offered:
    """Reserve memory for the whole manifest, then `grant` or `refuse`."""

    handle: Handle
    key: Key
    manifest: Manifest
    identity: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An offer is void before it was answered: stop reserving."""

    handle: Handle
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    """The cache is whole and its digest agrees: `admit` or `reject` it."""

    handle: Handle
    key: Key
    manifest: Manifest
    commit: Commit
    identity: str
    instance: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """A granted transfer ended without admission; its memory may be reused now."""

    handle: Handle
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Denied:
    """The peer was not authorised to send this cache; it was refused. For the audit only."""

    handle: Handle
    key: Key
    manifest: Manifest
    identity: str
    instance: int
    reason: str


ReceiverEvent = Denied | Offered | Withdrawn | Verified | Aborted


class Slot(NamedTuple):
    """Where a chunk goes: bytes [start, start + size) of `region` of the transfer `handle`.
    wire_bytes: of its body."""

    handle: Handle
    number: int
    region: Region
    start: int
    size: int
    checksum: int
    wire_bytes: int


class IncomingState(Enum):
    """OFFERED waits for memory, ADMITTING for the application to take the verified cache, ABORTING
    for lanes that still write."""

    OFFERED = auto()
    GRANTED = auto()
    ADMITTING = auto()
    ABORTING = auto()


@dataclass(slots=True)
class Incoming:
    """One transfer. `chunks`: NOTHING, WRITING or HERE of each, once it is granted."""

    handle: Handle
    key: Key
    manifest: Manifest
    plan: ChunkPlan
    identity: str
    instance: int
    lease_until_s: float
    state: IncomingState = IncomingState.OFFERED
    chunks: bytearray = field(default_factory=bytearray)
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    here: int = 0
    writers: int = 0
    commit: Commit | None = None
    answer: Type = Type.ABORTED
    reason: Reason = field(default_factory=lambda: Reason(""))
    since_s: float = 0.0

    def have(self) -> bytes:
        """Bitmap of the chunks that are here (bit n of byte n // 8)."""
        bitmap = bytearray(-(-self.plan.count // 8))
        for number, state in enumerate(self.chunks):
            if state == HERE:
                bitmap[number >> 3] |= 1 << (number & 7)
        return bytes(bitmap)
