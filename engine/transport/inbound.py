"""The listening side: handshakes (a thread each, bounded), control connections, receive lanes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.transport.arena import SharedArena
from engine.transport.control import BROKEN, Control
from engine.transport.errors import FrameError
from engine.transport.frames import Frame, Type, control_frame
from engine.transport.incoming import Aborted, Handle, ReceiverEvent
from engine.transport.lanes import ReceiveState, receive_lane, wire_size
from engine.transport.messages import Hello, Manifest, Reason
from engine.transport.receiver import Receiver
from engine.transport.regions import RangeList, Region
from engine.transport.security import peer_identity, why_not_allowed
from engine.transport.settings import Settings
from engine.transport.sockets import listen, read_frame, sever, write_frame
from engine.transport.tls import Stream, Wrap

#: Deadlines are looked at no more often than this, whatever else wakes the loop.
TICK_S = 0.01
#: Connections in their handshake at one time; more are closed at once.
MAX_HANDSHAKES = 64


@dataclass(slots=True)
class _PeerConnections:
    """One life of one peer: its control connection and the lanes that came with it."""

    control: Control
    identity: str
    heard_s: float
    lanes: set[Stream] = field(default_factory=set)


class Inbound:
    """Receives for the whole plane. Methods are called by the plane's loop unless they say so.

    While this plane's own worker is silent (`worker_alive` is false) nothing is answered, neither
    handshakes nor frames: to its peers the instance as a whole is then silent, which it is.
    """

    def __init__(
        self,
        settings: Settings,
        arena: SharedArena,
        wake: Callable[[], None],
        secure: Wrap | None,
        worker_alive: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._arena = arena
        self._wake = wake
        self._secure = secure
        self._worker_alive = worker_alive
        self.listener = listen(settings.host, settings.port, settings.tcp)
        self.listener.setblocking(False)
        self.state = ReceiveState(
            Receiver(
                settings.incarnation,
                settings.deadlines,
                settings.limits,
                self._why_not,
                wire_size,
            )
        )
        self._peers: dict[int, _PeerConnections] = {}
        self._fresh: deque[Control] = deque()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._ticked_s = 0.0

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def _why_not(self, identity: str, manifest: Manifest) -> str:
        unknown = set(manifest.codecs.values()) - set(self._settings.codecs)
        if unknown:
            return f"wire codec {sorted(unknown)[0]!r} is not spoken here"
        security = self._settings.security
        if security is None:
            return ""
        return why_not_allowed(security.tenants, identity, manifest.tenant)

    # --- connections -------------------------------------------------------------------------

    def accept(self) -> None:
        """Take what is waiting; each handshake runs in a thread of its own."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:
                return  # the peer was gone before we came
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), name="accept", daemon=True).start()

    def fresh_controls(self) -> list[Control]:
        """Control connections whose handshake ended since the last call."""
        fresh = []
        while self._fresh:
            fresh.append(self._fresh.popleft())
        return fresh

    def on_readable(self, now: float, control: Control) -> bool:
        """Handle frames of a control connection. False: it is over; the loop closes it."""
        try:
            frames = control.frames()
            with self.state.lock:
                peer = self._peers.get(control.peer)
                if peer is None or peer.control is not control:
                    raise FrameError("replaced by a newer connection")
                if frames:
                    peer.heard_s = now
                for frame in frames:
                    self.state.receiver.on_frame(now, control.peer, frame)
        except BROKEN:
            self._drop(control)
            return False
        return True

    def service(self, now: float) -> tuple[list[ReceiverEvent], list[Control]]:
        """Deadlines and outgoing frames; returns events and connections that ended."""
        ended: list[Control] = []
        with self.state.lock:
            receiver = self.state.receiver
            ticks = now - self._ticked_s >= TICK_S
            if ticks:
                self._ticked_s = now
                receiver.tick(now)
            if ticks or receiver.acks_due:
                receiver.flush_acks()
            frames: list[tuple[int, Frame]] = []
            if self._worker_alive():
                frames.extend(receiver.outbox)
                receiver.outbox.clear()
            events = list(receiver.events)
            receiver.events.clear()
            for event in events:
                if isinstance(event, Aborted):
                    self.state.destinations.pop(event.handle, None)
            silent = [
                peer.control
                for peer in self._peers.values()
                if ticks and now - peer.heard_s > self._settings.deadlines.give_up_s
            ]
            told: dict[Control, list[Frame]] = {}
            for source, frame in frames:
                peer = self._peers.get(source)
                if peer is not None:
                    told.setdefault(peer.control, []).append(frame)
        for control, due in told.items():
            try:
                control.send_frames(due)
            except OSError:
                ended.append(control)
        ended.extend(control for control in silent if control not in ended)
        for control in ended:
            self._drop(control)
        return events, ended

    def _drop(self, control: Control) -> None:
        """Break a control connection and the lanes that belong to it."""
        with self.state.lock:
            peer = self._peers.get(control.peer)
            if peer is not None and peer.control is control:
                del self._peers[control.peer]
                self.state.receiver.on_disconnected(control.peer)
                for sock in peer.lanes:
                    sever(sock)
        sever(control.socket)

    def close(self) -> None:
        self.listener.close()
        for peer in list(self._peers.values()):
            self._drop(peer.control)

    # --- answers of the worker ---------------------------------------------------------------

    def grant(
        self, handle: Handle, destinations: dict[Region, RangeList], manifest: Manifest
    ) -> bool:
        """See `Receiver.grant`. `destinations` cover the manifest exactly."""
        with self.state.lock:
            self.state.destinations[handle] = (manifest, destinations)
            if self.state.receiver.grant(time.monotonic(), handle):
                return True
            del self.state.destinations[handle]
            return False

    def refuse(self, handle: Handle, reason: str, retryable: bool) -> None:
        with self.state.lock:
            self.state.receiver.refuse(handle, reason, retryable)

    def reject(self, handle: Handle, reason: str) -> None:
        with self.state.lock:
            self.state.receiver.reject(handle, reason)

    def admit(self, handle: Handle) -> bool:
        with self.state.lock:
            self.state.destinations.pop(handle, None)
            return self.state.receiver.admit(handle)

    # --- a connection's own thread -----------------------------------------------------------

    def _serve(self, raw: socket.socket) -> None:
        """Handshake; then a lane serves its connection here, a control goes to the loop."""
        handed_over = False
        try:
            try:
                sock, hello, frame, identity = self._greet(raw)
                handed_over = hello.lane < 0 and self._adopt_control(
                    sock, frame, identity, hello.instance
                )
            finally:
                self._handshakes.release()
            if not handed_over:
                self._serve_lane(sock, frame.header.source, identity)
        except BROKEN:
            pass  # the connection is over; what it left half done was given back by the lane
        finally:
            if not handed_over:
                raw.close()

    def _greet(self, raw: socket.socket) -> tuple[Stream, Hello, Frame, str]:
        handshake_s = self._settings.deadlines.handshake_s
        deadline_s = time.monotonic() + handshake_s
        raw.settimeout(handshake_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock: Stream = raw
        if self._secure is not None:
            sock = stream = self._secure(raw)
            stream.handshake(handshake_s)
        frame = read_frame(sock, deadline_s)
        if frame.header.type is not Type.HELLO or not frame.header.source:
            raise FrameError(f"{frame.header.type.name} before the hello")
        hello = Hello.decode(frame.body)
        why_not = self._why_not_greeted(hello, frame)
        if why_not is not None:
            write_frame(sock, self._answer(Type.ERROR, frame, why_not.encode()))
            raise FrameError(why_not.text)
        return sock, hello, frame, peer_identity(sock)

    def _why_not_greeted(self, hello: Hello, frame: Frame) -> Reason | None:
        if hello.layout != self._settings.layout:
            return Reason(
                f"layout {hello.layout!r}; this side has {self._settings.layout!r}", retryable=False
            )
        if not self._worker_alive():
            raise FrameError("the worker is silent")
        if frame.header.target not in (0, self._settings.incarnation):
            return Reason("the receiver was restarted (another incarnation)", retryable=True)
        return None

    def _answer(self, type_: Type, hello: Frame, body: bytes = b"") -> Frame:
        return control_frame(
            type_, source=self._settings.incarnation, target=hello.header.source, body=body
        )

    def _adopt_control(self, sock: Stream, hello: Frame, identity: str, instance: int) -> bool:
        source = hello.header.source
        with self.state.lock:
            known = self._peers.get(source)
            if known is not None and known.identity != identity:
                raise FrameError("another identity claims this incarnation")
            write_frame(sock, self._answer(Type.WELCOME, hello))
            control = Control(sock, source, identity)
            if known is not None:
                # The sender has dialled again: whatever the old connections still carry is void.
                sever(known.control.socket)
                for lane in known.lanes:
                    sever(lane)
            self._peers[source] = _PeerConnections(control, identity, time.monotonic())
            self.state.receiver.on_connected(source, identity, instance)
        self._fresh.append(control)
        self._wake()
        return True

    def _serve_lane(self, sock: Stream, source: int, identity: str) -> None:
        with self.state.lock:
            peer = self._peers.get(source)
            if peer is None or peer.identity != identity:
                raise FrameError("a data connection without its control connection")
            peer.lanes.add(sock)
        try:
            body = b""
            write_frame(
                sock,
                control_frame(
                    Type.WELCOME, source=self._settings.incarnation, target=source, body=body
                ),
            )
            sock.settimeout(None)
            with contextlib.suppress(*BROKEN):
                receive_lane(sock, source, self.state, self._arena, self._wake)
        finally:
            with self.state.lock:
                peer.lanes.discard(sock)
