"""Caches that were delivered (or are arriving) and wait to be decoded."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache.pool import Lease
from engine.worker.errors import UnknownRequest
from engine.worker.messages import Key

#: A delivered cache that nobody decodes or abandons is dropped after so long.
EXPIRY_S = 300.0

#: Abandoned attempts remembered, so that one that arrives later is refused.
REMEMBERED = 4096


@dataclass(slots=True, eq=False)
class Arrival:
    """One attempt's cache. `first_token` is -1 until the whole cache is there and verified."""

    key: Key
    prompt: list[int]
    tenant: str
    lease: Lease
    reserved_s: float
    first_token: int = -1


class Arrivals:
    """By (request, attempt); each one's lease leaves by exactly one of `take` and `drop`.
    `on_change` hears of each that left."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._held: dict[Key, Arrival] = {}
        self._abandoned: OrderedDict[Key, None] = OrderedDict()
        self.expired = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def abandoned(self, key: Key) -> bool:
        return key in self._abandoned

    def reserve(self, key: Key, prompt: list[int], tenant: str, lease: Lease) -> Arrival:
        """Memory was taken for a cache that will arrive."""
        assert key not in self._held
        arrival = Arrival(key, prompt, tenant, lease, time.monotonic())
        self._held[key] = arrival
        return arrival

    def deliver(self, key: Key, first_token: int) -> Arrival:
        """The cache is whole: share its full blocks, let it be decoded. Raises UnknownRequest."""
        arrival = self._held.get(key)
        if arrival is None:
            raise UnknownRequest(f"no cache reserved for {key.request_id} attempt {key.attempt}")
        arrival.lease.commit(len(arrival.prompt))
        arrival.first_token = first_token
        return arrival

    def take(self, key: Key) -> Arrival:
        """The delivered cache, whose lease the caller now owns. Raises UnknownRequest."""
        arrival = self._held.get(key)
        if arrival is None or arrival.first_token < 0:
            raise UnknownRequest(
                f"no cache of {key.request_id} attempt {key.attempt} was delivered"
            )
        del self._held[key]
        self._on_change()
        return arrival

    def drop(self, key: Key) -> None:
        """Release what is held for `key`, if anything. Nothing may be writing to it any more."""
        arrival = self._held.pop(key, None)
        if arrival is not None:
            arrival.lease.release()
            self._on_change()

    def abandon(self, key: Key) -> None:
        """Nobody will decode it: release it if it is whole; else refuse it when it comes, or is
        whole. A cache that is being written stays reserved until its transfer has ended.
        """
        self._abandoned[key] = None
        while len(self._abandoned) > REMEMBERED:
            self._abandoned.popitem(last=False)
        arrival = self._held.get(key)
        if arrival is not None and arrival.first_token >= 0:
            self.drop(key)

    def expire(self, now_s: float) -> None:
        """Drop delivered caches that nobody came for."""
        for arrival in list(self._held.values()):
            if now_s - arrival.reserved_s <= EXPIRY_S:
                break
            if arrival.first_token >= 0:
                self.abandon(arrival.key)
                self.expired += 1
