"""The network of a campaign: wires between clusters, and streams that behave as TCP's do.

A stream delivers whole frames in order or breaks; frames of different streams overtake each other.
A wire has a rate, a delay, an up and a down; what is sent while it is down waits. Beyond what TCP
can do, frames may be doubled and have a bit flipped: the protocol must bear that too.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: Between the arrivals of two chunks on one stream: the second waits until the first is written.
GAP_S = 0.0044
#: Frames never arrive at the very same time on streams that were written at the same time.
JITTER_S = 0.002
RETRANSMISSION_S = 0.25

Arrive = Callable[[bytes], None]
Sent = Callable[[], None]
_Frame = tuple["Stream", bytes, Arrive, Sent | None]


@dataclass(slots=True)
class Books:
    """Bytes that streams were given, and what became of them."""

    sent: int = 0
    received: int = 0
    lost: int = 0


@dataclass(slots=True)
class Odds:
    """Probabilities of what can happen to a frame."""

    damage: float = 0.0
    double: float = 0.0
    cut: float = 0.0


@dataclass(slots=True)
class Wire:
    """One direction between two clusters, or inside one. Bits and seconds."""

    rate_bps: float
    delay_s: float
    dice: random.Random
    odds: Odds
    books: Books
    loss: float = 0.0
    carried: int = 0
    _up: bool = True
    _slowdown: float = 1.0
    _queue: deque[_Frame] = field(default_factory=deque)
    _head: _Frame | None = None
    _left_bits: float = 0.0
    _since_s: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    @property
    def up(self) -> bool:
        return self._up

    @property
    def slowdown(self) -> float:
        return self._slowdown

    def set_up(self, up: bool) -> None:
        """What waits while it is down leaves afterwards, in the order in which it came."""
        self._change(up, self._slowdown)

    def set_slowdown(self, slowdown: float) -> None:
        self._change(self._up, slowdown)

    def carry(self, stream: Stream, data: bytes, arrive: Arrive, sent: Sent | None) -> None:
        self._queue.append((stream, data, arrive, sent))
        if self._head is None:
            self._next()

    def _change(self, up: bool, slowdown: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            now_s = asyncio.get_running_loop().time()
            self._left_bits -= (now_s - self._since_s) * self.rate_bps / self._slowdown
        self._up, self._slowdown = up, slowdown
        if self._head is None:
            self._next()
        else:
            self._run()

    def _next(self) -> None:
        while self._up and self._queue:
            head = self._queue.popleft()
            if head[0].alive:
                self._head = head
                self._left_bits = 8.0 * len(head[1])
                self._run()
                return

    def _run(self) -> None:
        if self._up:
            loop = asyncio.get_running_loop()
            self._since_s = loop.time()
            left_s = max(0.0, self._left_bits) * self._slowdown / self.rate_bps
            self._timer = loop.call_later(left_s, self._left)

    def _left(self) -> None:
        """The head has left: it is on its way for the delay, and perhaps a retransmission."""
        assert self._head is not None
        stream, data, arrive, sent = self._head
        self._head = self._timer = None
        if stream.alive:
            loop = asyncio.get_running_loop()
            self.carried += len(data)
            arrival_s = loop.time() + self.delay_s + self.dice.random() * JITTER_S
            if self.loss and self.dice.random() < self.loss:
                arrival_s += RETRANSMISSION_S * (1 + self.dice.random())
            stream.last_s = arrival_s = max(arrival_s, stream.last_s + stream.gap_s)
            loop.call_at(arrival_s, stream.arrived, data, arrive)
            if sent is not None:
                sent()
        if self._head is None:
            self._next()


class Stream:
    """One direction of one connection. `on_cut` is called once, when it breaks."""

    __slots__ = ("alive", "flying", "gap_s", "last_s", "on_cut", "wire")

    def __init__(self, wire: Wire, on_cut: Callable[[], None], gap_s: float = 0.0) -> None:
        self.wire = wire
        self.alive = True
        self.flying = 0
        self.last_s = 0.0
        self.gap_s = gap_s
        self.on_cut = on_cut

    def send(self, data: bytes, arrive: Arrive, sent: Sent | None = None) -> None:
        """`sent`: the last byte has left this side's memory. Neither is called on a broken one."""
        if not self.alive:
            return
        odds, dice = self.wire.odds, self.wire.dice
        copies = 1
        if odds.damage and dice.random() < odds.damage:
            at = dice.randrange(len(data))
            flipped = bytes([data[at] ^ 1 << dice.randrange(8)])
            data = data[:at] + flipped + data[at + 1 :]
        if odds.double and dice.random() < odds.double:
            copies = 2
        for copy in range(copies):
            self.wire.books.sent += len(data)
            self.flying += len(data)
            self.wire.carry(self, data, arrive, None if copy else sent)
        if odds.cut and dice.random() < odds.cut:
            asyncio.get_running_loop().call_later(0.01 * dice.random(), self.cut)

    def arrived(self, data: bytes, arrive: Arrive) -> None:
        if self.alive:
            self.flying -= len(data)
            self.wire.books.received += len(data)
            arrive(data)

    def cut(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self.wire.books.lost += self.flying
        self.flying = 0
        self.on_cut()
