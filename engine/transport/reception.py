"""Caches that come: what the worker is told of each, and its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.transport.incoming import (
    Aborted,
    Denied,
    Handle,
    Offered,
    ReceiverEvent,
    Verified,
    Withdrawn,
)
from engine.transport.ipc import Message
from engine.transport.messages import Manifest
from engine.transport.regions import RangeList, Region


class Landing(Protocol):
    """Where granted transfers are written (see `inbound.Inbound`)."""

    def grant(
        self, handle: Handle, destinations: dict[Region, RangeList], manifest: Manifest
    ) -> bool: ...

    def refuse(self, handle: Handle, reason: str, retryable: bool) -> None: ...

    def admit(self, handle: Handle) -> bool: ...

    def reject(self, handle: Handle, reason: str) -> None: ...


class Reception:
    """`tell` takes messages for the worker."""

    def __init__(self, landing: Landing, tell: Callable[[Message], None]) -> None:
        self._landing = landing
        self._tell = tell
        self._offers: dict[Handle, Manifest] = {}
        self._verified: dict[Handle, Verified] = {}

    def on_event(self, event: ReceiverEvent) -> None:
        if isinstance(event, Denied):
            return  # nothing that the worker could answer
        message: Message = {"h": list(event.handle), "key": list(event.key)}
        match event:
            case Offered():
                self._offers[event.handle] = event.manifest
                message.update(
                    op="offered", manifest=event.manifest.to_json(), identity=event.identity
                )
            case Withdrawn():
                self._offers.pop(event.handle, None)
                message.update(op="withdrawn", reason=event.reason)
            case Verified():
                self._verified[event.handle] = event
                message.update(
                    op="verified",
                    identity=event.identity,
                    first_token=event.commit.first_token,
                    meta=event.commit.meta,
                )
            case Aborted():
                self._verified.pop(event.handle, None)
                message.update(op="aborted", reason=event.reason)
        self._tell(message)

    # --- what the worker answers -------------------------------------------------------------

    def grant(self, message: Message) -> None:
        handle = _handle(message)
        manifest = self._offers.pop(handle, None)
        granted = False
        if manifest is not None:
            destinations = {
                item.region: RangeList.from_flat(numbers)
                for item, numbers in zip(manifest.regions, message["destinations"], strict=True)
            }
            granted = self._landing.grant(handle, destinations, manifest)
        if not granted:
            self._tell({"op": "aborted", "h": message["h"], "reason": "no longer wanted"})

    def refuse(self, message: Message) -> None:
        handle = _handle(message)
        self._offers.pop(handle, None)
        self._landing.refuse(handle, message["reason"], message["retryable"])

    def admit(self, message: Message) -> Verified | None:
        """The worker has taken the cache over. None: too late, it is no longer offered."""
        handle = _handle(message)
        event = self._verified.pop(handle, None)
        return event if event is not None and self._landing.admit(handle) else None

    def reject(self, message: Message) -> None:
        self._landing.reject(_handle(message), message["reason"])


def _handle(message: Message) -> Handle:
    return message["h"][0], message["h"][1]
