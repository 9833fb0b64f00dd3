"""The control plane's books: work given to the instances of a pool, bytes promised to a link.

Nothing here is the model's truth. Work is predicted from the device profile when it is assigned and
corrected by what is observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from harness.ordering import Busy
from harness.ports import LinkSignals
from native import require

try:
    require("harness._ordering")
    from harness._ordering import FewestFirst, LeastFirst
except ImportError:
    from harness.ordering import FewestFirst, LeastFirst


class WorkModel(Protocol):
    """The part of a device profile that predictions need (see `harness.profiles`)."""

    @property
    def n_layers(self) -> int: ...

    def prefill_s(self, input_tokens: int, cached_tokens: int = 0) -> float: ...

    def kv_bytes(self, tokens: int, held_tokens: int = 0) -> float: ...


_NEVER = float("inf")

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
    #: Seconds that the prefills which have ended on each instance took.
    busy_s: list[float] = field(default_factory=list)
    key_of: dict[str, int] = field(default_factory=dict)
    #: Instances that left for another role, or are on their way there.
    away: set[int] = field(default_factory=set)
    _busy: Busy | None = None

    def add(self, name: str) -> int:
        self.names.append(name)
        self.queued.append(0)
        self.busy_s.append(0.0)
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
        wait_s = order.cost(key) - now_s
        return key, (wait_s if wait_s > 0.0 else 0.0)

    def wait_s(self, key: int, now_s: float) -> float:
        wait_s = self._order.cost(key) - now_s
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
                busy.until(key, order.cost(key))
        return busy.load(now_s)

    def assign(self, key: int, now_s: float, work_s: float) -> None:
        self.queued[key] += 1
        empty_s = self._order.cost(key)
        self._empty_at(key, (now_s if now_s > empty_s else empty_s) + work_s)

    def _empty_at(self, key: int, empty_s: float) -> None:
        order = self._order
        order.update(key, empty_s)
        if self._busy is not None and order.usable(key):
            self._busy.until(key, empty_s)

    def settle(self, key: int, now_s: float, predicted_s: float, took_s: float) -> None:
        """A prefill of the instance ended after `took_s` of work, not the `predicted_s` that were
        assigned; 0: what is not done of it by now will not be."""
        self.busy_s[key] += took_s
        error_s = took_s - predicted_s
        queued = self.queued[key] = self.queued[key] - 1
        empty_s = self._order.cost(key)
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
    #: Of the requests assigned to each, prompt and output: what its cache is, or is to be, of.
    tokens: list[int] = field(default_factory=list)
    _order: FewestFirst = field(default_factory=FewestFirst)
    key_of: dict[str, int] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)

    def add(self, name: str) -> int:
        self.names.append(name)
        self.tokens.append(0)
        key = self.key_of[name] = self._order.add()
        return key

    def least(self) -> int:
        return self._order.least()

    def active(self, key: int) -> int:
        return self._order.count(key)

    def usable(self, key: int) -> bool:
        return self._order.usable(key)

    def n_usable(self) -> int:
        return self._order.n_usable()

    def set_usable(self, key: int, usable: bool) -> None:
        self._order.set_usable(key, usable)

    def assign(self, key: int, tokens: int) -> None:
        self.tokens[key] += tokens
        self._order.change(key, 1)

    def settle(self, key: int, tokens: int) -> None:
        self.tokens[key] -= tokens
        self._order.change(key, -1)


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
