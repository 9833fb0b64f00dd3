"""One direction of an emulated link as arithmetic on a clock: queue, rate, delay, jitter.

No I/O and no clock of its own: callers pass `now_s`. Departures are computed, not observed, so a
late wake-up delays what it releases but never slows the link.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Generic, TypeVar

from harness.links.shape import Shape

T = TypeVar("T")

#: Two wake-ups of a Python process, one direction; `prfaas link probe` shows what remains.
HANDLING_S = 0.1e-3


class Wire(Generic[T]):
    """A drop-tail queue, a serialiser at `rate_bps` and a delay line, in this order.

    `handling_s` is what the emulator's own wake-ups add to each item on an idle host; it is taken
    off the delay, so that the delay that packets see is the specified one.
    Items keep their order, whatever the jitter. The queue does not count the item on the wire.
    """

    __slots__ = (
        "_delay_line",
        "_finish_s",
        "_handling_s",
        "_last_due_s",
        "_queue",
        "_random",
        "backlog_bytes",
        "dropped_packets",
        "sent_bytes",
        "sent_packets",
        "shape",
    )

    def __init__(self, shape: Shape, seed: int, handling_s: float = 0.0) -> None:
        self.shape = shape
        self._handling_s = handling_s
        self._random = random.Random(seed)
        self._queue: deque[tuple[int, int, T]] = deque()
        self._delay_line: deque[tuple[float, T]] = deque()
        self._finish_s = 0.0
        self._last_due_s = 0.0
        self.backlog_bytes = 0
        self.sent_bytes = 0
        self.sent_packets = 0
        self.dropped_packets = 0

    def room_bytes(self) -> int:
        """Bytes that the queue would still take; the item being serialised does not count."""
        waiting = self.backlog_bytes - (self._queue[0][0] if self._queue else 0)
        return self.shape.queue_bytes - waiting

    def offer(self, now_s: float, wire_bytes: int, packets: int, item: T) -> None:
        """Append `item`, which takes `wire_bytes` of the link. Callers have asked for room."""
        self.advance(now_s)
        if not self._queue:
            start_s = max(now_s, self._finish_s)
            self._finish_s = start_s + wire_bytes * 8 / self.shape.rate_bps
        self._queue.append((wire_bytes, packets, item))
        self.backlog_bytes += wire_bytes

    def advance(self, now_s: float) -> None:
        """Move everything whose last bit has left by `now_s` onto the delay line."""
        queue, shape = self._queue, self.shape
        delay_s = self._delay_s()
        while queue and self._finish_s <= now_s:
            wire_bytes, packets, item = queue.popleft()
            self.backlog_bytes -= wire_bytes
            self.sent_bytes += wire_bytes
            self.sent_packets += packets
            due_s = self._finish_s + delay_s
            if shape.jitter_s:
                due_s += self._random.uniform(-shape.jitter_s, shape.jitter_s)
            self._last_due_s = max(self._last_due_s, due_s)
            self._delay_line.append((self._last_due_s, item))
            if queue:
                self._finish_s += queue[0][0] * 8 / shape.rate_bps

    def take_due(self, now_s: float) -> list[T]:
        """Items that arrive at the far end by `now_s`, in order."""
        self.advance(now_s)
        due = []
        while self._delay_line and self._delay_line[0][0] <= now_s:
            due.append(self._delay_line.popleft()[1])
        return due

    def next_s(self) -> float | None:
        """When `take_due` will next have something, if nothing more is offered; None: never."""
        if self._delay_line:
            return self._delay_line[0][0]
        if self._queue:
            return self._finish_s + max(0.0, self._delay_s() - self.shape.jitter_s)
        return None

    def next_departure_s(self) -> float | None:
        """When the queue will next have more room; None when it is empty."""
        return self._finish_s if self._queue else None

    def reshape(self, now_s: float, shape: Shape) -> None:
        """Change the shape at `now_s`; the item being serialised goes on at the new rate."""
        self.advance(now_s)
        if self._queue:
            left_s = self._finish_s - now_s
            self._finish_s = now_s + left_s * self.shape.rate_bps / shape.rate_bps
        self.shape = shape

    def _delay_s(self) -> float:
        return max(0.0, self.shape.delay_s - self._handling_s)
