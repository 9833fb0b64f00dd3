"""The running batch of a modelled decode instance, one event a step: the oracle of macro-steps.

It shares nothing with `modelled_macro` but the step durations: it counts tokens one by one and
notes the time of each.
"""

from __future__ import annotations

import asyncio
from collections import deque

from harness.instances.modelled_batch import StepTimes
from harness.instances.modelled_macro import Member


class SteppedBatch:
    """Implements harness.instances.modelled_macro.Batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop, times: StepTimes, max_batch: int) -> None:
        self._loop = loop
        self._times = times
        self._max_batch = max_batch
        self._slowdown = 1.0
        self._waiting: deque[Member] = deque()
        #: Who is in the batch, and the time of each of its tokens so far.
        self._tokens: dict[Member, list[float]] = {}
        self._steps = 0
        self._leaving: list[Member] = []
        self._timer: asyncio.TimerHandle | None = None
        self._step_began_s = -1.0
        self._left_s: float | None = None
        self._paused = False

    @property
    def active(self) -> int:
        return len(self._tokens) - len(self._leaving)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, member: Member) -> None:
        self._waiting.append(member)
        if not self._paused and (self._timer is None or self._begins_now()):
            self._begin_step()

    def remove(self, member: Member) -> None:
        if member.admitted_at < 0:
            self._waiting.remove(member)
        elif self._begins_now():
            del self._tokens[member]
            self._begin_step()
        else:
            self._leaving.append(member)

    def clear(self) -> list[Member]:
        members = sorted(
            (member for member in self._tokens if not member.done()),
            key=lambda member: member.output_tokens - len(self._tokens[member]),
        )
        members += self._waiting
        self._tokens.clear()
        self._waiting.clear()
        self._leaving.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._paused = False
        self._left_s = None
        return members

    def slow(self, factor: float) -> None:
        self._slowdown = factor

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            if self._timer is not None:
                self._left_s = self._timer.when() - self._loop.time()
                self._timer.cancel()
                self._timer = None

    def resume(self) -> None:
        if not self._paused:
            return
        self._paused = False
        if self._left_s is not None:
            self._timer = self._loop.call_later(self._left_s, self._end_step)
            self._left_s = None
        else:
            self._begin_step()

    def _begins_now(self) -> bool:
        """What happens at the very time of a boundary counts for the step that begins there."""
        return self._timer is not None and self._step_began_s == self._loop.time()

    def _begin_step(self) -> None:
        now_s = self._step_began_s = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while True:
            while self._waiting and len(self._tokens) < self._max_batch:
                member = self._waiting.popleft()
                member.admitted_at = self._steps
                self._tokens[member] = [now_s]
            if not self._let_finished_go():
                break
        if self._tokens:
            context_tokens = sum(
                member.input_tokens + len(times) for member, times in self._tokens.items()
            )
            step_s = self._times.step_s(len(self._tokens), context_tokens) * self._slowdown
            self._timer = self._loop.call_later(step_s, self._end_step)

    def _end_step(self) -> None:
        self._timer = None
        self._steps += 1
        for member in self._leaving:
            del self._tokens[member]
        self._leaving.clear()
        now_s = self._loop.time()
        for times in self._tokens.values():
            times.append(now_s)
        self._let_finished_go()
        self._begin_step()

    def _let_finished_go(self) -> bool:
        finished = [m for m, times in self._tokens.items() if len(times) == m.output_tokens]
        for member in finished:
            times = self._tokens.pop(member)
            member.finish([(time_s, 0.0, 1) for time_s in times])
        return bool(finished)
