"""An in-memory network between one Sender and one Receiver: cut, delay, reorder, double, damage.

Drives both state machines on a clock of its own with a seeded source of faults, as the plane's loop
does with sockets: a control stream each way and `LANES` data streams that overtake each other.
Memory at both ends is bytes per region, so what was admitted is compared exactly.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.transport.errors import FrameError
from engine.transport.frames import (
    HEADER_BYTES,
    MAX_BATCH_BYTES,
    ROW_BYTES,
    FrameReader,
    Type,
    checksum,
    decode_header,
    decode_table,
    encode_frame,
)
from engine.transport.incoming import Aborted, Handle, Offered, Slot, Verified, Withdrawn
from engine.transport.messages import Key, Manifest
from engine.transport.outgoing import Ended, Granted
from engine.transport.receiver import Receiver
from engine.transport.regions import Region
from engine.transport.sender import Sender

LANES = 3
#: Chunks that a lane takes at a time, drawn anew each time.
MOST_TOGETHER = 4


@dataclass(slots=True)
class Faults:
    """Probabilities: of damage, doubling and cuts per frame (a cut also per step); of the
    application refusing an offer and rejecting a verified cache."""

    damage: float = 0.0
    damage_control: float = 0.0
    double: float = 0.0
    cut_lane: float = 0.0
    cut_control: float = 0.0
    refuse: float = 0.0
    reject: float = 0.0


@dataclass
class Network:
    """Both ends, what lies between them, and an application that keeps its books.

    reserved: memory of transfers that are granted and not ended. admitted: what was committed.
    ended: every `Ended` per key (exactly one per transfer). up: whether anything moves at all.
    """

    sender: Sender
    receiver: Receiver
    seed: int
    faults: Faults = field(default_factory=Faults)
    now: float = 0.0
    up: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.to_receiver: deque[bytes] = deque()
        self.to_sender: deque[bytes] = deque()
        self.lanes: list[deque[bytes]] = [deque() for _ in range(LANES)]
        self.sources: dict[int, dict[Region, bytes]] = {}
        self.reserved: dict[Handle, dict[Region, bytearray]] = {}
        self.admitted: dict[Key, dict[Region, bytearray]] = {}
        self.aborted: list[Key] = []
        self.ended: dict[Key, list[Ended]] = {}
        self.granted: list[Key] = []
        self._readers = (FrameReader(), FrameReader())
        self._offers: deque[Offered] = deque()

    # --- the application ---------------------------------------------------------------------

    def open(self, key: Key, manifest: Manifest, contents: dict[Region, bytes]) -> int:
        transfer = self.sender.open(self.now, key, manifest)
        self.sources[transfer] = contents
        return transfer

    def push_all(self, transfer: int) -> None:
        for region, data in self.sources[transfer].items():
            self.sender.push(transfer, region, len(data))

    # --- the network -------------------------------------------------------------------------

    def connect(self) -> None:
        self._readers = (FrameReader(), FrameReader())
        source = self.sender.incarnation
        self.receiver.on_connected(source, "peer")
        self.sender.on_connected(self.now, self.receiver.incarnation)

    def cut_control(self) -> None:
        self.to_receiver.clear()
        self.to_sender.clear()
        for lane in range(LANES):
            self.lanes[lane].clear()
        self.sender.on_disconnected(self.now)

    def cut_lane(self, lane: int) -> None:
        self.lanes[lane].clear()
        self.sender.lane_down(self.now, lane)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def _damage(self, data: bytes, start: int) -> bytes:
        """One bit flipped at or after `start`."""
        if len(data) <= start:
            return data
        at = self.random.randrange(start, len(data))
        return data[:at] + bytes([data[at] ^ 1 << self.random.randrange(8)]) + data[at + 1 :]

    def step(self, seconds: float = 0.05) -> None:
        """One turn: everything that can move moves once."""
        self.now += seconds
        if self.up and not self.sender.connected and self.sender.active:
            self.connect()
        if self.sender.connected:
            for lane in self.sender.tick(self.now):
                self.cut_lane(lane)
            if self.sender.silent_s(self.now) > 1.0:
                self.cut_control()
        else:
            self.sender.tick(self.now)
        self.receiver.tick(self.now)
        self.receiver.flush_acks()
        while self.sender.outbox:
            self._enqueue(self.to_receiver, encode_frame(self.sender.outbox.popleft()))
        while self.receiver.outbox:
            _, frame = self.receiver.outbox.popleft()
            self._enqueue(self.to_sender, encode_frame(frame))
        if self.up:
            self._fill_lanes()
            self._deliver()
        if self._chance(self.faults.cut_lane):
            self.cut_lane(self.random.randrange(LANES))
        if self.sender.connected and self._chance(self.faults.cut_control):
            self.cut_control()
        self._events()

    def _enqueue(self, queue: deque[bytes], data: bytes) -> None:
        if not self.sender.connected:
            return
        queue.append(data)
        if self._chance(self.faults.double):
            queue.append(data)

    def _fill_lanes(self) -> None:
        for lane in self.random.sample(range(LANES), LANES):
            most = self.random.randrange(1, MOST_TOGETHER + 1)
            tasks = self.sender.next_chunks(self.now, lane, MAX_BATCH_BYTES // 2, most)
            if not tasks:
                continue
            source = self.sources[tasks[0].transfer]
            bodies = [source[t.region][t.start : t.start + t.size] for t in tasks]
            digests = [checksum([body]) for body in bodies]
            body = b"".join(bodies)
            data = self.sender.head(tasks, len(body), digests) + body
            if self._chance(self.faults.damage):
                data = self._damage(data, HEADER_BYTES)
            self.lanes[lane].append(data)
            if self._chance(self.faults.double):
                self.lanes[lane].append(data)
            self.sender.chunks_sent(self.now, tasks, digests, len(data))

    def _deliver(self) -> None:
        for lane in self.random.sample(range(LANES), LANES):
            if self.lanes[lane] and self.random.random() < 0.7:
                try:
                    self._deliver_bulk(lane, self.lanes[lane].popleft())
                except FrameError:
                    self.cut_lane(lane)
        for _ in range(self.random.randrange(4)):
            if self.to_receiver:
                data = self.to_receiver.popleft()
                try:
                    for frame in self._readers[0].feed(data):
                        self.receiver.on_frame(self.now, self.sender.incarnation, frame)
                except FrameError:
                    self.cut_control()
                    return
            if self.to_sender:
                data = self.to_sender.popleft()
                if self._chance(self.faults.damage_control):
                    data = self._damage(data, 0)
                try:
                    for frame in self._readers[1].feed(data):
                        self.sender.on_frame(self.now, frame)
                except FrameError:
                    self.cut_control()
                    return

    def _deliver_bulk(self, lane: int, data: bytes) -> None:
        header = decode_header(data[:HEADER_BYTES])
        at = HEADER_BYTES
        places: Sequence[Slot | int]
        if header.type is Type.BATCH:
            at += header.chunk * ROW_BYTES
            rows = decode_table(header, data[HEADER_BYTES:at])
            places = self.receiver.begin_batch(self.now, header, rows) or ()
        else:
            slot = self.receiver.begin_chunk(self.now, header)
            places = () if slot is None else (slot,)
        broken = self._chance(self.faults.cut_lane)
        end = (at + len(data)) // 2 if broken else len(data)
        slots: list[Slot] = []
        found: list[int | None] = []
        for place in places:
            if not isinstance(place, Slot):
                at += place
                continue
            body = data[at : at + place.size]
            arrived = data[at : min(at + place.size, end)]
            memory = self.reserved[place.handle][place.region]
            memory[place.start : place.start + len(arrived)] = arrived
            slots.append(place)
            found.append(None if broken else checksum([body]))
            at += place.size
        if slots:
            self.receiver.end_batch(self.now, slots, found)
        if broken:
            self.cut_lane(lane)

    def _events(self) -> None:
        while self.receiver.events:
            match self.receiver.events.popleft():
                case Offered() as event:
                    self._offers.append(event)
                case Withdrawn(handle=handle):
                    self._offers = deque(o for o in self._offers if o.handle != handle)
                case Verified() as event:
                    if self._chance(self.faults.reject):
                        self.receiver.reject(event.handle, "planned")
                    elif self.receiver.admit(event.handle):
                        assert event.key not in self.admitted, "admitted twice"
                        self.admitted[event.key] = self.reserved.pop(event.handle)
                case Aborted() as event:
                    self.reserved.pop(event.handle)
                    self.aborted.append(event.key)
        while self._offers and self.random.random() < 0.7:
            offer = self._offers.popleft()
            if self._chance(self.faults.refuse):
                self.receiver.refuse(offer.handle, "planned")
                continue
            sizes = {item.region: item.size_bytes for item in offer.manifest.regions}
            self.reserved[offer.handle] = {r: bytearray(size) for r, size in sizes.items()}
            if not self.receiver.grant(self.now, offer.handle):
                del self.reserved[offer.handle]
        while self.sender.events:
            match self.sender.events.popleft():
                case Granted(key=key):
                    self.granted.append(key)
                case Ended() as ended:
                    self.ended.setdefault(ended.key, []).append(ended)
                    del self.sources[ended.transfer]

    def run(self, seconds: float = 60.0) -> None:
        """Until nothing is active at either end."""
        until = self.now + seconds
        while self.now < until:
            self.step()
            if not self.sender.active and not self.receiver.active:
                return
        raise AssertionError(
            f"still active: {self.sender.active} sending, {self.receiver.active} receiving"
        )
