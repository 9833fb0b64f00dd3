"""What a worker hears of caches that come, and its answers in time and too late."""

from __future__ import annotations

from typing import Any

from engine.transport.incoming import Aborted, Denied, Handle, Offered, Verified, Withdrawn
from engine.transport.ipc import Message
from engine.transport.messages import Commit, Key, Manifest
from engine.transport.reception import Reception
from engine.transport.regions import Kind, RangeList, Region, RegionSize

REGION = Region(0, Kind.KV)
MANIFEST = Manifest((RegionSize(REGION, 64),), n_tokens=4)
HANDLE, KEY = (5, 1), Key("r", 0)
ANSWER: Message = {"h": [5, 1]}
GRANT: Message = {"h": [5, 1], "destinations": [[4096, 64]]}


class Landing:
    """`wanted`: the peer still waits for an answer."""

    wanted = True

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def grant(
        self, handle: Handle, destinations: dict[Region, RangeList], manifest: Manifest
    ) -> bool:
        self.heard.append(("grant", handle, list(destinations), manifest))
        return self.wanted

    def refuse(self, handle: Handle, reason: str, retryable: bool) -> None:
        self.heard.append(("refuse", handle, reason, retryable))

    def admit(self, handle: Handle) -> bool:
        self.heard.append(("admit", handle))
        return self.wanted

    def reject(self, handle: Handle, reason: str) -> None:
        self.heard.append(("reject", handle, reason))


def bench() -> tuple[Reception, Landing, list[Message]]:
    landing, said = Landing(), []
    return Reception(landing, said.append), landing, said


def verified() -> Verified:
    return Verified(HANDLE, KEY, MANIFEST, Commit(7, 17, {"a": 1}), "source", 3)


def test_an_offer_that_is_granted_lands_where_the_worker_says() -> None:
    reception, landing, said = bench()
    reception.on_event(Offered(HANDLE, KEY, MANIFEST, "source"))
    (offered,) = said
    assert (offered["op"], offered["h"], offered["identity"]) == ("offered", [5, 1], "source")
    assert Manifest.from_json(offered["manifest"]) == MANIFEST
    reception.grant(GRANT)
    assert landing.heard == [("grant", HANDLE, [REGION], MANIFEST)]
    assert len(said) == 1


def test_a_grant_that_nobody_waits_for_frees_its_memory() -> None:
    gone = {"op": "aborted", "h": [5, 1], "reason": "no longer wanted"}
    reception, landing, said = bench()
    reception.on_event(Offered(HANDLE, KEY, MANIFEST, ""))
    landing.wanted = False
    reception.grant(GRANT)
    assert said[1:] == [gone]
    reception, landing, said = bench()
    reception.on_event(Offered(HANDLE, KEY, MANIFEST, ""))
    reception.on_event(Withdrawn(HANDLE, KEY, "cancelled"))
    reception.grant(GRANT)
    assert [message["op"] for message in said] == ["offered", "withdrawn", "aborted"]
    assert landing.heard == []


def test_a_refusal_takes_the_offer_away() -> None:
    reception, landing, said = bench()
    reception.on_event(Offered(HANDLE, KEY, MANIFEST, ""))
    reception.refuse({**ANSWER, "reason": "full", "retryable": True})
    assert landing.heard == [("refuse", HANDLE, "full", True)]
    reception.grant(GRANT)
    assert said[-1]["op"] == "aborted"


def test_what_is_admitted_is_told_to_the_plane_once_and_never_after_its_end() -> None:
    reception, landing, said = bench()
    event = verified()
    reception.on_event(event)
    assert (said[0]["first_token"], said[0]["meta"]) == (17, {"a": 1})
    assert reception.admit(ANSWER) is event
    assert reception.admit(ANSWER) is None
    reception.on_event(verified())
    reception.on_event(Aborted(HANDLE, KEY, "not in time"))
    assert reception.admit(ANSWER) is None
    assert landing.heard == [("admit", HANDLE)]
    reception.on_event(verified())
    landing.wanted = False
    assert reception.admit(ANSWER) is None


def test_a_rejection_reaches_the_landing_and_a_denial_not_the_worker() -> None:
    reception, landing, said = bench()
    reception.reject({**ANSWER, "reason": "no"})
    assert landing.heard == [("reject", HANDLE, "no")]
    reception.on_event(Denied(HANDLE, KEY, MANIFEST, "source", 3, "not its tenant"))
    assert said == []
