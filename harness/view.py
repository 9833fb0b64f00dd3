"""What the control plane knows: its own accounting of instances, and measured link signals.

Nothing here is the model's truth. Work is predicted from the device profile when it is assigned and
corrected by what is observed; a pool's answer costs O(log n) in its instances.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from harness.ports import LinkSignals, Role
from workloads.request import Request


class WorkModel(Protocol):
    """The part of a device profile that predictions need (see `harness.profiles`)."""

    @property
    def n_layers(self) -> int: ...

    def prefill_s(self, input_tokens: int, cached_tokens: int = 0) -> float: ...

    def kv_bytes(self, tokens: int, held_tokens: int = 0) -> float: ...


_NEVER = float("inf")


class LeastFirst:
    """Keys 0..n-1 with a changing cost each; the cheapest usable one in O(log n).

    An update is one push or replacement. Stale heap entries are dropped when they surface, and all
    at once when they are most of the heap, so it stays O(n) however many updates there were.
    """

    __slots__ = ("_current", "_heap", "_limit", "costs")

    def __init__(self) -> None:
        #: By key, to be read; `update` changes them.
        self.costs: list[float] = []
        #: The heap entry that counts for each key, by identity; None while it is not usable.
        self._current: list[tuple[float, int] | None] = []
        self._heap: list[tuple[float, int]] = []
        self._limit = 64

    def __len__(self) -> int:
        return len(self.costs)

    def add(self, cost: float = 0.0) -> int:
        key = len(self.costs)
        entry = (cost, key)
        self.costs.append(cost)
        self._current.append(entry)
        heapq.heappush(self._heap, entry)
        self._limit = 64 + 4 * len(self.costs)
        return key

    def usable(self, key: int) -> bool:
        return self._current[key] is not None

    def n_usable(self) -> int:
        return sum(entry is not None for entry in self._current)

    def update(self, key: int, cost: float) -> None:
        self.costs[key] = cost
        heap, current = self._heap, self._current
        before = current[key]
        if before is None:
            return
        entry = current[key] = (cost, key)
        if heap and heap[0] is before:
            heapq.heapreplace(heap, entry)  # usual: work goes to the cheapest
        elif len(heap) < self._limit:
            heapq.heappush(heap, entry)
        else:
            heap[:] = [each for each in current if each is not None]
            heapq.heapify(heap)

    def set_usable(self, key: int, usable: bool) -> None:
        if not usable:
            self._current[key] = None
        elif self._current[key] is None:
            cost = self.costs[key]
            self._current[key] = (cost, key)
            self.update(key, cost)

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


class FewestFirst:
    """Keys 0..n-1 with a count each; the usable one of least (count, key).

    The keys of each count are the bits of one number, which stays in a processor's caches where a
    heap of thousands of entries does not. A change costs a step for each 30 keys, of about a
    nanosecond.
    """

    __slots__ = ("_keys", "_least", "_usable", "counts")

    def __init__(self) -> None:
        #: By key, to be read; `change` changes them.
        self.counts: list[int] = []
        #: By count: the usable keys that have it. No usable key has a count below `_least`.
        self._keys: dict[int, int] = {}
        self._least = 0
        self._usable = 0

    def add(self) -> int:
        key = len(self.counts)
        self.counts.append(0)
        self.set_usable(key, True)
        return key

    def usable(self, key: int) -> bool:
        return bool(self._usable >> key & 1)

    def n_usable(self) -> int:
        return self._usable.bit_count()

    def change(self, key: int, by: int) -> None:
        counts = self.counts
        before = counts[key]
        counts[key] = now = before + by
        bit = 1 << key
        if self._usable & bit:
            keys = self._keys
            keys[before] ^= bit
            keys[now] = keys.get(now, 0) | bit
            if now < self._least:
                self._least = now

    def set_usable(self, key: int, usable: bool) -> None:
        if self.usable(key) != usable:
            bit, count, keys = 1 << key, self.counts[key], self._keys
            self._usable ^= bit
            keys[count] = keys.get(count, 0) ^ bit
            if count < self._least:
                self._least = count

    def least(self) -> int:
        """-1 when no key is usable."""
        if not self._usable:
            return -1
        keys, least = self._keys, self._least
        found = keys.get(least)
        while not found:
            least += 1
            found = keys.get(least)
        self._least = least
        return (found & -found).bit_length() - 1


class Busy:
    """What is left of intervals that end, over `n` keys, at a time that only grows."""

    __slots__ = ("_end", "_heap", "_n", "_sum_s")

    def __init__(self, n: int) -> None:
        self._n = n
        self._end: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._sum_s = 0.0

    def until(self, key: int, end_s: float) -> None:
        """`key` is busy until `end_s`, whatever was said before."""
        self._sum_s += end_s - self._end.get(key, 0.0)
        self._end[key] = end_s
        heapq.heappush(self._heap, (end_s, key))

    def load(self, now_s: float) -> tuple[float, float]:
        """(mean time left, share of the keys that are busy)."""
        heap, end = self._heap, self._end
        while heap and heap[0][0] <= now_s:
            end_s, key = heapq.heappop(heap)
            if end.get(key) == end_s:
                self._sum_s -= end.pop(key)
        if not end:
            self._sum_s = 0.0
            return 0.0, 0.0
        return max(0.0, self._sum_s - now_s * len(end)) / self._n, len(end) / self._n


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
    key_of: dict[str, int] = field(default_factory=dict)
    #: Instances that left for another role, or are on their way there.
    away: set[int] = field(default_factory=set)
    _busy: Busy | None = None

    def add(self, name: str) -> int:
        self.names.append(name)
        self.queued.append(0)
        self._busy = None
        key = self.key_of[name] = self._order.add()
        return key

    def least(self) -> int:
        return self._order.least()

    def least_wait(self, now_s: float) -> tuple[int, float]:
        """The instance with the least predicted wait, and that wait; (-1, inf): none is usable."""
        order = self._order
        key = order.least()
        if key < 0:
            return -1, _NEVER
        wait_s = order.costs[key] - now_s
        return key, (wait_s if wait_s > 0.0 else 0.0)

    def wait_s(self, key: int, now_s: float) -> float:
        wait_s = self._order.costs[key] - now_s
        return wait_s if wait_s > 0.0 else 0.0

    def usable(self, key: int) -> bool:
        return self._order.usable(key)

    def n_usable(self) -> int:
        return self._order.n_usable()

    def set_usable(self, key: int, usable: bool) -> None:
        self._order.set_usable(key, usable)
        self._busy = None

    def load(self, now_s: float) -> tuple[float, float]:
        """(predicted work left in s, share that is busy), averaged over the usable instances.

        Unlike the least wait both are positive as soon as any instance is busy. The first call
        starts the accounts that keep it O(log n) amortised.
        """
        busy = self._busy
        if busy is None:
            order = self._order
            usable = [key for key in range(len(order)) if order.usable(key)]
            busy = self._busy = Busy(len(usable))
            for key in usable:
                busy.until(key, order.costs[key])
        return busy.load(now_s)

    def assign(self, key: int, now_s: float, work_s: float) -> None:
        self.queued[key] += 1
        empty_s = self._order.costs[key]
        self._empty_at(key, (now_s if now_s > empty_s else empty_s) + work_s)

    def _empty_at(self, key: int, empty_s: float) -> None:
        order = self._order
        order.update(key, empty_s)
        if self._busy is not None and order.usable(key):
            self._busy.until(key, empty_s)

    def settle(self, key: int, now_s: float, error_s: float) -> None:
        """A prefill of the instance ended, `error_s` later than predicted work said."""
        queued = self.queued[key] = self.queued[key] - 1
        empty_s = self._order.costs[key]
        if queued == 0:
            if now_s < empty_s:
                self._empty_at(key, now_s)
        elif not -_EXACT_S < error_s < _EXACT_S:
            self._empty_at(key, empty_s + error_s)


@dataclass(slots=True)
class DecodePool:
    """The decode instances of one cluster, by the number of requests assigned to each."""

    cluster: str
    names: list[str] = field(default_factory=list)
    _order: FewestFirst = field(default_factory=FewestFirst)
    key_of: dict[str, int] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)

    def add(self, name: str) -> int:
        self.names.append(name)
        key = self.key_of[name] = self._order.add()
        return key

    def least(self) -> int:
        return self._order.least()

    def active(self, key: int) -> int:
        return self._order.counts[key]

    def usable(self, key: int) -> bool:
        return self._order.usable(key)

    def n_usable(self) -> int:
        return self._order.n_usable()

    def set_usable(self, key: int, usable: bool) -> None:
        self._order.set_usable(key, usable)

    def assign(self, key: int) -> None:
        self._order.change(key, 1)

    def settle(self, key: int) -> None:
        self._order.change(key, -1)


class PrefixHits(Protocol):
    """Which cluster and instance is thought to hold how much of a prompt (`harness.directory`).

    `hit_tokens` and `instance_tokens` count what a prefill could start from: whole blocks up to the
    deepest recurrent state, at most all but the last token. `held_tokens` counts attention blocks
    alone: they need not cross again.
    """

    def hit_tokens(self, cluster: str, request: Request) -> int: ...

    def instance_tokens(self, instance: str, request: Request) -> int: ...

    def holders(self, cluster: str, request: Request, most: int) -> Sequence[tuple[str, int]]:
        """Up to `most` instances of `cluster` with a prefix, the longest first; none where the
        instances of a cluster share one pool."""
        ...

    def held_tokens(self, cluster: str, request: Request) -> int: ...

    def instance_held_tokens(self, instance: str, request: Request) -> int: ...


#: What a link that is down is predicted to take, seconds: long, but a number that can be written.
_DOWN_S = 1e6


@dataclass(slots=True)
class Path:
    """One direction between clusters: what its monitor measured, and the bytes the router has
    promised to it. Bytes are the modelled system's; the link's own are `1 / byte_scale` of them.
    """

    signals: LinkSignals
    byte_scale: float = 1.0
    outstanding_bytes: float = 0.0

    @property
    def delay_s(self) -> float:
        """Half the least round trip that was seen."""
        return self.signals.min_rtt_s / 2

    def bytes_per_s(self) -> float:
        """What it carries: the rate, or what it really moves while saturated; inf before any
        measurement."""
        signals = self.signals
        if not signals.sampled_s:
            return float("inf")
        saturated = signals.verdict == "saturated" and signals.throughput_bps > 0.0
        rate_bps = min(signals.rate_bps, signals.throughput_bps) if saturated else signals.rate_bps
        return rate_bps * self.byte_scale / 8

    def sending_s(self, n_bytes: float) -> float:
        """Seconds that `n_bytes` occupy it."""
        rate = self.bytes_per_s()
        return n_bytes / rate if rate > 0.0 else _DOWN_S

    def crossing_s(self, n_bytes: float) -> tuple[float, float]:
        """Seconds until all that was promised so far has left, and then for `n_bytes` to leave."""
        rate = self.bytes_per_s()
        if rate > 0.0:
            return self.outstanding_bytes / rate, n_bytes / rate
        return _DOWN_S, _DOWN_S

    def copy_s(self, n_bytes: float) -> float:
        """Seconds to fetch `n_bytes` now: a request, then the bytes behind those on their way."""
        return self.sending_s(self.outstanding_bytes + n_bytes) + 2 * self.delay_s


@dataclass(slots=True)
class View:
    """Everything a policy may look at when it routes. `copies`: prefixes can be fetched from
    another cluster before a prefill.

    An instance takes work while it is not lost (what whoever watches it says, `set_lost`) and
    stands in a role (what changes of role say, `leave` and `enter`); neither undoes the other.
    """

    now_s: float
    prefill: dict[str, PrefillPool]
    decode: dict[str, DecodePool]
    links: dict[tuple[str, str], LinkSignals]
    directory: PrefixHits | None = None
    byte_scale: float = 1.0
    copies: bool = False
    #: Names of instances that are dead, or do not answer, and are not back yet.
    lost: set[str] = field(default_factory=set)
    #: Losses so far, and which of them was each instance's last.
    n_losses: int = 0
    last_loss: dict[str, int] = field(default_factory=dict)
    #: How often an instance began to take work, after a loss or in a new role.
    n_returns: int = 0
    _paths: dict[tuple[str, str], Path] = field(default_factory=dict)

    def set_lost(self, name: str, lost: bool) -> None:
        """`name` takes no work from now on, in no role; or it is back. Idempotent."""
        if lost and name not in self.lost:
            self.lost.add(name)
            self.n_losses += 1
            self.last_loss[name] = self.n_losses
        elif not lost:
            self.lost.discard(name)
        self._apply(name)

    def lost_since(self, n_losses: int, *names: str) -> bool:
        """Whether one of `names` was lost after `n_losses` was the count."""
        return any(self.last_loss.get(name, 0) > n_losses for name in names)

    def leave(self, cluster: str, name: str) -> None:
        """`name` takes no work in any role until it enters one."""
        for pool in (self.prefill.get(cluster), self.decode.get(cluster)):
            if pool is not None and name in pool.key_of:
                pool.away.add(pool.key_of[name])
        self._apply(name)

    def enter(self, cluster: str, name: str, role: Role) -> None:
        """`name` serves `role` and no other, as soon as it is not lost."""
        self.leave(cluster, name)
        pool = self.prefill[cluster] if role is Role.PREFILL else self.decode[cluster]
        key = pool.key_of.get(name)
        if key is None:
            pool.add(name)
        else:
            pool.away.discard(key)
        self._apply(name)

    def _apply(self, name: str) -> None:
        for pool in self._pools():
            key = pool.key_of.get(name)
            if key is not None:
                usable = name not in self.lost and key not in pool.away
                pool.set_usable(key, usable)
                self.n_returns += usable

    def _pools(self) -> Iterator[PrefillPool | DecodePool]:
        yield from self.prefill.values()
        yield from self.decode.values()

    def path(self, source: str, sink: str) -> Path | None:
        """The account of a link; None where there is none."""
        ends = (source, sink)
        path = self._paths.get(ends)
        if path is None and ends in self.links:
            path = self._paths[ends] = Path(self.links[ends], self.byte_scale)
        return path
