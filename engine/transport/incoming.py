"""What a `Receiver` keeps of a transfer, tells lanes, and tells its driver."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from engine.transport.errors import FrameError
from engine.transport.frames import Header, Type
from engine.transport.messages import Commit, Key, Manifest, Reason
from engine.transport.regions import ChunkPlan, Kind, Region
from engine.transport.timing import Deadlines

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


class Judged(NamedTuple):
    """Numbers of chunks that lanes no longer write: `here` arrived as the sender hashed them,
    `here_bytes` in all; of `damaged` the checksum differs; in `lost` the connection broke."""

    here: list[int]
    here_bytes: int
    damaged: list[int]
    lost: list[int]


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

    def grant(self, now: float) -> None:
        """Memory for the whole of it is reserved."""
        # Not before: an offer must cost its receiver next to nothing.
        self.chunks = bytearray(self.plan.count)
        self.checksums = array("Q", bytes(8 * self.plan.count))
        self.state = IncomingState.GRANTED
        self.since_s = now

    def verified(self, commit: Commit) -> Verified:
        """The event that asks the application to take it."""
        return Verified(self.handle, self.key, self.manifest, commit, self.identity, self.instance)

    def overdue(self, now: float, deadlines: Deadlines) -> tuple[Type, str] | None:
        """How it ends, and why, where its lease or an answer's time has ended; else None."""
        waited_s = now - self.since_s
        if self.state in (IncomingState.OFFERED, IncomingState.GRANTED):
            if now > self.lease_until_s:
                return Type.ABORTED, "the sender's lease ended"
            if self.state is IncomingState.OFFERED and waited_s > deadlines.grant_s:
                return Type.REFUSE, "no memory was reserved in time"
        if self.state is IncomingState.ADMITTING and waited_s > deadlines.admit_s:
            return Type.ABORTED, "the cache was not admitted in time"
        return None

    def number_of(self, header: Header) -> int:
        """The chunk that a DATA header names. Raises FrameError for one that the manifest does not
        have."""
        try:
            region = Region(header.layer, Kind(header.kind))
        except ValueError as error:
            raise FrameError(f"region kind {header.kind}") from error
        number = self.plan.number(region, header.chunk)
        if number is None:
            raise FrameError(f"chunk {header.chunk} of {region} is not in the manifest")
        return number

    def slots(
        self,
        rows: Sequence[tuple[int, int]],
        wire_size: Callable[[Manifest, Kind, int], int],
    ) -> list[Slot]:
        """Where chunks go, given as (number, checksum). Raises FrameError for one that the manifest
        does not have."""
        handle, manifest, count, locate = (
            self.handle,
            self.manifest,
            self.plan.count,
            self.plan.locate,
        )
        slots: list[Slot] = []
        for number, checksum in rows:
            if number >= count:
                raise FrameError(f"chunk {number} of {count} is not in the manifest")
            region, _, start, size = locate(number)
            wire_bytes = wire_size(manifest, region.kind, size) if manifest.codecs else size
            slots.append(Slot(handle, number, region, start, size, checksum, wire_bytes))
        return slots

    def begin(self, slots: Sequence[Slot], until_s: float) -> tuple[list[Slot | int], list[int]]:
        """A lane is about to read bodies: where each goes, or how many bytes to throw away; and the
        numbers of those that are here already. `until_s`: end of the lease if any is written."""
        chunks = self.chunks
        places: list[Slot | int] = []
        here: list[int] = []
        for slot in slots:
            state = chunks[slot.number]
            if state == NOTHING:
                # A chunk named twice is written once: the second finds the first WRITING.
                chunks[slot.number] = WRITING
                self.writers += 1
                self.lease_until_s = until_s
                places.append(slot)
                continue
            places.append(slot.wire_bytes)
            if state == HERE:
                here.append(slot.number)
        return places, here

    def end(self, slots: Sequence[Slot], checksums: Sequence[int | None]) -> Judged:
        """A lane no longer writes these chunks. checksums: of the bodies as they arrived, None
        where the connection broke."""
        self.writers -= len(slots)
        here: list[int] = []
        damaged: list[int] = []
        lost: list[int] = []
        here_bytes = 0
        for slot, checksum in zip(slots, checksums, strict=True):
            number = slot.number
            if checksum == slot.checksum:
                self.chunks[number] = HERE
                self.checksums[number] = checksum
                here.append(number)
                here_bytes += slot.size
            else:
                self.chunks[number] = NOTHING
                (lost if checksum is None else damaged).append(number)
        self.here += len(here)
        return Judged(here, here_bytes, damaged, lost)

    def have(self) -> bytes:
        """Bitmap of the chunks that are here (bit n of byte n // 8)."""
        bitmap = bytearray(-(-self.plan.count // 8))
        for number, state in enumerate(self.chunks):
            if state == HERE:
                bitmap[number >> 3] |= 1 << (number & 7)
        return bytes(bitmap)
