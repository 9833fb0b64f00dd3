"""One KV cache on its way: what has been produced of it, and what has left."""

from __future__ import annotations

import asyncio
from enum import IntEnum
from typing import Protocol


class Phase(IntEnum):
    """What a flow asks of the link."""

    HELD = 0  # nothing: no memory is granted at the destination yet
    IDLE = 1  # nothing: all that was produced has left
    PACED = 2  # its production rate: it has caught up and bytes leave as they are produced
    BACKLOG = 3  # all it can get: produced bytes wait
    SENT = 4  # nothing: the last byte has left
    ENDED = 5  # nothing: delivered or aborted


# Looked up several times an event; an enumeration's attributes are slow to find.
_IDLE, _PACED, _BACKLOG = Phase.IDLE, Phase.PACED, Phase.BACKLOG
_NEVER = float("inf")


class FlowOwner(Protocol):
    """Told once how its flow ended, unless it aborted the flow itself."""

    @property
    def key(self) -> tuple[int, int] | None:
        """The request whose cache flows, and which attempt; None for no request's."""
        ...

    def flow_delivered(self, flow: Flow) -> None: ...

    def flow_failed(self, flow: Flow, why: str) -> None: ...


class Flow:
    """Bytes produced over time, and sent at the rate that the link gives. Times in loop seconds.

    Production is one piece at a time: from `begin_s` on at `pace` bytes/s until `end_s`, when
    `lump` bytes come at once (the last layer's). `base` bytes were produced before the piece.
    """

    __slots__ = (
        "base",
        "begin_s",
        "cap",
        "delivered_s",
        "end_s",
        "lump",
        "opened_s",
        "owner",
        "pace",
        "phase",
        "rate",
        "rates",
        "sent",
        "sent_s",
        "since_s",
        "timer",
        "total",
    )

    def __init__(
        self, total: float, cap: float, owner: FlowOwner, now_s: float, held: bool
    ) -> None:
        self.total = total
        self.cap = cap
        self.owner = owner
        self.phase = Phase.HELD if held else Phase.IDLE
        self.opened_s = self.since_s = now_s
        self.begin_s = self.end_s = now_s
        self.base = self.pace = self.lump = 0.0
        self.sent = self.rate = 0.0
        self.sent_s = self.delivered_s = float("nan")
        self.timer: asyncio.TimerHandle | None = None
        self.rates: list[tuple[float, float]] | None = None

    def produced(self, now_s: float) -> float:
        """Bytes produced by `now_s`, which is not before the current piece was set."""
        if now_s >= self.end_s:
            return self.base + self.pace * (self.end_s - self.begin_s) + self.lump
        if now_s <= self.begin_s:
            return self.base
        return self.base + self.pace * (now_s - self.begin_s)

    def backlog(self, now_s: float) -> float:
        """Bytes produced and not yet sent, by `now_s`, which is not before the last change."""
        return max(0.0, self.produced(now_s) - self.sent_at(now_s))

    def sent_at(self, now_s: float) -> float:
        """Bytes sent by `now_s`, which is not before the last change."""
        return self.sent + self.rate * (now_s - self.since_s)

    def settle(self, now_s: float) -> None:
        """Count what was sent until now, before the rate changes."""
        self.sent += self.rate * (now_s - self.since_s)
        self.since_s = now_s

    def note_rate(self, now_s: float, rate: float) -> None:
        """Keep the series of (time, bits/s) at which the rate changed."""
        rates = self.rates
        if rates is None:
            return
        if rates and rates[-1][0] == now_s:
            rates.pop()
        if rate * 8 != (rates[-1][1] if rates else 0.0):
            rates.append((now_s, rate * 8))

    def set_production(
        self, now_s: float, begin_s: float, end_s: float, paced: float, lump: float
    ) -> None:
        """Replace what is left of the current piece by one that begins no earlier than now."""
        self.base = self.produced(now_s)
        self.begin_s, self.end_s = begin_s, end_s
        if end_s > begin_s:
            self.pace, self.lump = paced / (end_s - begin_s), lump
        else:
            self.pace, self.lump = 0.0, paced + lump

    def next_change_s(self, now_s: float) -> float:
        """When the phase of a flow that is settled until now changes at the present rate; infinite
        if only others can change it."""
        phase = self.phase
        if phase is _PACED:
            return self.end_s
        if phase is _IDLE:
            if now_s < self.begin_s and self.pace > 0.0:
                return self.begin_s
            return self.end_s if now_s < self.end_s else _NEVER
        if phase is not _BACKLOG or self.rate <= 0.0:
            return _NEVER
        rate, waiting = self.rate, max(0.0, self.produced(now_s) - self.sent)
        if now_s < self.begin_s:
            empty_s = now_s + waiting / rate
            if empty_s <= self.begin_s:
                return empty_s
            waiting -= rate * (self.begin_s - now_s)
            now_s = self.begin_s
        if now_s < self.end_s:
            if rate > self.pace:
                empty_s = now_s + waiting / (rate - self.pace)
                if empty_s < self.end_s:
                    return empty_s
            left = self.pace * (self.end_s - now_s) + self.lump
            return max(self.end_s, now_s + (waiting + left) / rate)
        return now_s + waiting / rate
