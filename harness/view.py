"""What the control plane knows: its own accounting of instances, and measured link signals.

Nothing here is the model's truth. Work is predicted from the device profile when it is assigned and
corrected by what is observed; a pool's answer costs O(log n) in its instances.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol

from harness.ports import LinkSignals


class WorkModel(Protocol):
    """The part of a device profile that predictions need (see `harness.profiles`)."""

    def prefill_s(self, input_tokens: int, cached_tokens: int = 0) -> float: ...


class LeastFirst:
    """Keys 0..n-1 with a changing cost each; the cheapest usable one in O(log n).

    An update is one push. Stale heap entries are dropped when they surface, and all at once when
    they are most of the heap, so it stays O(n) however many updates there were.
    """

    __slots__ = ("_cost", "_current", "_heap", "_limit")

    def __init__(self) -> None:
        self._cost: list[float] = []
        #: The heap entry that counts for each key, by identity; None while it is not usable.
        self._current: list[tuple[float, int] | None] = []
        self._heap: list[tuple[float, int]] = []
        self._limit = 64

    def __len__(self) -> int:
        return len(self._cost)

    def add(self, cost: float = 0.0) -> int:
        key = len(self._cost)
        entry = (cost, key)
        self._cost.append(cost)
        self._current.append(entry)
        heapq.heappush(self._heap, entry)
        self._limit = 64 + 4 * len(self._cost)
        return key

    def cost(self, key: int) -> float:
        return self._cost[key]

    def usable(self, key: int) -> bool:
        return self._current[key] is not None

    def update(self, key: int, cost: float) -> None:
        self._cost[key] = cost
        if self._current[key] is not None:
            self._push(key, cost)

    def set_usable(self, key: int, usable: bool) -> None:
        if not usable:
            self._current[key] = None
        elif self._current[key] is None:
            self._push(key, self._cost[key])

    def least(self) -> int:
        """The usable key of least (cost, key); -1 when there is none."""
        heap, current = self._heap, self._current
        while heap:
            entry = heap[0]
            key = entry[1]
            if current[key] is entry:
                return key
            heapq.heappop(heap)
        return -1

    def _push(self, key: int, cost: float) -> None:
        entry = (cost, key)
        self._current[key] = entry
        heap = self._heap
        if len(heap) < self._limit:
            heapq.heappush(heap, entry)
        else:
            heap[:] = [current for current in self._current if current is not None]
            heapq.heapify(heap)


#: Predictions are taken to be right when they are this close (rounding of times), seconds.
_EXACT_S = 1e-9


@dataclass(slots=True)
class PrefillPool:
    """The prefill instances of one cluster as the router accounts for them.

    An instance's cost is the time at which its queue is predicted to be empty. Assigning to the
    least of these is the same as one FIFO queue for the pool when predictions are right.
    """

    cluster: str
    profile: WorkModel
    names: list[str] = field(default_factory=list)
    _order: LeastFirst = field(default_factory=LeastFirst)
    queued: list[int] = field(default_factory=list)

    def add(self, name: str) -> int:
        self.names.append(name)
        self.queued.append(0)
        return self._order.add()

    def least(self) -> int:
        return self._order.least()

    def wait_s(self, key: int, now_s: float) -> float:
        wait_s = self._order.cost(key) - now_s
        return wait_s if wait_s > 0.0 else 0.0

    def usable(self, key: int) -> bool:
        return self._order.usable(key)

    def set_usable(self, key: int, usable: bool) -> None:
        self._order.set_usable(key, usable)

    def assign(self, key: int, now_s: float, work_s: float) -> None:
        self.queued[key] += 1
        order = self._order
        empty_s = order.cost(key)
        order.update(key, (now_s if now_s > empty_s else empty_s) + work_s)

    def settle(self, key: int, now_s: float, error_s: float) -> None:
        """A prefill of the instance ended, `error_s` later than predicted work said."""
        queued = self.queued[key] = self.queued[key] - 1
        empty_s = self._order.cost(key)
        if queued == 0:
            if now_s < empty_s:
                self._order.update(key, now_s)
        elif not -_EXACT_S < error_s < _EXACT_S:
            self._order.update(key, empty_s + error_s)


@dataclass(slots=True)
class DecodePool:
    """The decode instances of one cluster; a cost is the number of requests assigned."""

    cluster: str
    names: list[str] = field(default_factory=list)
    _order: LeastFirst = field(default_factory=LeastFirst)

    def add(self, name: str) -> int:
        self.names.append(name)
        return self._order.add()

    def least(self) -> int:
        return self._order.least()

    def active(self, key: int) -> int:
        return int(self._order.cost(key))

    def usable(self, key: int) -> bool:
        return self._order.usable(key)

    def set_usable(self, key: int, usable: bool) -> None:
        self._order.set_usable(key, usable)

    def assign(self, key: int) -> None:
        self._order.update(key, self._order.cost(key) + 1)

    def settle(self, key: int) -> None:
        self._order.update(key, self._order.cost(key) - 1)


class PrefixHits(Protocol):
    """Which cluster (and instance) holds how much of a prompt; see `harness.directory`."""

    def hit_tokens(self, cluster: str, request: object) -> int: ...


@dataclass(slots=True)
class View:
    """Everything a policy may look at when it routes."""

    now_s: float
    prefill: dict[str, PrefillPool]
    decode: dict[str, DecodePool]
    links: dict[tuple[str, str], LinkSignals]
    directory: PrefixHits | None = None
