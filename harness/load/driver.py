"""Sends a schedule's requests through a target, and accounts for every one of them.

Open loop: each request leaves at its scheduled time, on the loop's absolute clock, so lateness
never adds up. A concurrency cap holds requests back; the wait counts, since latencies are from the
schedule. Closed loop (no rate, only a cap): a request's scheduled time *is* when its place under
the cap came free.

No task is made for a request: a timer sends what is due, readers of answers send what became due
while they read (`Due`), and the target's callbacks end.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from harness.load.alarm import Alarm, Due, alarm
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
        due: Due | None = None,
    ) -> None:
        self._target = target
        self._on_flight = on_flight
        self._cap = max_concurrency
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None
        self._due = due or Due()
        self._due.act = self._send_one
        self._alarm: Alarm | None = None
        self._sending = self._stopping = False
        self._in_flight: dict[int, Flight] = {}
        self._free_s: deque[float] = deque()
        self._schedule = OpenSchedule(iter(()))
        self._phase = ""
        self._origin_s = 0.0
        self._seed = 0
        self._closed = False
        self._until_s = math.inf
        self._all_sent: asyncio.Future[None] = self._loop.create_future()
        self._all_ended: asyncio.Future[None] = self._loop.create_future()
        self.counts = ReplayCounts()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def stop(self) -> None:
        """Send nothing more; what is under way may finish."""
        self._stopping = True
        self._send_due()

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
        self._phase, self._closed = phase, closed
        self._until_s = math.inf if until_s is None or not closed else origin_s + until_s
        self._all_sent = self._loop.create_future()
        self._free_s = deque([origin_s] * (self._cap or 0))
        if self._timeout_s is not None:
            self._sweep(self._timeout_s)
        self._alarm = alarm(self._rang)
        try:
            self._send_due()
            await self._all_sent
            # A closed loop that only the clock ends has no end to its requests.
            counted = self._stopping and self._until_s == math.inf
            for turn in schedule.rest() if counted else ():
                counts.offered += 1
                self._unsent(Flight(turn.request, phase, origin_s, origin_s + turn.due_s))
                if counts.unsent % 1024 == 0:
                    await asyncio.sleep(0)
            await self._drain(drain_s)
        finally:
            self._due.at_s = math.inf
            self._alarm.close()
            self._alarm = None
            if self._sweeper is not None:
                self._sweeper.cancel()
            for flight in list(self._in_flight.values()):
                self._give_up(flight, "cancelled")
        return counts

    def _rang(self) -> None:
        """The alarm, which may come a little early and is then set again."""
        self._due.at_s = math.inf
        self._send_due()

    def _send_one(self) -> None:
        """Between two reads: at least as many answers are read as requests sent."""
        self._send_due(1)

    def _send_due(self, most: int = _BURST) -> None:
        """Send what is due, `most` of it, and see to it that what is next is sent in time."""
        if self._sending or self._alarm is None or self._all_sent.done():
            return
        self._sending = True
        try:
            next_s = self._send_until(most)
        except Exception as error:
            self._all_sent.set_exception(error)
            next_s = math.inf
        finally:
            self._sending = False
        if next_s == self._due.at_s:
            return
        self._due.at_s = next_s
        if next_s == -math.inf:
            self._loop.call_soon(self._more)
        elif next_s < math.inf:
            self._alarm.set(next_s)

    def _more(self) -> None:
        """Go on after a burst, unless a reader has finished it."""
        if self._due.at_s == -math.inf:
            self._due.at_s = math.inf
            self._send_due()

    def _send_until(self, most: int) -> float:
        """Send at most so many. Returns when to come back: -inf at once, inf when one has ended."""
        loop, schedule, cap = self._loop, self._schedule, self._cap
        for _ in range(most):
            turn = None if self._stopping else schedule.peek()
            now = loop.time()
            if turn is None or now >= self._until_s:
                if self._stopping or turn is not None or not schedule.parked:
                    self._all_sent.set_result(None)
                return math.inf
            scheduled_s = self._origin_s + turn.due_s
            if scheduled_s > now:
                return scheduled_s
            due_s = scheduled_s
            if cap is not None:
                if len(self._in_flight) >= cap:
                    return math.inf
                free_s = self._free_s.popleft()
                if free_s > due_s:
                    due_s = free_s
                    if self._closed:
                        scheduled_s = free_s
            schedule.pop()
            self._send(
                Flight(turn.request, self._phase, self._origin_s, scheduled_s, self._seed, due_s)
            )
        return -math.inf

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
        if not self._in_flight and not self._all_ended.done():
            self._all_ended.set_result(None)
        self._send_due()

    def _unsent(self, flight: Flight) -> None:
        flight.status = Status.UNSENT
        self.counts.unsent += 1
        self._on_flight(flight)

    async def _drain(self, drain_s: float | None) -> None:
        """Until all have ended; what has not after `drain_s` then fails."""
        self._all_ended = self._loop.create_future()
        if not self._in_flight:
            return
        await asyncio.wait((self._all_ended,), timeout=drain_s)
        for flight in list(self._in_flight.values()):
            self._give_up(flight, f"not finished {drain_s:g} s after the last send")

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
