"""Threads of the data plane: one blocking thread a data connection, bytes go straight between the
socket and the arena.

All threads of a plane share one interpreter lock, so what a small chunk costs is interpreter work
and taking that lock: chunks that are ready together take locks, system calls and a frame together.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.transport.arena import SharedArena
from engine.transport.codec import RAW, decode_into, encode_views, wire_bytes
from engine.transport.errors import FrameError
from engine.transport.frames import (
    BULK,
    HEADER_BYTES,
    MAX_BATCH,
    MAX_CHUNK_BYTES,
    ROW_BYTES,
    Type,
    checksum,
    decode_header,
    decode_table,
)
from engine.transport.incoming import Handle, Slot
from engine.transport.messages import Manifest
from engine.transport.outgoing import ChunkTask
from engine.transport.receiver import Receiver
from engine.transport.regions import RangeList, Region
from engine.transport.sender import Sender
from engine.transport.sockets import receive_views, send_views, sever
from engine.transport.tls import Stream

#: Small chunks are sent together, up to so many bytes and chunks at a time.
BATCH_BYTES = 1 << 20
BATCH_CHUNKS = MAX_BATCH


@dataclass(slots=True)
class Source:
    """What an outgoing transfer reads from."""

    ranges: dict[Region, RangeList]
    manifest: Manifest


@dataclass(slots=True)
class SendState:
    """Shared by a session's lanes and the plane's loop; everything under `changed`'s lock.

    changed: lanes without a connection wait here. work: those with one wait here for chunks, under
    the same lock; apart, so that one that wakes can take them. epoch: raised at every connect and
    disconnect of the control connection; a lane belongs to one.
    """

    sender: Sender
    changed: threading.Condition = field(init=False)
    work: threading.Condition = field(init=False)
    sources: dict[int, Source] = field(default_factory=dict)
    epoch: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.work = threading.Condition(lock)

    def wake_all(self) -> None:
        """Every lane looks at what has changed. Needs the lock."""
        self.changed.notify_all()
        self.work.notify_all()


class SendLane(threading.Thread):
    """Dials, sends chunks until something breaks, and dials again while there is work."""

    def __init__(
        self,
        lane: int,
        state: SendState,
        arena: SharedArena,
        connect: Callable[[int], Stream],
        wake: Callable[[], None],
        redial_s: float,
    ) -> None:
        super().__init__(name=f"send-lane-{lane}", daemon=True)
        self.lane = lane
        self.socket: Stream | None = None
        self._state = state
        self._arena = arena
        self._connect = connect
        self._wake = wake
        self._redial_s = redial_s

    def run(self) -> None:
        state = self._state
        while True:
            with state.changed:
                while not (state.sender.connected and state.sender.active):
                    if state.closed:
                        return
                    state.changed.wait()
                epoch = state.epoch
            try:
                # The lane's number on the wire is of this epoch only.
                sock = self._connect(self.lane)
            except (OSError, FrameError):
                time.sleep(self._redial_s)
                continue
            with state.changed:
                stale = state.epoch != epoch
                self.socket = None if stale else sock
            if not stale:
                with contextlib.suppress(OSError, FrameError):
                    self._pump(sock, epoch)
            with state.changed:
                self.socket = None
                if not stale:
                    state.sender.lane_down(time.monotonic(), self.lane)
                    state.wake_all()
            sock.close()

    def _pump(self, sock: Stream, epoch: int) -> None:
        state = self._state
        sender = state.sender
        tasks: list[ChunkTask] = []
        digests: list[int] = []
        wire_bytes = 0
        while True:
            with state.changed:
                now = time.monotonic()
                if tasks:
                    sender.chunks_sent(now, tasks, digests, wire_bytes)
                if sender.events or sender.outbox:
                    self._wake()
                while True:
                    if state.epoch != epoch or state.closed:
                        return
                    tasks = sender.next_chunks(now, self.lane, BATCH_BYTES, BATCH_CHUNKS)
                    if tasks:
                        break
                    state.work.wait()
                    now = time.monotonic()
                if sender.has_ready:
                    state.work.notify()  # each lane wakes one more: none wakes for nothing
                source = state.sources[tasks[0].transfer]
                bodies = [self._body(source, task) for task in tasks]
            digests = []
            try:
                views = [encode_views(codec, self._arena.views(ranges)) for codec, ranges in bodies]
                digests += [checksum(body) for body in views]
                pieces = [view for body in views for view in body]
                size = sum(map(len, pieces))
                head = sender.head(tasks, size, digests)
                wire_bytes = len(head) + size
                send_views(sock, [head, *pieces])
            except BaseException:
                # Whatever of them left may have arrived, so what was hashed must be known.
                unread = [None] * (len(tasks) - len(digests))
                with state.changed:
                    sender.chunks_sent(time.monotonic(), tasks, [*digests, *unread], 0)
                    self._wake()
                raise

    def _body(self, source: Source, task: ChunkTask) -> tuple[str, list[tuple[int, int]]]:
        """(codec, arena ranges) of a chunk. Needs the lock."""
        ranges = source.ranges[task.region].slice(task.start, task.size)
        codecs = source.manifest.codecs
        return codecs.get(task.region.kind, RAW) if codecs else RAW, ranges

    def drop(self) -> None:
        """Break the connection (from another thread); the lane dials again. Needs the lock."""
        if self.socket is not None:
            sever(self.socket)


@dataclass(slots=True)
class ReceiveState:
    """Shared by all receive lanes and the plane's loop; everything under `lock`."""

    receiver: Receiver
    lock: threading.Lock = field(default_factory=threading.Lock)
    destinations: dict[Handle, tuple[Manifest, dict[Region, RangeList]]] = field(
        default_factory=dict
    )


def receive_lane(
    sock: Stream,
    source: int,
    state: ReceiveState,
    arena: SharedArena,
    wake: Callable[[], None],
) -> None:
    """Serve one accepted data connection until it ends. Raises OSError, FrameError."""
    landing = _Landing(sock, state, arena, wake)
    buffer = bytearray(HEADER_BYTES + MAX_BATCH * ROW_BYTES)
    header_view = memoryview(buffer)[:HEADER_BYTES]
    while True:
        receive_views(sock, [header_view])
        header = decode_header(header_view)
        if header.type not in BULK or header.source != source:
            raise FrameError(f"{header.type.name} of {header.source:x} on a data connection")
        if header.type is Type.DATA:
            with state.lock:
                slot = state.receiver.begin_chunk(time.monotonic(), header)
            landing.take(None if slot is None else [slot], header.body_bytes)
            continue
        table = memoryview(buffer)[HEADER_BYTES : HEADER_BYTES + header.chunk * ROW_BYTES]
        receive_views(sock, [table])
        rows = decode_table(header, table)
        with state.lock:
            places = state.receiver.begin_batch(time.monotonic(), header, rows)
        landing.take(places, header.body_bytes - len(table))


class _Landing:
    """Puts bodies of one connection where they belong."""

    def __init__(
        self, sock: Stream, state: ReceiveState, arena: SharedArena, wake: Callable[[], None]
    ) -> None:
        self._sock = sock
        self._state = state
        self._arena = arena
        self._wake = wake
        self._scratch: memoryview | None = None

    def take(self, places: Sequence[Slot | int] | None, total_bytes: int) -> None:
        """Read `total_bytes` of bodies: into their slots' memory, or away (a number of bytes, or
        all of them where there are no places)."""
        slots = [place for place in places or () if isinstance(place, Slot)]
        if not slots:
            receive_views(self._sock, [self._room(0, total_bytes)])
            return
        arrived: list[int | None] = [None] * len(slots)
        try:
            bodies, pieces = self._laid(places or (), slots[0].handle)
            receive_views(self._sock, pieces)
            for index, (codec, body, memory) in enumerate(bodies):
                found = checksum(body)
                if codec != RAW and found == slots[index].checksum:
                    decode_into(codec, body[0], memory)
                arrived[index] = found
        finally:
            with self._state.lock:
                self._state.receiver.end_batch(time.monotonic(), slots, arrived)
                due = self._state.receiver.wants_service
            if due:
                self._wake()

    def _laid(
        self, places: Sequence[Slot | int], handle: Handle
    ) -> tuple[list[tuple[str, list[memoryview], list[memoryview]]], list[memoryview]]:
        """(codec, where the body is read to, where its bytes belong) of each slot; and what to
        read, in order."""
        # A chunk that is being written keeps its transfer's destinations where they are.
        manifest, regions = self._state.destinations[handle]
        bodies: list[tuple[str, list[memoryview], list[memoryview]]] = []
        pieces: list[memoryview] = []
        at = 0
        for place in places:
            if not isinstance(place, Slot):
                pieces.append(self._room(at, place))
                at += place
                continue
            memory = self._arena.views(regions[place.region].slice(place.start, place.size))
            body, codec = memory, RAW
            if manifest.codecs:
                codec = manifest.codecs.get(place.region.kind, RAW)
                if codec != RAW:
                    body = [self._room(at, place.wire_bytes)]
                    at += place.wire_bytes
            bodies.append((codec, body, memory))
            pieces += body
        return bodies, pieces

    def _room(self, at: int, size: int) -> memoryview:
        """Memory for bytes that do not go to the arena as they come."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(MAX_CHUNK_BYTES))
        return self._scratch[at : at + size]


def wire_size(manifest: Manifest, kind: int, size: int) -> int:
    """Bytes of a chunk on the wire under the manifest's codecs."""
    if not manifest.codecs:
        return size
    return wire_bytes(next((c for k, c in manifest.codecs.items() if k == kind), RAW), size)
