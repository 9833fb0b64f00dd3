"""The relay's data path, in the emulator process: read as the queue has room, deliver when due."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from harness.links.shape import FRAME_BYTES, SEGMENT_PAYLOAD_BYTES, LinkShape, Shape
from harness.links.timer import PreciseTimer, monotonic_s
from harness.links.wire import HANDLING_S, Wire

HOST = "127.0.0.1"
MOST_CHUNK_SEGMENTS = 45
LEAST_BUFFER_BYTES = 65_536
HEADER_BYTES = FRAME_BYTES - SEGMENT_PAYLOAD_BYTES


def wire_bytes(payload_bytes: int) -> int:
    """Frame bytes of a payload cut into full-size segments."""
    return payload_bytes + HEADER_BYTES * -(-payload_bytes // SEGMENT_PAYLOAD_BYTES)


@dataclass(slots=True, eq=False)
class _Flow:
    """One direction of one connection. `held_bytes` are in the relay: queue, wire, output."""

    source: socket.socket
    sink: socket.socket
    wire: Wire[_Chunk]
    connection: _Connection
    output: deque[memoryview] = field(default_factory=deque)
    held_bytes: int = 0
    reading: bool = False
    waiting: bool = False
    ended: bool = False
    finished: bool = False


@dataclass(slots=True)
class _Chunk:
    flow: _Flow
    payload: memoryview | None  # None: the source ended its stream


@dataclass(slots=True, eq=False)
class _Connection:
    flows: list[_Flow] = field(default_factory=list)
    closed: bool = False


class RelayEngine:
    """Runs in the emulator process: accepts, reads as the queue has room, delivers when due."""

    def __init__(
        self, shape: LinkShape, seed: int, publish: Callable[[tuple[Wire, Wire]], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = PreciseTimer(self._loop, self._service)
        self._publish = publish
        self.wires: tuple[Wire[_Chunk], Wire[_Chunk]] = (
            Wire(shape.forward, seed, HANDLING_S),
            Wire(shape.reverse, seed + 1, HANDLING_S),
        )
        self._shape = shape
        self._waiting: tuple[deque[_Flow], deque[_Flow]] = (deque(), deque())
        self._connections: set[_Connection] = set()
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def expose(self, side: int, host: str, port: int) -> int:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setblocking(False)
        # The sender must feel the link, not a deep buffer before it: about two BDP (Linux doubles).
        most = self._bdp_bytes() + LEAST_BUFFER_BYTES
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, most)
        listener.bind((HOST, 0))
        listener.listen(512)
        self._listeners.append(listener)
        self._spawn(self._accept(listener, side, (host, port)))
        return int(listener.getsockname()[1])

    def reshape(self, shape: LinkShape) -> None:
        now_s = monotonic_s()
        self._shape = shape
        for wire, new in zip(self.wires, (shape.forward, shape.reverse), strict=True):
            wire.reshape(now_s, new)
        self._service()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            self._abort(connection)
        self._timer.close()

    def _bdp_bytes(self) -> int:
        shape = self._shape
        return int(max(shape.forward.rate_bps, shape.reverse.rate_bps) / 8 * shape.rtt_s)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, side: int, target: tuple[str, int]) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listener)
            self._spawn(self._connect(client, side, target))

    async def _connect(self, client: socket.socket, side: int, target: tuple[str, int]) -> None:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server.setblocking(False)
        try:
            await self._loop.sock_connect(server, target)
        except OSError:
            server.close()
            _reset(client)
            return
        connection = _Connection()
        towards, back = self.wires if side == 1 else (self.wires[1], self.wires[0])
        connection.flows = [
            _Flow(client, server, towards, connection),
            _Flow(server, client, back, connection),
        ]
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(connection)
        for flow in connection.flows:
            self._resume(flow)

    def _resume(self, flow: _Flow) -> None:
        if not (flow.reading or flow.ended or flow.waiting or flow.connection.closed):
            flow.reading = True
            self._loop.add_reader(flow.source, self._readable, flow)

    def _pause(self, flow: _Flow) -> None:
        if flow.reading:
            flow.reading = False
            self._loop.remove_reader(flow.source)

    def _readable(self, flow: _Flow) -> None:
        self._read(flow, monotonic_s())
        self._rearm()

    def _read(self, flow: _Flow, now_s: float) -> None:
        """Read one chunk if the queue and the flow's own allowance have room; else wait for it."""
        wire = flow.wire
        wire.advance(now_s)
        room = wire.room_bytes()
        if wire.shape.down or (room < FRAME_BYTES and wire.backlog_bytes):
            self._pause(flow)
            if not flow.waiting:
                flow.waiting = True
                self._waiting[0 if wire is self.wires[0] else 1].append(flow)
            return
        if flow.held_bytes > 2 * self._bdp_bytes() + wire.shape.queue_bytes + LEAST_BUFFER_BYTES:
            # The receiver is slower than the link; delivery resumes this flow.
            self._pause(flow)
            return
        segments = max(1, min(_chunk_segments(wire.shape), room // FRAME_BYTES))
        try:
            data = flow.source.recv(segments * SEGMENT_PAYLOAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._abort(flow.connection)
            return
        if not data:
            flow.ended = True
            self._pause(flow)
            wire.offer(now_s, 0, 0, _Chunk(flow, None))
            return
        flow.held_bytes += len(data)
        packets = -(-len(data) // SEGMENT_PAYLOAD_BYTES)
        wire.offer(now_s, wire_bytes(len(data)), packets, _Chunk(flow, memoryview(data)))

    def _service(self) -> None:
        """Deliver what is due, let waiting flows read in turn, set the timer."""
        now_s = monotonic_s()
        for wire, waiting in zip(self.wires, self._waiting, strict=True):
            for chunk in wire.take_due(now_s):
                self._deliver(chunk)
            while waiting and not wire.shape.down and wire.room_bytes() >= FRAME_BYTES:
                flow = waiting.popleft()
                flow.waiting = False
                if not flow.connection.closed:
                    self._read(flow, now_s)
                    self._resume(flow)
        self._rearm()

    def _rearm(self) -> None:
        times = [wire.next_s() for wire in self.wires]
        for wire, waiting in zip(self.wires, self._waiting, strict=True):
            if waiting and not wire.shape.down:
                times.append(wire.next_departure_s())
        self._timer.arm(min((at_s for at_s in times if at_s is not None), default=None))
        self._publish(self.wires)

    def _deliver(self, chunk: _Chunk) -> None:
        flow = chunk.flow
        if flow.connection.closed:
            return
        if chunk.payload is None:
            flow.finished = True
        else:
            flow.output.append(chunk.payload)
        if len(flow.output) <= 1:
            self._flush(flow)

    def _flush(self, flow: _Flow) -> None:
        output = flow.output
        try:
            while output:
                sent = flow.sink.send(output[0])
                flow.held_bytes -= sent
                if sent < len(output[0]):
                    output[0] = output[0][sent:]
                    continue
                output.popleft()
        except BlockingIOError:
            self._loop.add_writer(flow.sink, self._writable, flow)
            return
        except OSError:
            self._abort(flow.connection)
            return
        self._resume(flow)
        if flow.finished:
            with contextlib.suppress(OSError):
                flow.sink.shutdown(socket.SHUT_WR)
            if all(other.finished and not other.output for other in flow.connection.flows):
                self._close(flow.connection)

    def _writable(self, flow: _Flow) -> None:
        self._loop.remove_writer(flow.sink)
        self._flush(flow)
        self._rearm()

    def _close(self, connection: _Connection) -> None:
        connection.closed = True
        self._connections.discard(connection)
        for flow in connection.flows:
            self._loop.remove_reader(flow.source)
            self._loop.remove_writer(flow.sink)
        for flow in connection.flows:
            flow.source.close()
            flow.output.clear()

    def _abort(self, connection: _Connection) -> None:
        """One end reset or vanished: the other must see a reset, not a clean end."""
        if not connection.closed:
            for flow in connection.flows:
                _linger_zero(flow.source)
            self._close(connection)


def _chunk_segments(shape: Shape) -> int:
    """Segments read at a time: 0.5 ms of the rate, 1 to 45 (64 KiB)."""
    return max(1, min(MOST_CHUNK_SEGMENTS, int(shape.rate_bps / 8 * 5e-4 / FRAME_BYTES)))


def _linger_zero(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _reset(end: socket.socket) -> None:
    _linger_zero(end)
    end.close()
