"""A data plane without process, threads or sockets: the protocol's own state machines, on wires.

Stands between the worker's real `DataPlane` face (whose messages it answers as the plane process
does) and `wire`. What it does with time, connections and lanes follows `engine.transport.plane`,
`outbound` and `inbound`; all decisions are `Sender`'s and `Receiver`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.transport.callbacks import Callbacks
from engine.transport.client import DataPlane
from engine.transport.errors import FrameError, PlaneLost
from engine.transport.frames import (
    HEADER_BYTES,
    Frame,
    FrameReader,
    Type,
    checksum,
    control_frame,
    decode_header,
    encode_frame,
    encode_header,
)
from engine.transport.inbound import Inbound
from engine.transport.incoming import (
    Aborted,
    Denied,
    Handle,
    Offered,
    ReceiverEvent,
    Slot,
    Verified,
    Withdrawn,
)
from engine.transport.ipc import Message
from engine.transport.messages import Hello, Key, Manifest, Reason
from engine.transport.outbound import Peer
from engine.transport.outgoing import ChunkTask, Ended, Granted, SenderEvent
from engine.transport.receiver import Receiver
from engine.transport.regions import Kind, RangeList, Region
from engine.transport.sender import Sender
from engine.transport.settings import Settings
from harness.chaos.wire import GAP_S, Stream, Wire

LANES = 3
#: Between a worker and its plane.
IPC_S = 0.0002
TICK_S = 0.1
WRITE_S = 0.004
IDLE_SESSION_S = 1.0


class Arena:
    """Memory of one worker (`engine.transport.arena.SharedArena` without a descriptor)."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.buffer = memoryview(bytearray(size_bytes))

    def views(self, ranges: Any) -> list[memoryview]:
        buffer = self.buffer
        return [buffer[offset : offset + length] for offset, length in ranges]


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
            connection.server.writing_ended(stream)
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
        data = encode_header(self.sender.data_header(task, len(body), digest)) + body
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


class VirtualPlane(DataPlane):
    """`dead`: the process is gone. While `frozen` its worker is stopped, which it notices."""

    def __init__(
        self,
        switch: Switch,
        host: str,
        cluster: str,
        arena: Any,
        settings: Settings,
        callbacks: Callbacks,
    ) -> None:
        process: Any = None
        super().__init__(process, process, arena, settings, callbacks)
        self.port = 1
        self.loop = asyncio.get_running_loop()
        self.switch = switch
        self.host = host
        self.cluster = cluster
        self.dead = False
        self.receiver = Receiver(settings.incarnation, settings.deadlines, settings.limits)
        self.sessions: dict[Peer, Session] = {}
        self.wire_bytes = 0
        self._frozen_s: float | None = None
        self._held: list[Message] = []
        self._peers: dict[int, Connection] = {}
        self._destinations: dict[Handle, dict[Region, RangeList]] = {}
        self._writing: dict[Stream, Slot] = {}
        self._by_worker: dict[int, tuple[Session, int]] = {}
        self._by_session: dict[tuple[Peer, int], int] = {}
        self._offers: dict[Handle, Manifest] = {}
        self._woken = False
        self._tick: asyncio.TimerHandle | None = None
        switch.planes[host] = self

    @property
    def now(self) -> float:
        return self.loop.time()

    def switch_cluster(self, host: str) -> str:
        """Where an address stands, whether or not anybody answers there."""
        return host.rpartition("-")[0]

    # --- the worker's end --------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        if self.closed.done():
            raise PlaneLost("the data plane has ended")
        self.loop.call_later(IPC_S, self._hear, message)

    def _hear(self, message: Message) -> None:
        if not self.dead:
            getattr(self, f"_op_{message['op']}")(message)
            self.wake()

    def _report(self, message: Message) -> None:
        if self._frozen_s is not None:
            self._held.append(message)
        else:
            self.loop.call_later(IPC_S, self._deliver, message)

    def _deliver(self, message: Message) -> None:
        if self._frozen_s is not None:
            self._held.append(message)
        elif not self.dead:
            self._on_message(message)

    async def close(self) -> None:
        self.die("the data plane was closed")

    def die(self, why: str) -> None:
        """The process is gone with its connections; the worker's side hears that it is lost."""
        if self.dead:
            return
        self.dead = True
        if self.switch.planes.get(self.host) is self:
            del self.switch.planes[self.host]
        if self._tick is not None:
            self._tick.cancel()
        for session in self.sessions.values():
            if session.connection is not None:
                session.connection.close_client(why)
        for connection in list(self._peers.values()):
            connection.close_server()
        self._lost(why)

    def freeze(self) -> None:
        self._frozen_s = self.now

    def thaw(self) -> None:
        self._frozen_s = None
        held, self._held = self._held, []
        for message in held:
            self._report(message)
        self.wake()

    def worker_alive(self) -> bool:
        silence_s = self.settings.deadlines.worker_silence_s
        return self._frozen_s is None or self.now - self._frozen_s < silence_s

    # --- the loop ----------------------------------------------------------------------------

    def wake(self) -> None:
        if not self._woken and not self.dead:
            self._woken = True
            self.loop.call_soon(self._service)

    def _service(self) -> None:
        self._woken = False
        if self.dead:
            return
        now, alive = self.now, self.worker_alive()
        self._serve_receiver(now, alive)
        for peer, session in list(self.sessions.items()):
            sender = session.sender
            if sender.active or sender.outbox or sender.events:
                self._serve_session(now, alive, session)
            if not sender.active and not session.dialling and now - session.used_s > IDLE_SESSION_S:
                if session.connection is not None:
                    session.connection.close_client("idle")
                del self.sessions[peer]
        if self._tick is None and (self.sessions or self.receiver.active or self._peers):
            self._tick = self.loop.call_later(TICK_S, self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self._service()

    def _serve_receiver(self, now: float, alive: bool) -> None:
        receiver = self.receiver
        receiver.tick(now)
        receiver.flush_acks()
        if alive:
            while receiver.outbox:
                source, frame = receiver.outbox.popleft()
                connection = self._peers.get(source)
                if connection is not None:
                    self._send_control(connection, frame, up=False)
        while receiver.events:
            self._on_receiver_event(receiver.events.popleft())
        for connection in list(self._peers.values()):
            if now - connection.heard_s > self.settings.deadlines.give_up_s:
                connection.close_server()

    def _serve_session(self, now: float, alive: bool, session: Session) -> None:
        sender = session.sender
        if alive:
            for number in sender.tick(now):
                stream = session.lanes[number].stream
                if stream is not None:
                    stream.cut()
        silent = sender.silent_s(now) > self.settings.deadlines.peer_silence_s
        if session.connection is not None and silent and sender.active:
            session.connection.close_client("the peer is silent")
        dial_due = now >= session.dial_after_s
        if session.connection is None and not session.dialling and sender.active and dial_due:
            session.dial()
        if session.connection is not None:
            while sender.outbox:
                self._send_control(session.connection, sender.outbox.popleft(), up=True)
        for lane in session.lanes:
            session.pump(lane)
        while sender.events:
            event = sender.events.popleft()
            if isinstance(event, Ended):
                session.used_s = now
                session.sources.pop(event.transfer, None)
            self._on_sender_event(session, event)

    def _send_control(self, connection: Connection, frame: Frame, *, up: bool) -> None:
        data = encode_frame(frame)
        if up:
            connection.control_up.send(
                data, lambda arrived: connection.server.on_control(connection, arrived)
            )
        else:
            connection.control_down.send(
                data, lambda arrived: connection.client.plane.on_answer(connection, arrived)
            )

    # --- the sending side --------------------------------------------------------------------

    def on_answer(self, connection: Connection, data: bytes) -> None:
        session = connection.client
        if session.connection is not connection:
            return
        try:
            for frame in connection.reader_down.feed(data):
                session.sender.on_frame(self.now, frame)
        except FrameError as error:
            connection.close_client(str(error))
        self.wake()

    def _op_open(self, message: Message) -> None:
        peer = Peer(*message["peer"])
        session = self.sessions.get(peer)
        if session is None:
            settings = self.settings
            sender = Sender(self.switch.incarnation(), settings.deadlines, settings.limits)
            session = self.sessions[peer] = Session(self, peer, sender, self.now)
        session.used_s = self.now
        manifest = Manifest.from_json(message["manifest"])
        transfer = session.sender.open(self.now, Key(*message["key"]), manifest)
        session.sources[transfer] = {item.region: RangeList() for item in manifest.regions}
        self._by_worker[message["t"]] = (session, transfer)
        self._by_session[peer, transfer] = message["t"]

    def _op_push(self, message: Message) -> None:
        session, transfer = self._by_worker.get(message["t"], (None, 0))
        if session is None or transfer not in session.sources:
            return
        for layer, kind, ranges in message["pieces"]:
            region = Region(layer, Kind(kind))
            session.sources[transfer][region].extend(ranges)
            session.sender.push(transfer, region, sum(length for _, length in ranges))

    def _op_commit(self, message: Message) -> None:
        session, transfer = self._by_worker.get(message["t"], (None, 0))
        if session is not None:
            first_token, meta = message["first_token"], message["meta"]
            session.sender.commit(self.now, transfer, first_token, meta)

    def _op_cancel(self, message: Message) -> None:
        session, transfer = self._by_worker.get(message["t"], (None, 0))
        if session is not None:
            session.sender.cancel(self.now, transfer)

    def _on_sender_event(self, session: Session, event: SenderEvent) -> None:
        number = self._by_session[session.peer, event.transfer]
        if isinstance(event, Granted):
            self._report({"op": "granted", "t": number})
            return
        del self._by_session[session.peer, event.transfer]
        del self._by_worker[number]
        self.wire_bytes += event.wire_bytes
        seconds = event.ended_s - event.started_s
        self._report({**asdict(event), "op": "ended", "t": number, "seconds": seconds})

    # --- the receiving side ------------------------------------------------------------------

    def why_not_greeted(self, session: Session) -> Reason | None:
        """The listening side's own judgement of a hello."""
        settings = session.plane.settings
        hello = Hello(settings.layout, -1, settings.codecs)
        source, target = session.sender.incarnation, session.peer.incarnation
        frame = control_frame(Type.HELLO, source=source, target=target, body=hello.encode())
        judge: Any = SimpleNamespace(_settings=self.settings, _worker_alive=self.worker_alive)
        return Inbound._why_not_greeted(judge, hello, frame)

    def accept(self, source: int, connection: Connection) -> None:
        known = self._peers.get(source)
        self._peers[source] = connection
        if known is not None:
            known.close_server()
        self.receiver.on_connected(source, connection.client.plane.host)
        self.wake()

    def peer_closed(self, connection: Connection) -> None:
        source = connection.client.sender.incarnation
        if self._peers.get(source) is connection:
            del self._peers[source]
        self.wake()

    def on_control(self, connection: Connection, data: bytes) -> None:
        source = connection.client.sender.incarnation
        if self.dead or self._peers.get(source) is not connection:
            return
        connection.heard_s = self.now
        try:
            for frame in connection.reader_up.feed(data):
                self.receiver.on_frame(self.now, source, frame)
        except FrameError:
            connection.close_server()
        self.wake()

    def on_data(self, connection: Connection, stream: Stream, data: bytes) -> None:
        """A chunk is here: half of it is written now, the rest a moment later."""
        if self.dead:
            return
        try:
            header = decode_header(data[:HEADER_BYTES])
            source = connection.client.sender.incarnation
            if header.type is not Type.DATA or header.source != source:
                raise FrameError("not a chunk of this peer")
            slot = self.receiver.begin_chunk(self.now, header)
        except FrameError:
            stream.cut()
            return
        if slot is None:
            self.wake()
            return
        ranges = self._destinations[slot.handle][slot.region].slice(slot.start, slot.size)
        views = self.arena.views(ranges)
        body = data[HEADER_BYTES:]
        half = len(body) // 2
        _scatter(views, 0, body[:half])
        self._writing[stream] = slot

        def written() -> None:
            if self._writing.pop(stream, None) is None or self.dead:
                return
            _scatter(views, half, body[half:])
            self.receiver.end_chunk(self.now, slot, checksum([b"".join(views)]))
            self.wake()

        self.loop.call_later(WRITE_S, written)

    def writing_ended(self, stream: Stream) -> None:
        """The connection broke, perhaps in a chunk."""
        slot = self._writing.pop(stream, None)
        if slot is not None and not self.dead:
            self.receiver.end_chunk(self.now, slot, None)
            self.wake()

    def _on_receiver_event(self, event: ReceiverEvent) -> None:
        if isinstance(event, Denied):
            return
        message: Message = {"h": list(event.handle), "key": list(event.key)}
        match event:
            case Offered():
                self._offers[event.handle] = event.manifest
                manifest = event.manifest.to_json()
                message.update(op="offered", manifest=manifest, identity=event.identity)
            case Withdrawn():
                self._offers.pop(event.handle, None)
                message.update(op="withdrawn", reason=event.reason)
            case Verified():
                commit = event.commit
                message.update(op="verified", identity=event.identity, meta=commit.meta)
                message.update(first_token=commit.first_token)
            case Aborted():
                self._destinations.pop(event.handle, None)
                message.update(op="aborted", reason=event.reason)
        self._report(message)

    def _op_grant(self, message: Message) -> None:
        handle = (message["h"][0], message["h"][1])
        if self._offers.pop(handle, None) is not None:
            self._destinations[handle] = {
                Region(layer, Kind(kind)): RangeList(ranges)
                for layer, kind, ranges in message["destinations"]
            }
            if self.receiver.grant(self.now, handle):
                return
            del self._destinations[handle]
        self._report({"op": "aborted", "h": message["h"], "reason": "no longer wanted"})

    def _op_refuse(self, message: Message) -> None:
        handle = (message["h"][0], message["h"][1])
        self._offers.pop(handle, None)
        self.receiver.refuse(handle, message["reason"], message["retryable"])

    def _op_admit(self, message: Message) -> None:
        handle = (message["h"][0], message["h"][1])
        self._destinations.pop(handle, None)
        self.receiver.admit(handle)

    def _op_reject(self, message: Message) -> None:
        self.receiver.reject((message["h"][0], message["h"][1]), message["reason"])


def _scatter(views: list[memoryview], start: int, data: bytes) -> None:
    """Write `data` at byte `start` of the string of bytes that `views` are."""
    at, done = 0, 0
    for view in views:
        end = at + len(view)
        if done < len(data) and start + done < end:
            inside = start + done - at
            take = min(len(view) - inside, len(data) - done)
            view[inside : inside + take] = data[done : done + take]
            done += take
        at = end
