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
import math
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextvars import Context
from typing import Any, NoReturn, TypeVar

from harness.clock.waiting import describe_waiting
from native import require

try:
    require("harness.clock._timeline")
    from harness.clock._timeline import Timeline
except ImportError:
    from harness.clock.timeline import Timeline

T = TypeVar("T")


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


class TimelessLoop(asyncio.BaseEventLoop):
    """What is left of a virtual loop beside its timeline, which comes before this among the bases.

    Single-threaded: executors, sockets, pipes, subprocesses and signals raise VirtualTimeError.
    """

    _thread_id: int | None  # asyncio's own
    _until_s: float  # the timeline's, as is _forget
    _forget: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self._task_count = 0
        #: Called, where there is one, instead of telling of a MemoryError: whoever goes on meets
        #: the next, and the next, which the interpreter does not bear.
        self.on_no_memory: Callable[[], NoReturn] | None = None

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

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._thread_id not in (None, threading.get_ident()):
            _refuse("a call from another thread")
        return self.call_soon(callback, *args, context=context)

    def close(self) -> None:
        super().close()
        self._forget()

    def set_task_factory(self, factory: object) -> None:
        if factory is not None:
            raise VirtualTimeError(
                "a task factory is impossible in virtual time: sets of its tasks would iterate in"
                " another order each time"
            )

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There is none."""

    def _busy(self) -> NoReturn:
        raise BusyLoopError(
            f"tasks keep running at {self.time()} s without time passing:\n"
            + describe_waiting(self)
        )

    def _stuck(self, when_s: float) -> NoReturn:
        """There is no timer, or it is past the limit."""
        waiting = describe_waiting(self)
        if when_s == math.inf:
            raise DeadlockError(
                f"deadlock at {self.time()} s: nothing can run, no timer is set, and these tasks"
                f" wait:\n{waiting}"
            )
        raise TimeLimitError(
            f"the next timer is at {when_s} s, past the limit of {self._until_s} s; these tasks"
            f" wait:\n{waiting}"
        )

    def _report(self, handle: asyncio.Handle, error: BaseException) -> None:
        self._end_without_memory(error)
        self.call_exception_handler(
            {"message": f"exception in {handle!r}", "exception": error, "handle": handle}
        )

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._end_without_memory(context.get("exception"))
        super().call_exception_handler(context)

    def _end_without_memory(self, error: object) -> None:
        if isinstance(error, MemoryError) and self.on_no_memory is not None:
            self.on_no_memory()

    def _process_events(self, event_list: object) -> None:
        """There is no selector, so there are no events."""

    def _write_to_self(self) -> None:
        """There is no selector to wake."""


class VirtualLoop(Timeline, TimelessLoop):  # type: ignore[misc]
    """An asyncio loop with virtual `time()`, in seconds from 0.

    `until_s` bounds virtual time: reaching for a timer past it raises TimeLimitError.
    """

    def __init__(self, until_s: float | None = None) -> None:
        Timeline.__init__(self, until_s)
        TimelessLoop.__init__(self)


def run(main: Coroutine[Any, Any, T], *, until_s: float | None = None) -> T:
    """Run `main` to its end in virtual time on a loop of its own, as asyncio.run does in real time.

    At the end, and after an error, the remaining tasks are cancelled and asynchronous generators
    are closed. Raises DeadlockError (or a subclass) instead of waiting for what cannot happen, and
    VirtualTimeError, having closed `main`, inside another loop.
    """
    if _runs_here():
        main.close()
        raise VirtualTimeError("another loop runs in this thread: await the coroutine there")
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


def _runs_here() -> bool:
    """Whether this thread is in a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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
    def refused(self: TimelessLoop, *args: Any, **options: Any) -> NoReturn:
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
        setattr(TimelessLoop, _name, _refusal(_what))
