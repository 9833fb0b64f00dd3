"""A precise timer for an asyncio loop: a timerfd, late by tens of microseconds.

asyncio's own timers are late by up to a millisecond, uvloop's are rounded to whole milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_PR_SET_TIMERSLACK = 29


class _Spec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class PreciseTimer:
    """Calls `callback` in the loop once the armed time (`time.monotonic` seconds) has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        # The kernel may otherwise delay this process's wake-ups by 50 us to save energy.
        self._libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self._loop = loop
        self._callback = callback
        self._armed_s: float | None = None
        loop.add_reader(self._fd, self._fired)

    def arm(self, at_s: float | None) -> None:
        """Fire at `at_s` (at once if it is past); None disarms. Replaces what was armed."""
        if at_s == self._armed_s:
            return
        self._armed_s = at_s
        nanoseconds = 0 if at_s is None else max(1, int(at_s * 1e9))
        seconds, rest = divmod(nanoseconds, 1_000_000_000)
        spec = _Spec(0, 0, seconds, rest)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._armed_s = None
        self._callback()


def monotonic_s() -> float:
    """The clock of `PreciseTimer.arm`."""
    return time.monotonic()
