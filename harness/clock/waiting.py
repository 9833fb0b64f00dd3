"""Says which tasks of a loop wait, and where: the text of a deadlock report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import FrameType
from typing import Any

_SHOWN = 20


def describe_waiting(loop: asyncio.AbstractEventLoop) -> str:
    """One line per unfinished task of `loop`, oldest first, at most 20 of them."""
    tasks = sorted(asyncio.all_tasks(loop), key=hash)  # a task's hash is its number
    lines = [f"  {task.get_name()}: {_where(task)}" for task in tasks[:_SHOWN]]
    if len(tasks) > _SHOWN:
        lines.append(f"  ... and {len(tasks) - _SHOWN} more")
    return "\n".join(lines) or "  (no task)"


def _where(task: asyncio.Task[Any]) -> str:
    """`outermost() waits in innermost() at file:line for what`."""
    outermost = innermost = task.get_coro()
    awaited: Any = innermost
    while awaited is not None and _frame(awaited) is not None:
        innermost = awaited
        awaited = getattr(innermost, "cr_await", None) or getattr(innermost, "gi_yieldfrom", None)
    name = getattr(outermost, "__qualname__", repr(outermost))
    frame = _frame(innermost)
    if frame is None:
        return f"{name}()"
    inner_name = getattr(innermost, "__qualname__", repr(innermost))
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return f"{name}() waits in {inner_name}() at {place}"


def _frame(awaitable: Any) -> FrameType | None:
    frame: FrameType | None = getattr(awaitable, "cr_frame", None)
    return frame if frame is not None else getattr(awaitable, "gi_frame", None)
