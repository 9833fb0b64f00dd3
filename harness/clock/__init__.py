"""Virtual time: an asyncio event loop whose clock jumps to the next timer."""

from harness.clock.loop import (
    BusyLoopError,
    DeadlockError,
    TimeLimitError,
    VirtualLoop,
    VirtualTimeError,
    run,
)

__all__ = [
    "BusyLoopError",
    "DeadlockError",
    "TimeLimitError",
    "VirtualLoop",
    "VirtualTimeError",
    "run",
]
