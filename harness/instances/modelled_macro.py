"""The running batch of a modelled decode instance, in macro-steps.

`MacroBatch` has a twin in C, `_modelled_macro.c`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from typing import Protocol

from harness.instances.modelled_batch import StepClock, StepTimes
from results.records import TokenRun

_NEVER = float("inf")


class Member(Protocol):
    """A request of a batch. One that is done (cancelled, say) is to be removed, and is skipped.

    `admitted_at`, -1 at first, is the batch's own.
    """

    input_tokens: int
    output_tokens: int
    admitted_at: int

    def done(self) -> bool: ...

    def finish(self, runs: list[TokenRun]) -> None:
        """All tokens are out, at these times."""
        ...


class Batch(Protocol):
    """At most `max_batch` requests at a time, admitted first come first served at boundaries."""

    @property
    def active(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    def add(self, member: Member) -> None: ...

    def remove(self, member: Member) -> None:
        """Out of the queue now, or out of the batch at the next boundary."""
        ...

    def clear(self) -> list[Member]:
        """Stop at once; returns who ran and who waited, in order of leaving and of coming."""
        ...

    def slow(self, factor: float) -> None:
        """From the next boundary on a step takes `factor` times what the profile says."""
        ...

    def pause(self) -> None:
        """Freeze in the middle of a step. Idempotent."""
        ...

    def resume(self) -> None:
        """Go on where `pause` stopped: the step that was running ends that much later."""
        ...


class MacroBatch:
    """A batch that has an event only when somebody leaves, or when the step duration changes with
    the context; see `modelled_batch` for how time passes in between.
    """

    __slots__ = (
        "_admissions",
        "_batch",
        "_clock",
        "_context_at",
        "_context_tokens",
        "_contextual",
        "_loop",
        "_max_batch",
        "_paused_boundary",
        "_paused_s",
        "_running",
        "_slowdown",
        "_timer",
        "_timer_s",
        "_times",
        "_waiting",
        "_was_running",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, times: StepTimes, max_batch: int) -> None:
        self._loop = loop
        self._times = times
        self._max_batch = max_batch
        self._slowdown = 1.0
        self._clock = StepClock(loop.time())
        self._waiting: deque[Member] = deque()
        #: (boundary at which it leaves, order of admission, member); removed ones are done.
        self._running: list[tuple[int, int, Member]] = []
        self._admissions = 0
        self._batch = 0
        self._contextual = times.bucket_tokens > 0
        #: Tokens of context of the running batch at boundary `_context_at`; 0 if of no matter.
        self._context_tokens = 0
        self._context_at = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = _NEVER
        self._paused_s: float | None = None
        self._paused_boundary = 0
        self._was_running = False

    @property
    def active(self) -> int:
        return self._batch

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def _segments(self) -> int:
        """Closed segments that are kept."""
        return len(self._clock)

    def add(self, member: Member) -> None:
        self._waiting.append(member)
        if self._batch < self._max_batch and self._paused_s is None:
            self._at_next_boundary()

    def remove(self, member: Member) -> None:
        if member.admitted_at < 0:
            self._waiting.remove(member)
            return
        paused = self._paused_s is not None
        clock = self._clock
        boundary = self._paused_boundary if paused else clock.next_boundary(self._loop.time())
        self._leave(member, boundary)
        if not self._batch:
            clock.close(boundary)
        if not paused:
            self._at_next_boundary()

    def clear(self) -> list[Member]:
        members = [member for _, _, member in sorted(self._running) if not member.done()]
        members += self._waiting
        self._running.clear()
        self._waiting.clear()
        now_s = self._loop.time()
        if self._batch:
            paused = self._paused_s is not None
            self._clock.close(self._paused_boundary if paused else self._clock.next_boundary(now_s))
        self._clock.idle_until(now_s)  # the step that ran is broken off
        self._batch = self._context_tokens = 0
        self._paused_s = None
        self._disarm()
        return members

    def slow(self, factor: float) -> None:
        self._slowdown = factor
        if self._batch and self._paused_s is None:
            self._at_next_boundary()

    def pause(self) -> None:
        if self._paused_s is None:
            self._paused_s = self._loop.time()
            self._was_running = self._batch > 0
            self._paused_boundary = self._clock.anchor
            if self._was_running:
                self._paused_boundary = self._clock.next_boundary(self._paused_s)
            self._disarm()

    def resume(self) -> None:
        if self._paused_s is None:
            return
        paused_s, self._paused_s = self._paused_s, None
        clock, extra_s = self._clock, self._loop.time() - paused_s
        if self._was_running:
            if clock.anchor == self._paused_boundary and clock.anchor_s <= paused_s:
                clock.idle_until(clock.anchor_s + extra_s)  # no step had begun
            else:
                clock.stretch(self._paused_boundary, extra_s)
        self._at_next_boundary()

    # Boundaries ---------------------------------------------------------------------------------

    def _at_next_boundary(self) -> None:
        """Let what has changed take effect at the next boundary.

        If nobody leaves until then, that boundary can be worked out now and needs no event.
        """
        clock, running = self._clock, self._running
        now_s = self._loop.time()
        if running and running[0][2].done():
            self._skip_cancelled()
        if self._batch:
            boundary = clock.next_boundary(now_s)
        else:
            # A step whose requests were all cancelled still runs to its end, which may lie ahead.
            if now_s > clock.anchor_s:
                clock.idle_until(now_s)
            boundary = clock.anchor
        if running and running[0][0] <= boundary:
            leaves_s = clock.at(running[0][0])
            if leaves_s < self._timer_s:
                self._arm(leaves_s)
        else:
            self._go_on(boundary)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_s = _NEVER
        running = self._running
        if running and running[0][2].done():
            self._skip_cancelled()
        if not running:
            return
        next_boundary = self._next_event() if self._contextual else running[0][0]
        next_s = self._clock.at(next_boundary)
        if next_s > self._loop.time():
            self._arm(next_s)
        else:
            self._pass_boundary(next_boundary)

    def _skip_cancelled(self) -> None:
        running = self._running
        while running and running[0][2].done():
            heapq.heappop(running)

    def _next_event(self) -> int:
        """The boundary at which somebody leaves or, if that matters, the context changes bucket."""
        steps = self._times.steps_in_bucket(self._batch, self._context_tokens)
        return min(self._running[0][0], self._context_at + steps)

    def _pass_boundary(self, boundary: int) -> None:
        """At `boundary`: who is done leaves, who waits comes in."""
        clock, running = self._clock, self._running
        finished: list[tuple[Member, list[TokenRun]]] = []
        while running and running[0][0] <= boundary:
            member = heapq.heappop(running)[2]
            if not member.done():
                self._leave(member, boundary)
                finished.append((member, clock.runs(member.admitted_at, boundary)))
        self._go_on(boundary)
        for member, runs in finished:
            member.finish(runs)

    def _go_on(self, boundary: int) -> None:
        """From `boundary` on, which may lie ahead: who waits comes in, and steps last as long as
        the new batch takes."""
        clock, contextual = self._clock, self._contextual
        if contextual:
            self._move_context(boundary)
        if self._waiting:
            self._admit(boundary)
        if not self._batch:
            clock.close(boundary)
            return
        step_s = self._times.step_s(self._batch, self._context_tokens) * self._slowdown
        if step_s != clock.step_s or boundary == clock.anchor:
            clock.change_step(boundary, step_s)
            if clock.crowded:
                clock.forget_before(min(member.admitted_at for _, _, member in self._running))
        when_s = clock.at(self._next_event() if contextual else self._running[0][0])
        if when_s < self._timer_s:
            self._arm(when_s)

    def _admit(self, boundary: int) -> None:
        waiting, max_batch = self._waiting, self._max_batch
        while waiting and self._batch < max_batch:
            member = waiting.popleft()
            member.admitted_at = boundary
            self._admissions += 1
            self._batch += 1
            if self._contextual:
                self._context_tokens += member.input_tokens + 1
            leaves = boundary + member.output_tokens - 1
            heapq.heappush(self._running, (leaves, self._admissions, member))

    def _leave(self, member: Member, boundary: int) -> None:
        if self._contextual:
            self._move_context(boundary)
            self._context_tokens -= member.input_tokens + 1 + boundary - member.admitted_at
        self._batch -= 1

    def _move_context(self, boundary: int) -> None:
        self._context_tokens += self._batch * (boundary - self._context_at)
        self._context_at = boundary

    def _arm(self, when_s: float) -> None:
        """Set the one timer, for an earlier time than it has; a timer that comes too early looks
        again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = when_s
        self._timer = self._loop.call_at(when_s, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = _NEVER
