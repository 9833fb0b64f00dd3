"""The data plane: a process that moves cache bytes, beside the worker and without its interpreter
lock. Started by `client.DataPlane`; ends with its parent.

One loop (this module) runs deadlines, control connections and the worker's socket; what the worker
says of its transfers goes through `dispatch`, of caches that come through `reception`; lanes are
threads (`lanes`). Messages of the worker: open, push, commit, cancel (sending); grant, refuse,
admit, reject (receiving); beat, close. To the worker: ready, granted, ended; offered, withdrawn,
verified, aborted; samples, memory, audit, failed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.in_use import in_use_bytes
from engine.transport.arena import SharedArena
from engine.transport.audit import audit_row
from engine.transport.control import Control, Pipe
from engine.transport.dispatch import Dispatch
from engine.transport.inbound import Inbound
from engine.transport.incoming import Denied, ReceiverEvent
from engine.transport.ipc import Message, MessageReader, encode, send
from engine.transport.messages import Key, Manifest
from engine.transport.outbound import Peer, Session
from engine.transport.outgoing import Ended
from engine.transport.reception import Reception
from engine.transport.security import tls_ends
from engine.transport.settings import Settings
from engine.transport.sockets import is_loopback

IDLE_TICK_S = 0.05
#: How often the worker hears what memory this process has in use.
MEMORY_S = 2.0
#: A session without connection and work is forgotten after this long.
IDLE_SESSION_S = 5.0


class WorkerGone(Exception):
    """The worker closed its end or died: the plane ends too."""


class Plane:
    """The loop's state."""

    def __init__(self, settings: Settings, arena: SharedArena, worker: socket.socket) -> None:
        if settings.security is None and not (is_loopback(settings.host) or settings.allow_plain):
            raise ValueError(
                f"plain TCP on {settings.host}: give certificates, or ask for it by allow_plain"
            )
        self._settings = settings
        self._arena = arena
        self._worker = Pipe(worker)
        self._reader = MessageReader()
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK)
        self._woken = False
        secure = settings.security
        self._dialling = None if secure is None else tls_ends(secure, server_side=False)
        self._worker_heard_s = time.monotonic()
        self._inbound = Inbound(
            settings,
            arena,
            self._wake,
            None if secure is None else tls_ends(secure, server_side=True),
            self._worker_alive,
        )
        self._dispatch = Dispatch(self._new_session, self._tell, self._on_sent)
        self._sessions = self._dispatch.sessions
        self._reception = Reception(self._inbound, self._tell)
        self._handlers: dict[str, Callable[[Message], None]] = {
            "open": self._dispatch.open,
            "push": self._dispatch.push,
            "commit": self._dispatch.commit,
            "cancel": self._dispatch.cancel,
            "grant": self._reception.grant,
            "refuse": self._reception.refuse,
            "admit": self._admit,
            "reject": self._reception.reject,
            "beat": self._beat,
            "close": self._close,
        }
        self._registered: set[Control] = set()
        self._dialled: dict[Control, Peer] = {}
        self._sampled_s = 0.0
        self._weighed_s = 0.0
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_wakeup)
        self._selector.register(self._worker, selectors.EVENT_READ, self._on_worker)
        self._selector.register(self._inbound.listener, selectors.EVENT_READ, self._on_listener)

    def run(self) -> None:
        """Until the worker is gone or says close."""
        self._tell({"op": "ready", "port": self._inbound.port})
        while True:
            active = self._inbound.state.receiver.active or any(
                session.state.sender.active for session in self._sessions.values()
            )
            tick_s = self._settings.sample_s if active else IDLE_TICK_S
            for key, events in self._selector.select(tick_s):
                if events & selectors.EVENT_WRITE and isinstance(key.fileobj, Pipe):
                    # A broken connection is found by reading it.
                    with contextlib.suppress(OSError):
                        key.fileobj.flush()
                if events & selectors.EVENT_READ:
                    key.data(key.fileobj)
            self._service()
            self._flush_worker()
            self._watch_unsent()

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._inbound.close()

    def _wake(self) -> None:
        """Make the loop turn (any thread). Most calls find it woken already."""
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wakeup, 1)

    def _tell(self, message: Message) -> None:
        """Goes out at the end of this turn, with everything else that it has to say."""
        try:
            self._worker.keep(encode(message))
        except OSError as error:
            raise WorkerGone from error

    def _flush_worker(self) -> None:
        try:
            self._worker.flush()
        except OSError as error:
            raise WorkerGone from error

    # --- loop events -------------------------------------------------------------------------

    def _on_wakeup(self, _: Any) -> None:
        os.eventfd_read(self._wakeup)
        self._woken = False

    def _on_listener(self, _: Any) -> None:
        self._inbound.accept()

    def _on_worker(self, _: Any) -> None:
        try:
            data = self._worker.receive()
        except OSError as error:
            raise WorkerGone from error
        self._worker_heard_s = time.monotonic()
        for message in self._reader.feed(data):
            self._handlers[message["op"]](message)
        self._dispatch.announce()

    def _worker_alive(self) -> bool:
        """Whether the worker was heard lately (any thread)."""
        silent_s = time.monotonic() - self._worker_heard_s
        return silent_s < self._settings.deadlines.worker_silence_s

    def _on_session(self, control: Control) -> None:
        session = self._sessions[self._dialled[control]]
        session.on_readable(time.monotonic())

    def _on_inbound(self, control: Control) -> None:
        now = time.monotonic()
        if not self._inbound.on_readable(now, control):
            self._forget(control)

    def _forget(self, control: Control) -> None:
        """The only place where control connections close: a descriptor must leave the selector
        before its number can be used again."""
        if control in self._registered:
            self._registered.discard(control)
            self._selector.unregister(control)
        self._dialled.pop(control, None)
        control.close()

    def _register(self, control: Control, handler: Callable[[Control], None]) -> None:
        self._registered.add(control)
        self._selector.register(control, selectors.EVENT_READ, handler)

    def _watch_unsent(self) -> None:
        """What did not fit into a socket goes out as soon as there is room, not at the next tick:
        an offer of many regions is larger than a fresh connection's buffer."""
        for pipe in (self._worker, *self._registered):
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if pipe.wants_write else 0)
            key = self._selector.get_key(pipe)
            if key.events != events:
                self._selector.modify(pipe, events, key.data)

    def _service(self) -> None:
        now = time.monotonic()
        alive = self._worker_alive()
        for control in self._inbound.fresh_controls():
            self._register(control, self._on_inbound)
        events, ended = self._inbound.service(now)
        for control in ended:
            self._forget(control)
        for event in events:
            self._on_receiver_event(event)
        for peer, session in list(self._sessions.items()):
            for sent in session.service(now, alive):
                self._dispatch.on_event(session, sent)
            for control in session.take_retired():
                self._forget(control)
            current = session.control
            if current is not None and current not in self._registered:
                self._dialled[current] = peer
                self._register(current, self._on_session)
            if session.idle and now - session.used_s > IDLE_SESSION_S:
                session.close()
                del self._sessions[peer]
        if now - self._sampled_s >= self._settings.sample_s:
            self._sampled_s = now
            self._sample(now)

    def _sample(self, now: float) -> None:
        rows = []
        for peer, session in self._sessions.items():
            sample = session.sample(now)
            if sample is not None:
                where = {"host": peer.host, "port": peer.port, "incarnation": peer.incarnation}
                rows.append({**where, **asdict(sample), "verdict": session.monitor.state.verdict})
        if rows:
            self._tell({"op": "samples", "rows": rows})

    # --- what came of transfers --------------------------------------------------------------

    def _new_session(self, peer: Peer) -> Session:
        return Session(peer, self._settings, self._arena, self._wake, self._dialling)

    def _on_sent(self, session: Session, event: Ended, manifest: Manifest) -> None:
        if event.committed:
            self._audit(
                "sent",
                session.identity,
                session.state.sender.peer_incarnation,
                event.key,
                manifest,
                event.digest,
                event.wire_bytes,
            )

    def _on_receiver_event(self, event: ReceiverEvent) -> None:
        if isinstance(event, Denied):
            self._audit("refused", event.identity, event.instance, event.key, event.manifest, 0)
        else:
            self._reception.on_event(event)

    def _admit(self, message: Message) -> None:
        event = self._reception.admit(message)
        if event is not None:
            self._audit(
                "received",
                event.identity,
                event.instance,
                event.key,
                event.manifest,
                event.commit.digest,
            )

    def _audit(
        self,
        direction: str,
        identity: str,
        instance: int,
        key: Key,
        manifest: Manifest,
        digest: int,
        wire_bytes: int | None = None,
    ) -> None:
        row = audit_row(
            direction, identity, instance, key, manifest, digest, time.time(), wire_bytes
        )
        self._tell({"op": "audit", "row": row})

    def _beat(self, message: Message) -> None:
        """Being read is what a beat is for; now and then it is answered."""
        now = time.monotonic()
        if now - self._weighed_s >= MEMORY_S:
            self._weighed_s = now
            self._tell({"op": "memory", "in_use_bytes": in_use_bytes()})

    def _close(self, message: Message) -> None:
        raise WorkerGone


def _end_loudly(problem: threading.ExceptHookArgs) -> None:
    sys.excepthook(problem.exc_type, problem.exc_value or problem.exc_type(), problem.exc_traceback)
    os._exit(1)


def main() -> int:
    """Process entry: descriptors are inherited, settings are the first message."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    options = parser.parse_args()
    # A thread that ends by a bug would leave transfers hanging: the whole plane ends instead, and
    # the worker sees it.
    threading.excepthook = _end_loudly
    # Messages are short-lived trees: counting references frees them. What the collector would look
    # through at its usual pace is every chunk of every transfer under way.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    # Ctrl-C reaches the whole process group; the worker decides when its plane ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = socket.socket(fileno=options.worker_fd)
    arena = SharedArena.attach(options.arena_fd)
    reader = MessageReader()
    first: Message | None = None
    while first is None:
        data = worker.recv(1 << 16)
        if not data:
            return 0
        first = next(iter(list(reader.feed(data))), None)
    try:
        plane = Plane(Settings.from_json(first), arena, worker)
    except (OSError, ValueError) as error:
        send(worker, {"op": "failed", "reason": str(error)})
        return 2
    with contextlib.suppress(WorkerGone):
        plane.run()
    plane.close()
    # Lanes may be blocked in system calls on connections that just closed; nothing waits for them.
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main())
