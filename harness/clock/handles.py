"""asyncio's handle without what only debugging needs: half of a wake-up's cost is making it."""

from __future__ import annotations

import asyncio
from asyncio import format_helpers
from collections.abc import Callable
from contextvars import Context
from typing import Any

# asyncio.Handle keeps these in slots of its own, which typeshed leaves out.
# mypy: disable-error-code="attr-defined"


class VirtualHandle(asyncio.TimerHandle):
    """A callback of the next pass, or of a time while it is `_scheduled`.

    One class for both: the loop's innermost lines read attributes of handles, and the interpreter
    does that faster when all are of one class. The timeline makes it bare and sets its slots
    itself; that in `_timeline.c` has handles of its own, which are no asyncio.Handle.
    """

    __slots__ = ("before",)

    #: The timer of the same time that was set before this one.
    before: VirtualHandle | None
    _callback: Callable[..., object] | None
    _args: Any  # a tuple, or None once cancelled
    _context: Context
    _loop: Any
    _when: float
    _scheduled: bool
    _cancelled: bool

    def __init__(self) -> None:
        raise AssertionError("made by a timeline alone")

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __repr__(self) -> str:
        return words(self)

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            if self._scheduled:
                self._loop._cancelled_count += 1
            self._callback = self._args = None

    def oldest_first(self) -> list[VirtualHandle]:
        """The timers of this one's time up to it, in the order in which they were set."""
        timers = []
        timer: VirtualHandle | None = self
        while timer is not None:
            timers.append(timer)
            timer = timer.before
        timers.reverse()
        return timers


def words(handle: VirtualHandle) -> str:
    """A handle in asyncio's words for one: whether it is cancelled, its time, its callback."""
    parts = ["VirtualHandle"]
    if handle.cancelled():
        parts.append("cancelled")
    parts.append(f"when={handle.when()}")
    if handle._callback is not None:
        parts.append(format_helpers._format_callback_source(handle._callback, handle._args))
    return f"<{' '.join(parts)}>"
