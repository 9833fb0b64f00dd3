"""How punctual the client's own loop is: a timer that notes how late it comes, and what the kernel
says of how long the loop's thread was ready to run and had no core.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from harness.load.selfcheck import ClientHealth

TICK_S = 0.010
#: A timer may be this late without anything being wrong: uvloop's ticks are milliseconds.
_PUNCTUAL_S = 0.002


def core_wait_s(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Seconds that this thread has been ready to run and waited for a core; 0 where the kernel does
    not say.
    """
    try:
        return int(schedstat.read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


class LoopMonitor:
    """Runs from its making to `stop`. Costs a timer a tick."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._cpu_s = time.process_time()
        self._core_wait_s = core_wait_s()
        self._blocked_s = 0.0
        self._longest_s = 0.0
        self._due_s = 0.0
        self._timer = self._again()

    def stop(self, connection_limit: bool = False) -> ClientHealth:
        self._timer.cancel()
        return ClientHealth(
            duration_s=self._loop.time() - self._begun_s,
            cpu_s=time.process_time() - self._cpu_s,
            blocked_s=self._blocked_s,
            longest_block_s=self._longest_s,
            connection_limit=connection_limit,
            core_wait_s=core_wait_s() - self._core_wait_s,
        )

    def _tick(self) -> None:
        late_s = self._loop.time() - self._due_s
        if late_s > _PUNCTUAL_S:
            self._blocked_s += late_s
            self._longest_s = max(self._longest_s, late_s)
        self._timer = self._again()

    def _again(self) -> asyncio.TimerHandle:
        self._due_s = self._loop.time() + TICK_S
        return self._loop.call_at(self._due_s, self._tick)
