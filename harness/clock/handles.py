"""asyncio's handle without what only debugging needs: half of a wake-up's cost is making it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

# asyncio.Handle keeps these in slots of its own, which typeshed leaves out.
# mypy: disable-error-code="attr-defined"


class VirtualHandle(asyncio.TimerHandle):
    """A callback of the next pass, or of a time while it is `_scheduled`.

    One class for both: the loop's innermost lines read attributes of handles, and the interpreter
    does that faster when all are of one class. The loop makes it bare and sets its slots itself.
    """

    __slots__ = ("before",)

    #: The timer of the same time that was set before this one.
    before: VirtualHandle | None
    _callback: Callable[..., object]
    _args: tuple[Any, ...]
    _context: Context
    _loop: asyncio.AbstractEventLoop
    _when: float
    _scheduled: bool
    _cancelled: bool
    _repr = None
    _source_traceback = None

    def __init__(self) -> None:
        raise AssertionError("made by VirtualLoop alone")

    def oldest_first(self) -> list[VirtualHandle]:
        """The timers of this one's time up to it, in the order in which they were set."""
        timers = []
        timer: VirtualHandle | None = self
        while timer is not None:
            timers.append(timer)
            timer = timer.before
        timers.reverse()
        return timers
