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

    Stale heap entries are dropped when they surface, so an update is one push.
    """

    __slots__ = ("_cost", "_heap", "_usable", "_version")

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._version: list[int] = []
        self._usable: list[bool] = []
        self._heap: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._cost)

    def add(self, cost: float = 0.0) -> int:
        key = len(self._cost)
        self._cost.append(cost)
        self._version.append(0)
        self._usable.append(True)
        heapq.heappush(self._heap, (cost, key, 0))
        return key

    def cost(self, key: int) -> float:
        return self._cost[key]

    def usable(self, key: int) -> bool:
        return self._usable[key]

    def update(self, key: int, cost: float) -> None:
        self._cost[key] = cost
        version = self._version[key] = self._version[key] + 1
        if self._usable[key]:
            heapq.heappush(self._heap, (cost, key, version))

    def set_usable(self, key: int, usable: bool) -> None:
        self._usable[key] = usable
        self.update(key, self._cost[key])

    def least(self) -> int:
        """The usable key of least (cost, key); -1 when there is none."""
        heap = self._heap
        while heap:
            _, key, version = heap[0]
            if version == self._version[key] and self._usable[key]:
                return key
            heapq.heappop(heap)
        return -1


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
        return max(0.0, self._order.cost(key) - now_s)

    def usable(self, key: int) -> bool:
        return self._order.usable(key)

    def set_usable(self, key: int, usable: bool) -> None:
        self._order.set_usable(key, usable)

    def assign(self, key: int, now_s: float, work_s: float) -> None:
        self.queued[key] += 1
        self._order.update(key, max(now_s, self._order.cost(key)) + work_s)

    def settle(self, key: int, now_s: float, error_s: float) -> None:
        """A prefill of the instance ended, `error_s` later than predicted work said."""
        self.queued[key] -= 1
        if self.queued[key] == 0:
            self._order.update(key, min(self._order.cost(key), now_s))
        elif error_s:
            self._order.update(key, self._order.cost(key) + error_s)


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
