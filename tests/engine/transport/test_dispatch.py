"""The worker's numbers of transfers, and what it hears of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.transport.dispatch import Dispatch
from engine.transport.ipc import Message
from engine.transport.messages import Key, Manifest
from engine.transport.outbound import Peer
from engine.transport.outgoing import Ended, Granted
from engine.transport.regions import Kind, Region, RegionSize

MANIFEST = Manifest((RegionSize(Region(0, Kind.KV), 64),), n_tokens=4)
ENDED: dict[str, Any] = {
    "reason": "", "retryable": False, "refused": False, "wire_bytes": 128, "resent": 0,
    "digest": 7, "started_s": 1.0, "ended_s": 3.0,
}  # fmt: skip


class Session:
    """Numbers its own transfers from 1, as every session does."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.heard: list[tuple[Any, ...]] = []
        self.opened = 0

    def open(self, key: Key, manifest: Manifest) -> int:
        self.opened += 1
        return self.opened

    def push(self, transfer: int, pieces: Iterable[tuple[int, Sequence[int]]]) -> None:
        self.heard.append(("push", transfer))

    def announce(self) -> None:
        self.heard.append(("announce",))

    def commit(self, transfer: int, first_token: int, meta: dict) -> None:
        self.heard.append(("commit", transfer, first_token, meta))

    def cancel(self, transfer: int) -> None:
        self.heard.append(("cancel", transfer))


class Bench:
    def __init__(self) -> None:
        self.said: list[Message] = []
        self.ended: list[tuple[Session, int, int]] = []
        self.dispatch = Dispatch(Session, self.said.append, self._on_ended)

    def _on_ended(self, session: Session, event: Ended, manifest: Manifest) -> None:
        self.ended.append((session, manifest.n_tokens, len(self.said)))

    def open(self, number: int, port: int) -> Session:
        peer = ("10.0.0.1", port, 5, "")
        self.dispatch.open(
            {"t": number, "peer": peer, "key": ("r", 0), "manifest": MANIFEST.to_json()}
        )
        return self.dispatch.sessions[Peer(*peer)]


def test_transfers_of_one_peer_share_its_session_and_are_told_apart() -> None:
    bench = Bench()
    first, other, again = bench.open(11, 1), bench.open(12, 2), bench.open(13, 1)
    assert first is again and first is not other
    bench.dispatch.on_event(first, Granted(2, Key("r", 0)))
    bench.dispatch.on_event(other, Granted(1, Key("r", 0)))
    assert bench.said == [{"op": "granted", "t": 13}, {"op": "granted", "t": 12}]


def test_pushes_that_come_together_are_announced_once() -> None:
    bench = Bench()
    session, idle = bench.open(1, 1), bench.open(2, 2)
    bench.dispatch.push({"t": 1, "pieces": []})
    bench.dispatch.push({"t": 1, "pieces": []})
    bench.dispatch.announce()
    bench.dispatch.announce()
    assert session.heard == [("push", 1), ("push", 1), ("announce",)]
    assert idle.heard == []


def test_the_end_is_told_to_the_plane_first_and_what_comes_later_is_passed_over() -> None:
    bench = Bench()
    session = bench.open(9, 1)
    bench.dispatch.commit({"t": 9, "first_token": 17, "meta": {"a": 1}})
    bench.dispatch.on_event(session, Ended(1, Key("r", 0), committed=True, **ENDED))
    assert bench.ended == [(session, 4, 0)]
    (message,) = bench.said
    assert (message["op"], message["t"], message["committed"]) == ("ended", 9, True)
    assert (message["seconds"], message["digest"]) == (2.0, f"{7:032x}")
    bench.dispatch.push({"t": 9, "pieces": []})
    bench.dispatch.cancel({"t": 9})
    bench.dispatch.announce()
    assert session.heard == [("commit", 1, 17, {"a": 1})]
