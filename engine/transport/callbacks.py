"""What a worker and its data plane say to each other about whole caches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.transport.messages import Key, Manifest
from engine.transport.regions import Region

#: Region -> the (offset, length) ranges of the arena that it is to fill, in order.
Destinations = Mapping[Region, Sequence[Sequence[int]]]


class Refusal(Exception):
    """Raised by `on_offer` to refuse a transfer. `retryable`: another time or place may do."""

    def __init__(self, reason: str, retryable: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class Arrival:
    """A verified cache, as its sender committed it."""

    manifest: Manifest
    first_token: int
    meta: Mapping[str, Any]
    identity: str


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What a receiving worker does. Once `on_offer` has returned, exactly one of the others ends
    the matter: `on_commit` returning, or `on_abort`.

    on_offer: reserve memory for every region of the manifest, all or nothing, in bounded time;
      returns the ranges of each. Raise `Refusal` where it cannot be. Cancelled when the sender no
      longer wants it: then nothing may stay reserved.
    on_commit: the cache is whole; take it over. An exception rejects it, and `on_abort` follows.
    on_abort: nobody writes there any more; free it.
    """

    on_offer: Callable[[Key, Manifest], Awaitable[Destinations]]
    on_commit: Callable[[Key, Arrival], Awaitable[None]]
    on_abort: Callable[[Key], None]


@dataclass(frozen=True, slots=True)
class TransferStats:
    """wire_bytes: headers and resends included. seconds: from offer to commit. resent: chunks."""

    wire_bytes: int
    seconds: float
    resent: int
    digest: int
