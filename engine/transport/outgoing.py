"""What a `Sender` keeps of a transfer, hands to lanes, and tells its driver."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from engine.transport.messages import Key, Manifest
from engine.transport.regions import ChunkPlan, Region
from engine.transport.timing import Deadlines


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
    available: dict[Region, int] = field(init=False)  # bytes pushed
    ready: deque[int] = field(default_factory=deque)
    in_flight: dict[int, int] = field(default_factory=dict)  # chunk -> lane
    in_flight_bytes: int = 0
    acked: bytearray = field(init=False)
    acked_count: int = 0
    unacked_bytes: int = 0  # pushed, not yet acknowledged
    hashed: bytearray = field(init=False)
    hashed_count: int = 0
    checksums: array[int] = field(init=False)
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

    def __post_init__(self) -> None:
        count = self.plan.count
        self.available = {item.region: 0 for item in self.manifest.regions}
        self.acked = bytearray(count)
        self.hashed = bytearray(count)
        self.checksums = array("Q", bytes(8 * count))

    def push(self, region: Region, size: int) -> None:
        """`size` further bytes of `region` are there. Raises ValueError beyond the manifest."""
        before = self.available.get(region)
        if before is None:
            raise ValueError(f"{region} is not in the manifest")
        after = before + size
        declared, first, count = self.plan.chunks_of(region)
        if after > declared:
            raise ValueError(f"{region}: {after} bytes pushed of {declared} in the manifest")
        self.available[region] = after
        self.unacked_bytes += size
        chunk_bytes = self.plan.chunk_bytes
        whole = count if after == declared else after // chunk_bytes
        known = before // chunk_bytes
        if whole - known == 1:  # of small layers always
            if not self.acked[first + known]:
                self.ready.append(first + known)
            return
        acked = self.acked
        self.ready.extend([n for n in range(first + known, first + whole) if not acked[n]])

    def take(self, lane: int, most_bytes: int, most_chunks: int) -> list[ChunkTask]:
        """What `lane` may send now: one chunk of any size, and more as far as together they stay
        within the bytes and chunks, and within credit."""
        tasks: list[ChunkTask] = []
        taken = 0
        ready, in_flight, acked, locate = self.ready, self.in_flight, self.acked, self.plan.locate
        under_way, attempt = self.in_flight_bytes, self.key.attempt
        while ready and len(tasks) < most_chunks:
            number = ready[0]
            if acked[number] or number in in_flight:
                ready.popleft()
                continue
            region, chunk, start, size = locate(number)
            if tasks and taken + size > most_bytes:
                break
            if under_way and under_way + size > self.credit_bytes:
                break
            ready.popleft()
            in_flight[number] = lane
            under_way += size
            taken += size
            tasks.append(ChunkTask(self.id, attempt, number, region, chunk, start, size))
        self.in_flight_bytes = under_way
        self.readers += len(tasks)
        return tasks

    def note_checksum(self, number: int, checksum: int) -> None:
        """The chunk was sent, for the first time or again."""
        self.checksums[number] = checksum
        if self.hashed[number]:
            self.resent += 1
        else:
            self.hashed[number] = 1
            self.hashed_count += 1

    def land(self, number: int) -> None:
        """The chunk is no longer under way."""
        if self.in_flight.pop(number, None) is not None:
            self.in_flight_bytes -= self.plan.bytes_of(number)

    def take_back(self, numbers: list[int]) -> None:
        """Chunks under way are lost; they go again first, where this transfer still may."""
        for number in sorted(numbers, reverse=True):
            self.land(number)
            if self.state is OutgoingState.GRANTED:
                self.ready.appendleft(number)

    def acknowledge(self, number: int) -> bool:
        """Whether the receiver's having this chunk is news."""
        if number >= self.plan.count or self.acked[number]:
            return False
        self.land(number)
        self.acked[number] = 1
        self.acked_count += 1
        self.unacked_bytes -= self.plan.bytes_of(number)
        return True

    def queue_missing(self) -> None:
        """After a reconnect everything pushed, not acknowledged and not queued must go again."""
        queued = set(self.ready)
        for region, available in self.available.items():
            if available:
                self.ready.extend(
                    number
                    for number in self.plan.complete(region, available)
                    if not self.acked[number]
                    and number not in queued
                    and number not in self.in_flight
                )

    @property
    def commit_due(self) -> bool:
        """Whether a commit was asked for and can go out: every chunk was sent once."""
        return (
            self.commit is not None
            and not self.commit_sent
            and self.state is OutgoingState.GRANTED
            and self.hashed_count == self.plan.count
        )

    def overdue(self, now: float, deadlines: Deadlines) -> str:
        """What the receiver has not answered in its time; empty while it still has time."""
        waited_s = now - self.waiting_since_s
        if (
            self.state is OutgoingState.OFFERED
            and waited_s > deadlines.grant_s + deadlines.give_up_s
        ):
            return "no grant in time"
        if (
            self.state is OutgoingState.GRANTED
            and self.commit_sent
            and self.acked_count == self.plan.count
            and waited_s > deadlines.admit_s + deadlines.give_up_s
        ):
            return "no answer to the commit in time"
        return ""

    def ended(self, now: float) -> Ended:
        """Its last event."""
        return Ended(
            self.id,
            self.key,
            self.committed,
            self.reason,
            self.retryable,
            self.refused,
            self.wire_bytes,
            self.resent,
            self.digest,
            self.started_s,
            now,
        )
