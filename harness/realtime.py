"""The real-time loop: uvloop, with a clock finer than its millisecond ticks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


class RealtimeLoop(uvloop.Loop):
    """uvloop's timers, but `time()` reads CLOCK_MONOTONIC when asked.

    uvloop caches its clock per iteration in whole milliseconds, which is coarser than the
    latencies measured here. Worker processes on this host stamp with the same clock.
    """

    def time(self) -> float:
        return time.monotonic()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a fresh real-time loop and return its result."""
    with asyncio.Runner(loop_factory=RealtimeLoop) as runner:
        return runner.run(main)
