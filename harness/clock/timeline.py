"""What keeps and runs the handles of a virtual loop. Its twin in C is `_timeline.c`.

The loop adds what ends it: `_stuck(when_s)` and `_busy()`, which raise, and `_report(handle,
error)`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, NoReturn

from harness.clock.handles import VirtualHandle

_NEVER = float("inf")

#: Cancelled timers are swept once they are more than this many and more than half of the heap.
_SWEEP_AT = 128

_bare = object.__new__  # a handle is made for every event: without a call of an __init__


class Timeline:
    """Callbacks of the next pass and timers, and `time()`, which is that of the last timer.

    `until_s` bounds time: reaching for a timer past it calls `_stuck`. More than `_busy_passes`
    passes at one instant, of a program that polls for a change that only the passing of time can
    bring, call `_busy`.
    """

    _stopping: bool  # asyncio's own

    if TYPE_CHECKING:

        def _stuck(self, when_s: float) -> NoReturn: ...

        def _busy(self) -> NoReturn: ...

        def _report(self, handle: VirtualHandle, error: BaseException) -> None: ...

    def __init__(self, until_s: float | None = None) -> None:
        self._now_s = 0.0
        self._until_s = _NEVER if until_s is None else float(until_s)
        #: The newest timer of each time, which leads to the others, and a heap of these times: a
        #: heap compares numbers much faster than pairs.
        self._timers: dict[float, VirtualHandle] = {}
        self._times: list[float] = []
        self._due: deque[VirtualHandle] = deque()
        self._cancelled_count = 0
        self._passes_at_now = 0
        self._busy_passes = 1_000_000

    def time(self) -> float:
        return self._now_s

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        /,
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """A time in the past counts as now; NaN raises ValueError."""
        when = float(when)
        if when != when:
            raise ValueError("a timer cannot be set for NaN")
        if context is None:
            context = copy_context()
        elif type(context) is not Context:
            raise TypeError(f"a callback takes a Context, not {context!r}, as context")
        # A bare handle, filled here and in `call_soon`: a call for both costs a third more.
        handle = _bare(VirtualHandle)
        handle._callback = callback
        handle._args = args
        handle._context = context
        handle._when = when
        handle._loop = self
        handle._scheduled = True
        handle._cancelled = False
        if self._cancelled_count > _SWEEP_AT and self._cancelled_count * 2 > len(self._times):
            self._sweep_cancelled()
        timers = self._timers
        handle.before = before = timers.get(when)
        timers[when] = handle
        if before is None:
            heappush(self._times, when)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        /,
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Like `call_at`, from now on."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_soon(
        self, callback: Callable[..., object], /, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """In the next pass."""
        if context is None:
            context = copy_context()
        elif type(context) is not Context:
            raise TypeError(f"a callback takes a Context, not {context!r}, as context")
        handle = _bare(VirtualHandle)
        handle._callback = callback
        handle._args = args
        handle._context = context
        handle._when = self._now_s
        handle.before = None
        handle._loop = self
        handle._scheduled = False
        handle._cancelled = False
        self._due.append(handle)
        return handle

    @property
    def _timer_count(self) -> int:
        """Cancelled ones included."""
        return sum(len(each.oldest_first()) for each in self._timers.values())

    def _forget(self) -> None:
        """Drop all handles."""
        self._due.clear()
        self._timers.clear()
        self._times.clear()
        self._cancelled_count = 0

    def _sweep_cancelled(self) -> None:
        newest = list(self._timers.values())
        # In place, because `_run_once` holds them.
        self._timers.clear()
        for timers in newest:
            for timer in timers.oldest_first():
                if timer._cancelled:
                    timer._scheduled = False
                else:
                    timer.before = self._timers.get(timer._when)
                    self._timers[timer._when] = timer
        self._times[:] = self._timers
        heapify(self._times)
        self._cancelled_count = 0

    def _drop_cancelled(self) -> float:
        """The time of the next timer that is not cancelled, which becomes the earliest."""
        times, timers = self._times, self._timers
        while times:
            same_time = timers[times[0]].oldest_first()
            if not all(timer._cancelled for timer in same_time):
                return times[0]
            self._cancelled_count -= len(same_time)
            del timers[heappop(times)]
        return _NEVER

    def _run_once(self) -> None:
        """Pass after pass until the loop is stopped: run what is ready; when nothing is, jump to
        the time of the next timer."""
        ready, times, timers = self._due, self._times, self._timers
        take = ready.popleft
        while True:
            if ready:
                self._passes_at_now += 1
                if self._passes_at_now > self._busy_passes:
                    self._busy()
            elif not self._stopping:
                when_s = times[0] if times else _NEVER
                if times and timers[when_s]._cancelled:
                    when_s = self._drop_cancelled()
                if when_s > self._until_s or when_s == _NEVER:
                    self._stuck(when_s)
                if when_s > self._now_s:
                    self._now_s = when_s
                    self._passes_at_now = 0
            now_s = self._now_s
            while times and times[0] <= now_s:
                newest = timers.pop(heappop(times))
                for timer in (newest,) if newest.before is None else newest.oldest_first():
                    timer._scheduled = False
                    if timer._cancelled:
                        self._cancelled_count -= 1
                    else:
                        ready.append(timer)
            # What these callbacks schedule runs in the next pass, as in any asyncio loop.
            for _ in range(len(ready)):
                handle = take()
                callback, args = handle._callback, handle._args
                if callback is None or args is None:  # cancelled
                    continue
                try:
                    # What Handle._run does, without its call; passing one argument or none is much
                    # faster than passing any number.
                    if not args:
                        handle._context.run(callback)
                    elif len(args) == 1:
                        handle._context.run(callback, args[0])
                    else:
                        handle._context.run(callback, *args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self._report(handle, error)
            if self._stopping:
                return
