"""When the next send is due: told by a timer finer than the loop's, and asked by whoever reads."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
from collections.abc import Callable

from harness.realtime import RealtimeLoop

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class Due:
    """`act` is to be called at `at_s` of the loop's clock (inf: not at all).

    A loop that has many answers to read calls timers only after all of them, so readers look here
    between two of them: a send never waits behind a batch of reads.
    """

    __slots__ = ("act", "at_s")

    def __init__(self) -> None:
        self.at_s = math.inf
        self.act: Callable[[], None] = lambda: None


class Alarm:
    """Calls `act` when the loop's clock shows what it was last set to."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        self.close()
        self._timer = self._loop.call_at(at_s, self._act)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class FineAlarm(Alarm):
    """The same by a timerfd: uvloop rounds to milliseconds, so that a timer comes early, and is set
    again for no time at all until it is due: a loop that turns without work.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(act)
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Itimerspec()
        self._reference = ctypes.byref(self._spec)
        self._loop.add_reader(self._fd, self._rang)

    def set(self, at_s: float) -> None:
        seconds = int(at_s)
        self._spec.value.seconds = seconds
        # Zero would disarm it.
        self._spec.value.nanoseconds = max(1, int((at_s - seconds) * 1e9))
        self._settime(self._fd, _TFD_TIMER_ABSTIME, self._reference, None)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _rang(self) -> None:
        # Set again in the meantime, it has not expired.
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._act()


def alarm(act: Callable[[], None]) -> Alarm:
    """The finest that the running loop has."""
    fine = isinstance(asyncio.get_running_loop(), RealtimeLoop)
    return FineAlarm(act) if fine else Alarm(act)
