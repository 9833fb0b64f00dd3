"""A data plane without process, threads or sockets: the protocol's own state machines, on wires.

Stands between the worker's real `DataPlane` face (whose messages it answers as the plane process
does) and `wire`. What it does with time and connections follows `engine.transport.plane`; all
decisions are `Sender`'s and `Receiver`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.transport.callbacks import Callbacks
from engine.transport.client import DataPlane
from engine.transport.dispatch import Dispatch
from engine.transport.errors import FrameError, PlaneLost
from engine.transport.frames import Frame, Type, control_frame, encode_frame
from engine.transport.inbound import Inbound
from engine.transport.incoming import Aborted
from engine.transport.ipc import Message
from engine.transport.messages import Hello, Manifest, Reason
from engine.transport.outbound import Peer
from engine.transport.outgoing import Ended
from engine.transport.reception import Reception
from engine.transport.sender import Sender
from engine.transport.settings import Settings
from harness.chaos.connection import Connection, Switch
from harness.chaos.landing import Landing
from harness.chaos.sending import Session
from harness.chaos.wire import Stream

#: Between a worker and its plane.
IPC_S = 0.0002
TICK_S = 0.1
IDLE_SESSION_S = 1.0


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
        self.landing = Landing(arena, settings, self.wake)
        self.receiver = self.landing.receiver
        dispatch = Dispatch(self._new_session, self._report, self._on_sent)
        reception = Reception(self.landing, self._report)
        self.sessions = dispatch.sessions
        self.wire_bytes = 0
        self._frozen_s: float | None = None
        self._held: list[Message] = []
        self._peers: dict[int, Connection] = {}
        self._dispatch, self._reception = dispatch, reception
        self._handlers: dict[str, Callable[[Message], object]] = {
            "open": dispatch.open,
            "push": dispatch.push,
            "commit": dispatch.commit,
            "cancel": dispatch.cancel,
            "grant": reception.grant,
            "refuse": reception.refuse,
            "admit": reception.admit,
            "reject": reception.reject,
        }
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
            self._handlers[message["op"]](message)
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
        self.dead = self.landing.closed = True
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
            event = receiver.events.popleft()
            if isinstance(event, Aborted):
                self.landing.destinations.pop(event.handle, None)
            self._reception.on_event(event)
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
            self._dispatch.on_event(session, event)

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

    def _new_session(self, peer: Peer) -> Session:
        settings = self.settings
        sender = Sender(self.switch.incarnation(), settings.deadlines, settings.limits)
        return Session(self, peer, sender, self.now)

    def _on_sent(self, session: Session, event: Ended, manifest: Manifest) -> None:
        self.wire_bytes += event.wire_bytes

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
            self.receiver.on_disconnected(source)
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
        self.landing.chunk(connection.client.sender.incarnation, stream, data)
