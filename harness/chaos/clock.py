"""Virtual time for code that was written for the real one: the worker's clock and its thread.

The worker reads `time.monotonic()` and computes in a thread. In a campaign the first is the loop's
time, and the second is a `Device`, on which work takes virtual time, slower or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

from harness.clock.loop import VirtualLoop


class CampaignLoop(VirtualLoop):
    """A virtual loop whose executors are devices."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        assert isinstance(executor, Device)
        return executor.start(func, *args)


class _LoopTime(types.SimpleNamespace):
    """Stands for the module `time` in modules of the worker."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()


@contextlib.contextmanager
def virtual_worker_clock() -> Iterator[None]:
    """While it lasts, the worker's modules read the running loop's time."""
    from engine.worker import arrivals, courier, engine, worker

    modules: list[Any] = [arrivals, courier, engine, worker]
    kept = [module.time for module in modules]
    for module in modules:
        module.time = _LoopTime()
    try:
        yield
    finally:
        for module, real in zip(modules, kept, strict=True):
            module.time = real


class Device:
    """Computes one thing at a time. `work_s` of what `func` asked for pass before its result is
    there; `after` calls back on the way. Pausing and slowing act on what is under way.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[float, Callable[[], None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._factor = 1.0
        self._paused = False
        self.work_s = 0.0

    def start(self, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self._loop.create_future()
        self.work_s = 0.0
        try:
            result = func(*args)
        except Exception as error:
            done.set_exception(error)
            return done

        def finish() -> None:
            if not done.done():
                done.set_result(result)

        self.after(self.work_s, finish)
        return done

    def shutdown(self, wait: bool = True) -> None:
        """As an executor's; also what a crash does: nothing under way goes on."""
        self._pending.clear()
        self._set_timer()

    def after(self, work_s: float, callback: Callable[[], None]) -> None:
        """Call back when `work_s` of work from now are done; equal times in order of asking."""
        self._account()
        at = next((i for i, (left, _) in enumerate(self._pending) if left > work_s), None)
        self._pending.insert(len(self._pending) if at is None else at, (work_s, callback))
        self._set_timer()

    def slow(self, factor: float) -> None:
        self._account()
        self._factor = factor
        self._set_timer()

    def pause(self) -> None:
        self._account()
        self._paused = True
        self._set_timer()

    def resume(self) -> None:
        self._account()
        self._paused = False
        self._set_timer()

    def _account(self) -> None:
        now_s = self._loop.time()
        if not self._paused and self._pending:
            done_s = (now_s - self._since_s) / self._factor
            self._pending = [(max(0.0, left - done_s), call) for left, call in self._pending]
        self._since_s = now_s

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending and not self._paused:
            wait_s = self._pending[0][0] * self._factor
            self._timer = self._loop.call_later(wait_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._account()
        # The first is due by definition, whatever rounding left of it.
        _, callback = self._pending.pop(0)
        self._set_timer()
        callback()
