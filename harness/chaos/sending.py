"""The sending side of one peer: dialling, lanes, and chunks on their way out.

What it does with time, connections and lanes follows `engine.transport.outbound`; all decisions are
`Sender`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.transport.frames import checksum
from engine.transport.messages import Key, Manifest
from engine.transport.outbound import Peer
from engine.transport.outgoing import ChunkTask
from engine.transport.regions import RangeList, Region
from engine.transport.sender import Sender
from harness.chaos.connection import Connection
from harness.chaos.wire import GAP_S, Stream, Wire

if TYPE_CHECKING:
    from harness.chaos.plane import VirtualPlane

LANES = 3


@dataclass(slots=True, eq=False)
class Lane:
    """A data connection's sending end; `task` is being read from memory."""

    number: int
    stream: Stream | None = None
    task: ChunkTask | None = None


@dataclass(slots=True, eq=False)
class Session:
    """The sending side of one peer."""

    plane: VirtualPlane
    peer: Peer
    sender: Sender
    used_s: float
    sources: dict[int, dict[Region, RangeList]] = field(default_factory=dict)
    connection: Connection | None = None
    lanes: list[Lane] = field(default_factory=lambda: [Lane(n) for n in range(LANES)])
    dialling: bool = False
    dial_after_s: float = 0.0

    # --- transfers ---------------------------------------------------------------------------

    def open(self, key: Key, manifest: Manifest) -> int:
        self.used_s = self.plane.now
        transfer = self.sender.open(self.used_s, key, manifest)
        self.sources[transfer] = {item.region: RangeList() for item in manifest.regions}
        return transfer

    def push(self, transfer: int, pieces: Iterable[tuple[int, Sequence[int]]]) -> None:
        source = self.sources.get(transfer)
        if source is None:
            return  # it has ended
        regions = list(source)
        for position, numbers in pieces:
            region = regions[position]
            source[region].extend(zip(numbers[::2], numbers[1::2], strict=True))
            self.sender.push(transfer, region, sum(numbers[1::2]))

    def announce(self) -> None:
        """The plane looks at every session when the worker has spoken."""

    def commit(self, transfer: int, first_token: int, meta: dict) -> None:
        self.sender.commit(self.plane.now, transfer, first_token, meta)

    def cancel(self, transfer: int) -> None:
        self.sender.cancel(self.plane.now, transfer)

    # --- connections -------------------------------------------------------------------------

    def disconnected(self, connection: Connection, why: str) -> None:
        if self.connection is not connection:
            return
        now = self.plane.now
        self.connection = None
        self.dial_after_s = now + self.plane.settings.deadlines.redial_s
        self.sender.trouble = why
        self.sender.on_disconnected(now)
        self.plane.wake()

    def dial(self) -> None:
        """One round trip, or the handshake's deadline where nothing comes back."""
        plane = self.plane
        self.dialling = True
        target = plane.switch.planes.get(self.peer.host)
        wire = plane.switch.wires[plane.cluster, plane.switch_cluster(self.peer.host)]
        deadline_s = plane.settings.deadlines.handshake_s
        reachable = wire.up and target is not None
        wait_s = 2 * wire.delay_s + 0.0005 if reachable or wire.up else deadline_s
        plane.loop.call_later(wait_s, self._dialled, wire)

    def _dialled(self, wire: Wire) -> None:
        plane = self.plane
        self.dialling = False
        if plane.dead:
            return
        now = plane.now
        self.dial_after_s = now + plane.settings.deadlines.redial_s
        target = plane.switch.planes.get(self.peer.host)
        if target is None or not wire.up or not target.worker_alive():
            self.sender.trouble = f"{self.peer.host} does not answer"
        elif (why_not := target.why_not_greeted(self)) is not None:
            self.sender.fail_all(now, why_not.text, why_not.retryable, refused=True)
        else:
            self.connection = connection = Connection(self, target)
            plane.switch.connections.append(connection)
            target.accept(self.sender.incarnation, connection)
            self.sender.on_connected(now, target.settings.incarnation)
            for lane in self.lanes:
                plane.loop.call_later(2 * wire.delay_s, self.open_lane, lane, connection)
        plane.wake()

    # --- lanes -------------------------------------------------------------------------------

    def open_lane(self, lane: Lane, connection: Connection) -> None:
        if self.connection is not connection or lane.stream is not None:
            return
        if not (connection.server_open and connection.wire_up.up):
            again_s = self.plane.settings.deadlines.redial_s
            self.plane.loop.call_later(again_s, self.open_lane, lane, connection)
            return

        def cut() -> None:
            connection.server.landing.writing_ended(stream)
            self._lane_cut(lane, connection)

        stream = Stream(connection.wire_up, cut, GAP_S)
        lane.stream = connection.lanes[lane.number] = stream
        self.pump(lane)

    def _lane_cut(self, lane: Lane, connection: Connection) -> None:
        now, task = self.plane.now, lane.task
        lane.stream = lane.task = None
        if task is not None:
            self.sender.chunk_sent(now, task, None, 0)
        self.sender.lane_down(now, lane.number)
        again_s = self.plane.settings.deadlines.redial_s
        self.plane.loop.call_later(again_s, self.open_lane, lane, connection)
        self.plane.wake()

    def pump(self, lane: Lane) -> None:
        """Give the lane its next chunk, if it is idle and there is one."""
        connection, stream = self.connection, lane.stream
        if connection is None or stream is None or lane.task is not None:
            return
        task = self.sender.next_chunk(self.plane.now, lane.number)
        if task is None:
            return
        ranges = self.sources[task.transfer][task.region].slice(task.start, task.size)
        views = self.plane.arena.views(ranges)
        body = b"".join(views)
        digest = checksum([body])
        data = self.sender.head([task], len(body), [digest]) + body
        lane.task = task

        def sent() -> None:
            lane.task = None
            if b"".join(views) != body:
                self.plane.switch.violate(
                    f"source memory: chunk {task.number} of {task.transfer} changed under its lane"
                )
            now = self.plane.now
            self.sender.chunk_sent(now, task, digest, len(data))
            self.sender.lane_moved(now, lane.number)
            self.plane.wake()
            self.pump(lane)

        server = connection.server
        stream.send(data, lambda arrived: server.on_data(connection, stream, arrived), sent)
