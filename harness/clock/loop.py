"""The virtual loop: everything of asyncio that needs neither threads nor the outside world.

Time stands still while anything can run; then it jumps to the earliest timer. Callbacks that are
due at the same time run in the order in which they were scheduled, so a program that takes its
randomness from seeded generators runs the same way every time. Sets of tasks (`asyncio.wait`,
`TaskGroup`) iterate in order of creation, because a task's hash is its number and not its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, NoReturn, TypeVar

from harness.clock.handles import VirtualHandle
from harness.clock.waiting import describe_waiting

T = TypeVar("T")

_NEVER = float("inf")
_LAST = 1.7e308  # the limit when there is none: still before never

#: Cancelled timers are swept once they are more than this many and more than half of the heap.
_SWEEP_AT = 128
#: Passes of the loop at one instant after which the program is taken to be polling for a change
#: that only the passing of time can bring.
_BUSY_PASSES = 1_000_000

_bare = object.__new__  # a handle is made for every event: without a call of an __init__


class VirtualTimeError(RuntimeError):
    """Something was asked of the virtual loop that only real time can give."""


class DeadlockError(RuntimeError):
    """Nothing can run, no timer is set, and tasks wait. The message says which, and where."""


class BusyLoopError(DeadlockError):
    """Tasks keep running without time ever passing."""


class TimeLimitError(DeadlockError):
    """The next timer lies past the limit that `run` was given."""


class _OrderedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks iterate in a reproducible order."""

    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio loop with virtual `time()`, in seconds from 0.

    `until_s` bounds virtual time: reaching for a timer past it raises TimeLimitError.
    Single-threaded: executors, sockets, pipes, subprocesses and signals raise VirtualTimeError.
    """

    # What BaseEventLoop keeps, as far as it is used here.
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _thread_id: int | None

    def __init__(self, until_s: float | None = None) -> None:
        super().__init__()
        self._now_s = 0.0
        self._until_s = _LAST if until_s is None else min(until_s, _LAST)
        #: The newest timer of each time, which leads to the others, and a heap of these times: a
        #: heap compares numbers much faster than pairs.
        self._timers: dict[float, VirtualHandle] = {}
        self._times: list[float] = []
        self._cancelled_count = 0
        self._task_count = 0
        self._passes_at_now = 0

    def time(self) -> float:
        return self._now_s

    def create_task(  # type: ignore[override]
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        self._check_closed()  # type: ignore[attr-defined]
        # The number before the rest, which registers the task and so hashes it. An __init__ of its
        # own would do, for twice the time.
        task = _OrderedTask.__new__(_OrderedTask)
        self._task_count = task.number = self._task_count + 1
        if context is not None:
            options["context"] = context
        task.__init__(coro, loop=self, name=name, **options)  # type: ignore[misc]
        return task

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """A time in the past counts as now; NaN raises ValueError."""
        if when != when:
            raise ValueError("a timer cannot be set for NaN")
        handle = _bare(VirtualHandle)
        handle._callback = callback
        handle._args = args
        handle._context = copy_context() if context is None else context
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

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _bare(VirtualHandle)
        handle._callback = callback
        handle._args = args
        handle._context = copy_context() if context is None else context
        handle._when = self._now_s
        handle.before = None
        handle._loop = self
        handle._scheduled = False
        handle._cancelled = False
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._thread_id not in (None, threading.get_ident()):
            _refuse("a call from another thread")
        return self.call_soon(callback, *args, context=context)

    def close(self) -> None:
        super().close()
        self._timers.clear()
        self._times.clear()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle._scheduled:  # type: ignore[attr-defined]
            self._cancelled_count += 1

    def _sweep_cancelled(self) -> None:
        newest = list(self._timers.values())
        # In place, because `_run_once` holds them.
        self._timers.clear()
        for timers in newest:
            for timer in timers.oldest_first():
                if not timer._cancelled:
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
        ready, times, timers = self._ready, self._times, self._timers
        take = ready.popleft
        while True:
            if ready:
                self._passes_at_now += 1
                if self._passes_at_now > _BUSY_PASSES:
                    raise BusyLoopError(
                        f"tasks keep running at {self._now_s} s without time passing:\n"
                        + describe_waiting(self)
                    )
            elif not self._stopping:
                when_s = times[0] if times else _NEVER
                if times and timers[when_s]._cancelled:
                    when_s = self._drop_cancelled()
                if when_s > self._until_s:
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
                if handle._cancelled:
                    continue
                args = handle._args
                try:
                    # What Handle._run does, without its call; passing one argument or none is much
                    # faster than passing any number.
                    if not args:
                        handle._context.run(handle._callback)  # type: ignore[attr-defined]
                    elif len(args) == 1:
                        handle._context.run(handle._callback, args[0])  # type: ignore[attr-defined]
                    else:
                        handle._context.run(handle._callback, *args)  # type: ignore[attr-defined]
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self._report(handle, error)
            if self._stopping:
                return

    def _stuck(self, when_s: float) -> NoReturn:
        """There is no timer, or it is past the limit."""
        waiting = describe_waiting(self)
        if when_s == _NEVER:
            raise DeadlockError(
                f"deadlock at {self._now_s} s: nothing can run, no timer is set, and these tasks"
                f" wait:\n{waiting}"
            )
        raise TimeLimitError(
            f"the next timer is at {when_s} s, past the limit of {self._until_s} s; these tasks"
            f" wait:\n{waiting}"
        )

    def _report(self, handle: asyncio.Handle, error: BaseException) -> None:
        self.call_exception_handler(
            {"message": f"exception in {handle!r}", "exception": error, "handle": handle}
        )

    def _process_events(self, event_list: object) -> None:
        """There is no selector, so there are no events."""

    def _write_to_self(self) -> None:
        """There is no selector to wake."""


def run(main: Coroutine[Any, Any, T], *, until_s: float | None = None) -> T:
    """Run `main` to its end in virtual time on a loop of its own, as asyncio.run does in real time.

    At the end, and after an error, the remaining tasks are cancelled and asynchronous generators
    are closed. Raises DeadlockError (or a subclass) instead of waiting for what cannot happen.
    """
    loop = VirtualLoop(until_s)
    with _rare_collections():
        try:
            return loop.run_until_complete(main)
        finally:
            try:
                _cancel_remaining(loop)
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                loop.close()


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect cyclic garbage several hundred times less often than by default.

    A simulation keeps hundreds of thousands of live objects that each collection would walk, and
    makes hardly any cycles.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 400_000) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _cancel_remaining(loop: VirtualLoop) -> None:
    remaining = sorted(asyncio.all_tasks(loop), key=hash)
    for task in remaining:
        task.cancel()
    if not remaining:
        return
    loop.run_until_complete(asyncio.gather(*remaining, return_exceptions=True))
    for task in remaining:
        if not task.cancelled() and task.exception() is not None:
            loop.call_exception_handler(
                {
                    "message": "unhandled exception while the virtual loop shut down",
                    "exception": task.exception(),
                    "task": task,
                }
            )


def _refuse(what: str) -> NoReturn:
    raise VirtualTimeError(
        f"{what} is impossible in virtual time: the clock would not wait for it."
        " Run this part on a real-time loop (uvloop), or model it."
    )


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refused(self: VirtualLoop, *args: Any, **options: Any) -> NoReturn:
        _refuse(what)

    return refused


_REFUSED = {
    "a thread": ("run_in_executor", "set_default_executor", "getaddrinfo", "getnameinfo"),
    "a socket": (
        "create_connection",
        "create_server",
        "create_unix_connection",
        "create_unix_server",
        "create_datagram_endpoint",
        "connect_accepted_socket",
        "start_tls",
        "sendfile",
        "sock_recv",
        "sock_recv_into",
        "sock_recvfrom",
        "sock_recvfrom_into",
        "sock_sendall",
        "sock_sendto",
        "sock_connect",
        "sock_accept",
        "sock_sendfile",
        "add_reader",
        "add_writer",
        "remove_reader",
        "remove_writer",
    ),
    "a pipe": ("connect_read_pipe", "connect_write_pipe"),
    "a subprocess": ("subprocess_exec", "subprocess_shell"),
    "a signal handler": ("add_signal_handler", "remove_signal_handler"),
}
for _what, _names in _REFUSED.items():
    for _name in _names:
        setattr(VirtualLoop, _name, _refusal(_what))
