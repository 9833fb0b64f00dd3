"""Sends a schedule's requests through a target, and accounts for every one of them.

Open loop: each request leaves at its scheduled time, on the loop's absolute clock, so lateness
never adds up. A concurrency cap holds requests back; the wait counts, since latencies are from the
schedule. Closed loop (no rate, only a cap): a request's scheduled time *is* when its place under
the cap came free.

No task is made for a request: one coroutine sends, and the target's callbacks end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from harness.load.flight import Flight
from harness.load.schedule import OpenSchedule
from harness.replay import ReplayCounts
from harness.targets.base import Target
from results.records import Status

#: Sends in one go before answers are looked at again.
_BURST = 32


class Driver:
    """One phase at a time: `run` returns when every request has ended or was counted unsent."""

    def __init__(
        self,
        target: Target,
        on_flight: Callable[[Flight], None],
        *,
        max_concurrency: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._target = target
        self._on_flight = on_flight
        self._cap = max_concurrency
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._stopping = False
        self._in_flight: dict[int, Flight] = {}
        self._free_s: deque[float] = deque()
        self._schedule = OpenSchedule(iter(()))
        self._origin_s = 0.0
        self._seed = 0
        self.counts = ReplayCounts()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def stop(self) -> None:
        """Send nothing more; what is under way may finish."""
        self._stopping = True
        self._awake()

    async def run(
        self,
        schedule: OpenSchedule,
        phase: str,
        origin_s: float,
        *,
        closed: bool = False,
        until_s: float | None = None,
        drain_s: float | None = None,
        seed: int = 0,
    ) -> ReplayCounts:
        """Send `schedule` from `origin_s` on. `closed` needs a cap.

        `until_s`: a closed loop offers nothing more from then on (s of the phase). `drain_s` bounds
        the wait after the last send; what is still under way then fails. `seed` is of the prompts.
        """
        self.counts = counts = ReplayCounts()
        self._schedule, self._origin_s, self._seed = schedule, origin_s, seed
        self._free_s = deque([origin_s] * (self._cap or 0))
        if self._timeout_s is not None:
            self._sweep(self._timeout_s)
        try:
            await self._send_all(schedule, phase, closed, until_s)
            for turn in schedule.rest() if self._stopping else ():
                counts.offered += 1
                self._unsent(Flight(turn.request, phase, origin_s, origin_s + turn.due_s))
                if counts.unsent % 1024 == 0:
                    await asyncio.sleep(0)
            await self._drain(drain_s)
        finally:
            if self._sweeper is not None:
                self._sweeper.cancel()
            for flight in list(self._in_flight.values()):
                self._give_up(flight, "cancelled")
        return counts

    async def _send_all(
        self, schedule: OpenSchedule, phase: str, closed: bool, until_s: float | None
    ) -> None:
        loop, origin_s, cap = self._loop, self._origin_s, self._cap
        sent = 0
        while not self._stopping:
            turn = schedule.peek()
            if turn is None:
                if not schedule.parked:
                    return
                await self._pause(None)
                continue
            now = loop.time()
            if closed and until_s is not None and now - origin_s >= until_s:
                return
            scheduled_s = origin_s + turn.due_s
            if scheduled_s > now:
                await self._pause(scheduled_s)
                continue
            due_s = scheduled_s
            if cap is not None:
                if len(self._in_flight) >= cap:
                    await self._pause(None)
                    continue
                free_s = self._free_s.popleft()
                if free_s > due_s:
                    due_s = free_s
                    if closed:
                        scheduled_s = free_s
            schedule.pop()
            self._send(Flight(turn.request, phase, origin_s, scheduled_s, self._seed, due_s))
            sent += 1
            if sent % _BURST == 0:
                await asyncio.sleep(0)

    def _send(self, flight: Flight) -> None:
        self.counts.offered += 1
        self._in_flight[id(flight)] = flight
        flight.sent_s = self._loop.time()
        self._target.send(flight, self._ended)

    def _ended(self, flight: Flight) -> None:
        if self._in_flight.pop(id(flight), None) is None:
            return
        now = flight.ended_s if flight.ended_s is not None else self._loop.time()
        if flight.status is Status.SUCCEEDED:
            self.counts.succeeded += 1
        else:
            flight.fail("no status")
            self.counts.failed += 1
        if self._cap is not None:
            self._free_s.append(now)
        self._schedule.ended(flight.request, now - self._origin_s)
        self._on_flight(flight)
        self._awake()

    def _unsent(self, flight: Flight) -> None:
        flight.status = Status.UNSENT
        self.counts.unsent += 1
        self._on_flight(flight)

    async def _drain(self, drain_s: float | None) -> None:
        limit_s = None if drain_s is None else self._loop.time() + drain_s
        while self._in_flight:
            if limit_s is not None and self._loop.time() >= limit_s:
                for flight in list(self._in_flight.values()):
                    self._give_up(flight, f"not finished {drain_s:g} s after the last send")
                return
            await self._pause(limit_s)

    def _give_up(self, flight: Flight, reason: str) -> None:
        if flight.cancel is not None:
            flight.cancel(reason)
        if id(flight) in self._in_flight:
            # Still waiting for a connection: nobody else knows of it.
            flight.fail(reason)
            flight.ended_s = self._loop.time()
            self._ended(flight)

    def _sweep(self, timeout_s: float) -> None:
        """Give up flights that are out of time, and look again later."""
        before_s = self._loop.time() - timeout_s
        for flight in list(self._in_flight.values()):
            # Flights are in the order of their sends.
            if flight.sent_s is not None and flight.sent_s > before_s:
                break
            self._give_up(flight, f"timed out after {timeout_s:g} s")
        self._sweeper = self._loop.call_later(min(1.0, timeout_s / 4), self._sweep, timeout_s)

    async def _pause(self, until_s: float | None) -> None:
        """Until the loop's clock shows `until_s`, or something happened."""
        wake = self._wake = self._loop.create_future()
        timer = None if until_s is None else self._loop.call_at(until_s, self._awake)
        try:
            await wake
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()

    def _awake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
