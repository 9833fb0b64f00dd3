"""The dialling side: one session per peer, its control connection and its lanes."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.transport.arena import SharedArena
from engine.transport.control import BROKEN, Control
from engine.transport.errors import FrameError
from engine.transport.frames import Frame, Type, control_frame
from engine.transport.lanes import SendLane, SendState, Source
from engine.transport.messages import Hello, Key, Manifest, Reason
from engine.transport.monitor import LinkMonitor, LinkSample, TcpInfo, read_tcp_info
from engine.transport.outgoing import Ended, SenderEvent
from engine.transport.pacing import data_options
from engine.transport.regions import RangeList
from engine.transport.security import peer_identity
from engine.transport.sender import Sender
from engine.transport.settings import Settings
from engine.transport.sockets import TcpOptions, dial, read_frame, sever, write_frame
from engine.transport.tls import Stream, Wrap

#: Deadlines are looked at no more often than this, whatever else wakes the loop.
TICK_S = 0.01


class Refused(FrameError):
    """The peer answered the handshake with an error frame."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Peer:
    """A data plane's address. incarnation 0 accepts whichever life of it answers; identity: the
    name that its certificate must bear, empty for any that the authority signed."""

    host: str
    port: int
    incarnation: int = 0
    identity: str = ""


@dataclass(slots=True)
class _Dialled:
    """What a dial thread hands to the loop: a connection with the options for the data connections
    beside it, or why there is none."""

    control: Control | None = None
    data_tcp: TcpOptions = field(default_factory=TcpOptions)
    error: str = ""
    refused: Reason | None = None


@dataclass(slots=True)
class Session:
    """One peer. Methods are called by the plane's loop, `_`-prefixed ones also by threads.

    `wake` makes the loop call `service` soon.
    """

    peer: Peer
    settings: Settings
    arena: SharedArena
    wake: Callable[[], None]
    secure: Wrap | None = None
    state: SendState = field(init=False)
    control: Control | None = None
    identity: str = ""
    monitor: LinkMonitor = field(default_factory=LinkMonitor)
    lanes: list[SendLane] = field(default_factory=list)
    used_s: float = field(default_factory=time.monotonic)
    _data_tcp: TcpOptions = field(init=False)
    _retired: list[Control] = field(default_factory=list)
    _dialled: _Dialled | None = None
    _dialling: bool = False
    _dial_after_s: float = 0.0
    _acked: dict[int, int] = field(default_factory=dict)
    _ticked_s: float = 0.0

    def __post_init__(self) -> None:
        settings = self.settings
        self._data_tcp = settings.tcp
        # Of this session alone: two sessions of one plane may reach the same peer, and their
        # transfers' numbers must not meet there.
        incarnation = secrets.randbits(63) + 1
        self.state = SendState(Sender(incarnation, settings.deadlines, settings.limits))
        for number in range(settings.lanes):
            lane = SendLane(
                number,
                self.state,
                self.arena,
                self._connect_lane,
                self.wake,
                settings.deadlines.redial_s,
            )
            self.lanes.append(lane)
            lane.start()

    # --- transfers ---------------------------------------------------------------------------

    def open(self, key: Key, manifest: Manifest) -> int:
        with self.state.changed:
            self.used_s = time.monotonic()
            transfer = self.state.sender.open(self.used_s, key, manifest)
            self.state.sources[transfer] = Source({}, manifest)
            self.state.changed.notify_all()
        return transfer

    def push(self, transfer: int, pieces: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Pieces are (position of the region in the manifest, flat offsets and lengths)."""
        with self.state.changed:
            source = self.state.sources.get(transfer)
            if source is None:
                return  # it has ended
            regions, ranges = source.manifest.regions, source.ranges
            push = self.state.sender.push
            for position, numbers in pieces:
                region = regions[position].region
                known = ranges.get(region)
                if known is None:
                    ranges[region] = RangeList.from_flat(numbers)
                else:
                    known.extend(zip(numbers[::2], numbers[1::2], strict=True))
                push(transfer, region, sum(numbers[1::2]))

    def announce(self) -> None:
        """Wake a lane for what was pushed; it wakes others if it cannot take all. Not at each push:
        small layers that come together should leave together."""
        with self.state.changed:
            if self.state.sender.has_ready:
                self.state.work.notify()

    def commit(self, transfer: int, first_token: int, meta: dict) -> None:
        with self.state.changed:
            self.state.sender.commit(time.monotonic(), transfer, first_token, meta)

    def cancel(self, transfer: int) -> None:
        with self.state.changed:
            self.state.sender.cancel(time.monotonic(), transfer)

    @property
    def idle(self) -> bool:
        """Nothing to send and no connection: the session can be forgotten."""
        return self.control is None and not self._dialling and not self.state.sender.active

    # --- the loop ----------------------------------------------------------------------------

    def service(self, now: float, worker_alive: bool) -> list[SenderEvent]:
        """Deadlines, redial, outgoing frames; returns what happened to transfers."""
        state = self.state
        sender = state.sender
        if self._dialled is not None:
            self._adopt_dialled(now)
        silent = False
        if now - self._ticked_s >= TICK_S:
            self._ticked_s = now
            with state.changed:
                if worker_alive:
                    for lane in sender.tick(now):
                        self.lanes[lane].drop()
                silent = sender.silent_s(now) > self.settings.deadlines.peer_silence_s
        if self.control is not None and silent:
            self.disconnect(now, "the peer is silent")
        if (
            self.control is None
            and not self._dialling
            and sender.active
            and now >= self._dial_after_s
        ):
            self._dialling = True
            threading.Thread(target=self._dial_control, name="dial", daemon=True).start()
        if not (sender.outbox or sender.events):
            return []
        with state.changed:
            frames = list(sender.outbox)
            sender.outbox.clear()
            events = list(sender.events)
            sender.events.clear()
            for event in events:
                if isinstance(event, Ended):
                    state.sources.pop(event.transfer, None)
        if self.control is not None and frames:
            try:
                self.control.send_frames(frames)
            except OSError as error:
                self.disconnect(now, str(error))
        return events

    def on_readable(self, now: float) -> None:
        """The control connection has something to read."""
        if self.control is None:
            return
        try:
            frames = self.control.frames()
            with self.state.changed:
                for frame in frames:
                    self.state.sender.on_frame(now, frame)
                if self.state.sender.has_ready:
                    self.state.work.notify()
        except BROKEN as error:
            self.disconnect(now, str(error))

    def disconnect(self, now: float, why: str) -> None:
        """Drop the control connection and every lane; the next `service` dials again."""
        if self.control is None:
            return
        sever(self.control.socket)
        self._retired.append(self.control)
        self.control = None
        self._dial_after_s = now + self.settings.deadlines.redial_s
        with self.state.changed:
            self.state.epoch += 1
            self.state.sender.trouble = why
            self.state.sender.on_disconnected(now)
            for lane in self.lanes:
                lane.drop()
            self.state.wake_all()

    def take_retired(self) -> list[Control]:
        """Control connections that ended since the last call, for the loop to close."""
        retired, self._retired = self._retired, []
        return retired

    def sample(self, now: float) -> LinkSample | None:
        """Read TCP_INFO of the live lanes; notes which of them move. None: nothing to report (no
        lanes, or idle and known to be)."""
        infos: list[tuple[int, TcpInfo]] = []
        for lane in self.lanes:
            # Without the lock: the kernel answers only between two pieces of a lane's send.
            sock = lane.socket
            if sock is None:
                continue
            try:
                infos.append((lane.lane, read_tcp_info(sock)))
            except OSError:
                continue
        with self.state.changed:
            sender = self.state.sender
            for number, info in infos:
                if info.bytes_acked != self._acked.get(number):
                    self._acked[number] = info.bytes_acked
                    sender.lane_moved(now, number)
            backlog_bytes = sender.backlog_bytes
        before = self.monitor.state.verdict
        sample = self.monitor.read(now, infos, backlog_bytes)
        verdict = self.monitor.state.verdict
        if sample is not None and (sample.busy or verdict is not before or verdict != "free"):
            return sample
        return None

    def close(self) -> None:
        """End the lanes' threads."""
        if self.control is not None:
            self.control.close()
            self.control = None
        with self.state.changed:
            self.state.closed = True
            self.state.epoch += 1
            for lane in self.lanes:
                lane.drop()
            self.state.wake_all()

    # --- dialling ----------------------------------------------------------------------------

    def _adopt_dialled(self, now: float) -> None:
        dialled, self._dialled = self._dialled, None
        if dialled is None:
            return
        self._dialling = False
        self._dial_after_s = now + self.settings.deadlines.redial_s
        with self.state.changed:
            if dialled.control is not None:
                self.control = dialled.control
                self.identity = dialled.control.identity
                self._data_tcp = dialled.data_tcp
                self.state.epoch += 1
                self.state.sender.on_connected(now, dialled.control.peer)
            elif dialled.refused is not None:
                self.state.sender.fail_all(
                    now, dialled.refused.text, dialled.refused.retryable, refused=True
                )
            else:
                self.state.sender.trouble = dialled.error
            self.state.wake_all()

    def _dial_control(self) -> None:
        try:
            sock, welcome = self._connect(-1)
            data_tcp = data_options(self.settings.tcp, sock)
            control = Control(sock, welcome.header.source, peer_identity(sock))
            self._dialled = _Dialled(control, data_tcp)
        except Refused as error:
            self._dialled = _Dialled(refused=error.reason)
        except BROKEN as error:
            self._dialled = _Dialled(error=f"{self.peer.host}:{self.peer.port}: {error}")
        self.wake()

    def _connect_lane(self, lane: int) -> Stream:
        sock, _ = self._connect(lane)
        sock.settimeout(None)
        return sock

    def _connect(self, lane: int) -> tuple[Stream, Frame]:
        settings = self.settings
        deadline_s = time.monotonic() + settings.deadlines.handshake_s
        sock = dial(
            self.peer.host,
            self.peer.port,
            settings.tcp if lane < 0 else self._data_tcp,
            settings.deadlines.handshake_s,
            self.secure,
        )
        try:
            found = peer_identity(sock)
            if self.peer.identity not in ("", found):
                why = f"the peer is {found or 'unnamed'}, expected {self.peer.identity}"
                raise Refused(Reason(why, retryable=False))
            # A lane belongs to the life of the peer that the control connection met.
            target = self.peer.incarnation if lane < 0 else self.state.sender.peer_incarnation
            hello = Hello(settings.layout, lane, settings.codecs, settings.incarnation)
            write_frame(
                sock,
                control_frame(
                    Type.HELLO,
                    source=self.state.sender.incarnation,
                    target=target,
                    body=hello.encode(),
                ),
            )
            answer = read_frame(sock, deadline_s)
            if answer.header.type is Type.ERROR:
                raise Refused(Reason.decode(answer.body))
            if answer.header.type is not Type.WELCOME:
                raise FrameError(f"{answer.header.type.name} in answer to a hello")
        except BaseException:
            sock.close()
            raise
        return sock, answer
