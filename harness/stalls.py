"""Whether this process itself stood still, and deadlines for others that leave such time out.

A process that is stopped, paused with its machine or swapped out finds every timer due when it goes
on, and the answers that came meanwhile unread. It cannot say of anybody that they were silent: from
there on each has the whole of its time again. What was measured meanwhile is void; it is recorded.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

#: Raises TimeoutError in its block after so many seconds.
Timeout = Callable[[float], AbstractAsyncContextManager[object]]

#: The loop is asked for a sign of life so often, seconds.
BEAT_S = 0.2
#: One that comes later than this was held up: a good part of the shortest deadline for a peer, and
#: far beyond what a busy machine takes.
STALL_S = 1.0
#: The last so many are kept in detail.
KEPT = 100


@dataclass(frozen=True, slots=True)
class Stall:
    """Loop seconds. It began within BEAT_S after `began_s`."""

    began_s: float
    ended_s: float


class OwnStalls:
    """Those of the running loop, from `watch` to `close`: `n` of them, `total_s` long in all."""

    def __init__(self) -> None:
        self.n = 0
        self.total_s = 0.0
        self.last: deque[Stall] = deque(maxlen=KEPT)
        self._loop = asyncio.get_running_loop()
        self._watched_s = 0.0
        self._beat_s = math.inf  # when the next sign of life is due
        self._beating: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self._watched_s = self._loop.time()
        self._beat()

    def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        self._beating, self._beat_s = None, math.inf

    def facts(self) -> dict[str, Any]:
        """For the summary: in all, and when each of the last was, from the start of the watch."""
        return {
            "stalled_s": round(self.total_s, 3),
            "stalls": [
                {
                    "at_s": round(each.began_s - self._watched_s, 3),
                    "seconds": round(each.ended_s - each.began_s, 3),
                }
                for each in self.last
            ],
        }

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """As `asyncio.timeout`, but of `seconds` in one piece in which the loop ran."""
        loop = self._loop
        from_s = loop.time()
        timer: asyncio.TimerHandle | None = None

        def due() -> None:
            nonlocal timer
            until_s = max(from_s, self._awake_since_s()) + seconds
            if until_s > loop.time():
                timer = loop.call_at(until_s, due)
            else:
                limit.reschedule(loop.time())

        async with asyncio.timeout(None) as limit:
            timer = loop.call_at(from_s + seconds, due)
            try:
                yield
            finally:
                timer.cancel()

    def _beat(self) -> None:
        self._look()
        self._beat_s = self._loop.time() + BEAT_S
        self._beating = self._loop.call_at(self._beat_s, self._beat)

    def _look(self) -> None:
        """Note a stall that has just ended. Of the timers that are due then the one that asks may
        come before the beat."""
        now_s = self._loop.time()
        if now_s - self._beat_s > STALL_S:
            self.n += 1
            self.total_s += now_s - self._beat_s
            self.last.append(Stall(self._beat_s - BEAT_S, now_s))
            self._beat_s = now_s

    def _awake_since_s(self) -> float:
        self._look()
        return self.last[-1].ended_s if self.last else -math.inf
