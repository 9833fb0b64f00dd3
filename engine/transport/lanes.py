"""Threads of the data plane: one blocking thread a data connection, bytes go straight between the
socket and the arena. Interpreter work per chunk is a few tens of microseconds; hashing and system
calls run without the interpreter lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.transport.arena import SharedArena
from engine.transport.codec import RAW, decode_into, encode_views, wire_bytes
from engine.transport.errors import FrameError
from engine.transport.frames import (
    HEADER_BYTES,
    MAX_CHUNK_BYTES,
    Type,
    checksum,
    decode_header,
    encode_header,
)
from engine.transport.incoming import Handle
from engine.transport.messages import Manifest
from engine.transport.outgoing import ChunkTask
from engine.transport.receiver import Receiver
from engine.transport.regions import Range, RangeList, Region
from engine.transport.sender import Sender
from engine.transport.sockets import receive_views, send_views, sever
from engine.transport.tls import Stream

#: Small chunks are sent together, up to so many bytes and chunks at a time.
BATCH_BYTES = 1 << 20
BATCH_CHUNKS = 32


@dataclass(slots=True)
class Source:
    """What an outgoing transfer reads from."""

    ranges: dict[Region, RangeList]
    manifest: Manifest


@dataclass(slots=True)
class SendState:
    """Shared by a session's lanes and the plane's loop; everything under `changed`'s lock.

    epoch: raised at every connect and disconnect of the control connection; a lane belongs to one.
    """

    sender: Sender
    changed: threading.Condition = field(default_factory=threading.Condition)
    sources: dict[int, Source] = field(default_factory=dict)
    epoch: int = 0
    closed: bool = False


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
                    state.changed.notify_all()
            sock.close()

    def _pump(self, sock: Stream, epoch: int) -> None:
        state = self._state
        sender = state.sender
        sent: list[tuple[ChunkTask, int, int]] = []
        while True:
            with state.changed:
                now = time.monotonic()
                for task, digest, wire_bytes in sent:
                    sender.chunk_sent(now, task, digest, wire_bytes)
                if sender.events or sender.outbox:
                    self._wake()
                while True:
                    if state.epoch != epoch or state.closed:
                        return
                    # Small chunks share a system call at each end.
                    tasks = sender.next_chunks(
                        time.monotonic(), self.lane, BATCH_BYTES, BATCH_CHUNKS
                    )
                    if tasks:
                        break
                    state.changed.wait()
                bodies = [self._body(task) for task in tasks]
            sent = []
            try:
                pieces: list[memoryview | bytes] = []
                for position, (task, (codec, ranges)) in enumerate(zip(tasks, bodies, strict=True)):
                    views = encode_views(codec, self._arena.views(ranges))
                    body_bytes = sum(len(view) for view in views)
                    digest = checksum(views)
                    follows = position + 1 < len(tasks)
                    header = sender.data_header(task, body_bytes, digest, follows)
                    pieces += [encode_header(header), *views]
                    sent.append((task, digest, HEADER_BYTES + body_bytes))
                send_views(sock, pieces)
            except BaseException:
                # Whatever of them left may have arrived, so what was hashed must be known.
                digests = {(task.transfer, task.number): digest for task, digest, _ in sent}
                with state.changed:
                    for task in tasks:
                        known = digests.get((task.transfer, task.number))
                        sender.chunk_sent(time.monotonic(), task, known, 0)
                    self._wake()
                raise

    def _body(self, task: ChunkTask) -> tuple[str, list[Range]]:
        """(codec, arena ranges) of a chunk. Needs the lock."""
        source = self._state.sources[task.transfer]
        ranges = source.ranges[task.region].slice(task.start, task.size)
        return source.manifest.codecs.get(task.region.kind, RAW), ranges

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
    receiver = state.receiver
    header_buffer = bytearray(HEADER_BYTES)
    header_views = [memoryview(header_buffer)]
    scratch: memoryview | None = None
    read_ahead = False
    while True:
        if not read_ahead:
            receive_views(sock, header_views)
        header = decode_header(header_buffer)
        if header.type is not Type.DATA or header.source != source:
            raise FrameError(f"{header.type.name} of {header.source:x} on a data connection")
        read_ahead = header.follows
        behind = header_views if read_ahead else []
        with state.lock:
            slot = receiver.begin_chunk(time.monotonic(), header)
            destination = None if slot is None else state.destinations[slot.handle]
        if slot is None or destination is None:
            scratch = scratch or memoryview(bytearray(MAX_CHUNK_BYTES))
            receive_views(sock, [scratch[: header.body_bytes], *behind])
            continue
        manifest, regions = destination
        codec = manifest.codecs.get(slot.region.kind, RAW)
        views = arena.views(regions[slot.region].slice(slot.start, slot.size))
        arrived: int | None = None
        try:
            if codec == RAW:
                receive_views(sock, [*views, *behind])
                arrived = checksum(views)
            else:
                scratch = scratch or memoryview(bytearray(MAX_CHUNK_BYTES))
                body = scratch[: header.body_bytes]
                receive_views(sock, [body, *behind])
                arrived = checksum([body])
                if arrived == header.checksum:
                    decode_into(codec, body, views)
        finally:
            with state.lock:
                receiver.end_chunk(time.monotonic(), slot, arrived)
                due = receiver.wants_service
            if due:
                wake()


def wire_size(manifest: Manifest, kind: int, size: int) -> int:
    """Bytes of a chunk on the wire under the manifest's codecs."""
    if not manifest.codecs:
        return size
    return wire_bytes(next((c for k, c in manifest.codecs.items() if k == kind), RAW), size)
