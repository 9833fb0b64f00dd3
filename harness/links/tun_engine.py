"""The TUN emulator's data path, in a process of its own; TCP is end to end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable

from harness.links.netlink import call_in_namespace
from harness.links.probe import TUNSETIFF, tun_request
from harness.links.segments import can_cut, cut, frame_bytes, segment_count, surviving_runs
from harness.links.shape import LinkShape, LossProcess
from harness.links.timer import PreciseTimer, monotonic_s
from harness.links.wire import HANDLING_S, Wire

_TUNSETOFFLOAD = 0x400454D0
_OFFLOAD_CHECKSUM, _OFFLOAD_TSO4 = 0x1, 0x2
_READ_BYTES = 66_000
#: Packets read from one device before the other and the timer get their turn.
_BATCH = 32


class TunEngine:
    """Reads packets of one side, loses, queues, paces and delays them, writes them to the other."""

    def __init__(
        self,
        shape: LinkShape,
        seed: int,
        publish: Callable[[tuple[Wire, Wire]], None],
        devices: list[tuple[str, str]],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = PreciseTimer(self._loop, self._service)
        self._publish = publish
        self.wires: tuple[Wire[bytes], Wire[bytes]] = (
            Wire(shape.forward, seed, HANDLING_S),
            Wire(shape.reverse, seed + 1, HANDLING_S),
        )
        self._losses = [
            LossProcess(shape.forward.loss, seed + 2),
            LossProcess(shape.reverse.loss, seed + 3),
        ]
        self._fds = [_open_device(path, name) for path, name in devices]
        for index, fd in enumerate(self._fds):
            self._loop.add_reader(fd, self._readable, index)

    async def expose(self, side: int, host: str, port: int) -> int:
        raise NotImplementedError("a TUN link needs no forwarded ports")

    def reshape(self, shape: LinkShape) -> None:
        now_s = monotonic_s()
        for index, new in enumerate((shape.forward, shape.reverse)):
            self.wires[index].reshape(now_s, new)
            self._losses[index].model = new.loss
        self._service()

    def close(self) -> None:
        for fd in self._fds:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._timer.close()

    def _readable(self, index: int) -> None:
        fd, wire = self._fds[index], self.wires[index]
        for _ in range(_BATCH):
            try:
                packet = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                break
            self._take(index, wire, packet)
        self._service()

    def _take(self, index: int, wire: Wire[bytes], packet: bytes) -> None:
        segments = segment_count(packet)
        now_s = monotonic_s()
        wire.advance(now_s)
        if wire.shape.down:
            wire.dropped_packets += segments
            return
        lost = self._losses[index].lost(segments)
        size = frame_bytes(packet, segments)
        if wire.backlog_bytes and size > wire.room_bytes():
            # Drop-tail, segment by segment: those beyond the room are lost.
            fitting = max(0, wire.room_bytes() * segments // size)
            lost = sorted({*lost, *range(fitting, segments)})
        if not lost:
            wire.offer(now_s, size, segments, packet)
            return
        wire.dropped_packets += len(lost)
        if not can_cut(packet):
            return
        for run in surviving_runs(segments, lost):
            piece = cut(packet, run, segments)
            count = run[1] - run[0]
            wire.offer(now_s, frame_bytes(piece, count), count, piece)

    def _service(self) -> None:
        now_s = monotonic_s()
        for wire, out in zip(self.wires, reversed(self._fds), strict=True):
            for packet in wire.take_due(now_s):
                # A device that is down or full drops, as a real port would.
                with contextlib.suppress(OSError):
                    os.write(out, packet)
        times = [at_s for wire in self.wires if (at_s := wire.next_s()) is not None]
        self._timer.arm(min(times, default=None))
        self._publish(self.wires)


def _open_device(namespace_path: str, name: str) -> int:
    def open_there() -> int:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, TUNSETIFF, tun_request(name))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM | _OFFLOAD_TSO4)
        return fd

    return call_in_namespace(namespace_path, open_there)
