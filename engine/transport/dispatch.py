"""The worker's transfers by the numbers that it gave them, each in the session of its peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from engine.transport.ipc import Message
from engine.transport.messages import Key, Manifest
from engine.transport.outbound import Peer
from engine.transport.outgoing import Ended, Granted, SenderEvent


class Carrier(Protocol):
    """What carries transfers to one peer (see `outbound.Session`)."""

    @property
    def peer(self) -> Peer: ...

    def open(self, key: Key, manifest: Manifest) -> int: ...

    def push(self, transfer: int, pieces: Iterable[tuple[int, Sequence[int]]]) -> None: ...

    def announce(self) -> None: ...

    def commit(self, transfer: int, first_token: int, meta: dict) -> None: ...

    def cancel(self, transfer: int) -> None: ...


S = TypeVar("S", bound=Carrier)


class Dispatch(Generic[S]):
    """`tell` takes messages for the worker. `on_ended` hears of each transfer that ended, before
    the worker does."""

    def __init__(
        self,
        new_session: Callable[[Peer], S],
        tell: Callable[[Message], None],
        on_ended: Callable[[S, Ended, Manifest], None],
    ) -> None:
        #: Of peers that are sent to; whoever finds one idle may delete it.
        self.sessions: dict[Peer, S] = {}
        self._new_session = new_session
        self._tell = tell
        self._on_ended = on_ended
        self._by_worker: dict[int, tuple[S, int, Manifest]] = {}
        self._by_session: dict[tuple[Peer, int], int] = {}
        self._pushed: dict[Peer, S] = {}

    # --- what the worker says ----------------------------------------------------------------

    def open(self, message: Message) -> None:
        peer = Peer(*message["peer"])
        session = self.sessions.get(peer)
        if session is None:
            session = self.sessions[peer] = self._new_session(peer)
        manifest = Manifest.from_json(message["manifest"], validated=True)
        transfer = session.open(Key(*message["key"]), manifest)
        self._by_worker[message["t"]] = (session, transfer, manifest)
        self._by_session[peer, transfer] = message["t"]

    def push(self, message: Message) -> None:
        known = self._by_worker.get(message["t"])
        if known is not None:
            known[0].push(known[1], message["pieces"])
            self._pushed[known[0].peer] = known[0]

    def announce(self) -> None:
        """All that the worker had to say for now is pushed."""
        for session in self._pushed.values():
            session.announce()
        self._pushed.clear()

    def commit(self, message: Message) -> None:
        known = self._by_worker.get(message["t"])
        if known is not None:
            known[0].commit(known[1], message["first_token"], message["meta"])

    def cancel(self, message: Message) -> None:
        known = self._by_worker.get(message["t"])
        if known is not None:
            known[0].cancel(known[1])

    # --- what it hears -----------------------------------------------------------------------

    def on_event(self, session: S, event: SenderEvent) -> None:
        number = self._by_session[session.peer, event.transfer]
        if isinstance(event, Granted):
            self._tell({"op": "granted", "t": number})
            return
        del self._by_session[session.peer, event.transfer]
        _, _, manifest = self._by_worker.pop(number)
        self._on_ended(session, event, manifest)
        self._tell(_ended_message(number, event))


def _ended_message(number: int, event: Ended) -> Message:
    """What the worker hears of the end of its transfer `number`."""
    return {
        "op": "ended",
        "t": number,
        "committed": event.committed,
        "refused": event.refused,
        "reason": event.reason,
        "retryable": event.retryable,
        "wire_bytes": event.wire_bytes,
        "seconds": event.ended_s - event.started_s,
        "resent": event.resent,
        "digest": f"{event.digest:032x}",
    }
