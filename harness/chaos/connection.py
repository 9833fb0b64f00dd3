"""Who answers at an address, and connections between planes as both of their ends know them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from engine.transport.frames import FrameReader
from harness.chaos.wire import Stream, Wire

if TYPE_CHECKING:
    from harness.chaos.plane import VirtualPlane
    from harness.chaos.sending import Session


class Switch:
    """Which plane answers at an address now, and the wires between clusters."""

    def __init__(self, wires: Mapping[tuple[str, str], Wire], violate: Callable[[str], None]):
        self.planes: dict[str, VirtualPlane] = {}
        self.wires = wires
        self.violate = violate
        self.connections: list[Connection] = []
        self._incarnations = 0

    def incarnation(self) -> int:
        """Unique in the campaign, and the same in every replay."""
        self._incarnations += 1
        return self._incarnations

    def cut_crossing(self) -> None:
        """Every connection between clusters breaks."""
        for connection in list(self.connections):
            if connection.client.plane.cluster != connection.server.cluster:
                connection.control_up.cut()

    @property
    def flying(self) -> int:
        return sum(
            stream.flying for connection in self.connections for stream in connection.streams()
        )


class Connection:
    """A control connection and the lanes that came with it, as both ends know them.

    While the wire is down an end that closes is not heard of by the other, which goes on sending
    into the void until its own deadlines tell it.
    """

    def __init__(self, client: Session, server: VirtualPlane) -> None:
        self.client = client
        self.server = server
        wires = client.plane.switch.wires
        here, there = client.plane.cluster, server.cluster
        self.wire_up, self.wire_down = wires[here, there], wires[there, here]
        self.control_up = Stream(self.wire_up, self._broken)
        self.control_down = Stream(self.wire_down, self._broken)
        self.reader_up, self.reader_down = FrameReader(), FrameReader()
        self.lanes: dict[int, Stream] = {}
        self.client_open = self.server_open = True
        self.heard_s = asyncio.get_running_loop().time()

    def streams(self) -> list[Stream]:
        return [self.control_up, self.control_down, *self.lanes.values()]

    def _broken(self) -> None:
        self.close_client("connection reset")
        self.close_server()

    def close_client(self, why: str) -> None:
        if not self.client_open:
            return
        self.client_open = False
        self._cut()
        self.client.disconnected(self, why)
        if self.wire_up.up:
            self.close_server()
        self._forget()

    def close_server(self) -> None:
        if not self.server_open:
            return
        self.server_open = False
        self._cut()
        self.server.peer_closed(self)
        if self.wire_up.up:
            self.close_client("closed by the peer")
        self._forget()

    def _cut(self) -> None:
        for control in (self.control_up, self.control_down):
            control.on_cut = _nothing
            control.cut()
        for lane in list(self.lanes.values()):
            lane.cut()

    def _forget(self) -> None:
        if not (self.client_open or self.server_open):
            connections = self.client.plane.switch.connections
            if self in connections:
                connections.remove(self)


def _nothing() -> None: ...
