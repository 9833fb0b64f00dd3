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

    def push(self, region: Region, size: int) -> None:
        """`size` further bytes of `region` are there. Raises ValueError beyond the manifest."""
        before = self.available.get(region)
        if before is None:
            raise ValueError(f"{region} is not in the manifest")
        after = before + size
        if after > self.plan.size_of(region):
            raise ValueError(
                f"{region}: {after} bytes pushed of {self.plan.size_of(region)} in the manifest"
            )
        self.available[region] = after
        self.unacked_bytes += size
        known = self.plan.complete(region, before)
        whole = self.plan.complete(region, after)
        acked = self.acked
        self.ready.extend(n for n in range(known.stop, whole.stop) if not acked[n])

    def take(self, lane: int, most_bytes: int, most_chunks: int, tasks: list[ChunkTask]) -> int:
        """Append to `tasks` what `lane` may send now, until the bytes or chunks are reached or
        credit ends; returns the bytes."""
        taken = count = 0
        ready, in_flight, acked = self.ready, self.in_flight, self.acked
        while ready and taken < most_bytes and count < most_chunks:
            number = ready[0]
            if acked[number] or number in in_flight:
                ready.popleft()
                continue
            region, chunk, start, size = self.plan.locate(number)
            if self.in_flight_bytes and self.in_flight_bytes + size > self.credit_bytes:
                break
            ready.popleft()
            in_flight[number] = lane
            self.in_flight_bytes += size
            self.readers += 1
            taken += size
            count += 1
            tasks.append(ChunkTask(self.id, self.key.attempt, number, region, chunk, start, size))
        return taken

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
            self.in_flight_bytes -= self.plan.locate(number)[3]

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
        self.unacked_bytes -= self.plan.locate(number)[3]
        return True

    def queue_missing(self) -> None:
        """After a reconnect everything pushed, not acknowledged and not queued must go again."""
        queued = set(self.ready)
        for region, available in self.available.items():
            for number in self.plan.complete(region, available):
                if not self.acked[number] and number not in queued and number not in self.in_flight:
                    self.ready.append(number)
