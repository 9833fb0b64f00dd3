"""asyncio's handle without what only debugging needs: half of a wake-up's cost is making it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

# asyncio.Handle keeps these in slots of its own, which typeshed leaves out.
# mypy: disable-error-code="attr-defined"


class VirtualHandle(asyncio.TimerHandle):
    """A callback of the next pass, or of a time when `scheduled`.

    One class for both: the loop's innermost lines read attributes of handles, and the interpreter
    does that faster when all are of one class.
    """

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
        scheduled: bool,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = scheduled
