"""The prefix directory of workers with a pool each, fed by the events of their pools.

A worker is asked for its events shortly after something was stored there, which is when entries
come and go. What it says lately is remembered, so that an answer which contradicts the directory
can be put right without losing what is known to be true.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from engine.cache.figures import CacheEvent, Group
from harness.directory import PrefixDirectory
from harness.fleets.page_names import PageNames
from harness.ports import InstanceSpec, ServingError
from workloads.request import Request

#: (kind of memory, stored or evicted, page key in hexadecimal), as `GET /cache-events` answers.
WorkerEvent = Sequence[object]
#: The events of a worker since it was last asked. Raises a ServingError or ClientError.
ReadEvents = Callable[[str], Awaitable[Sequence[WorkerEvent]]]

#: Events that come together cost one question.
DELAY_S = 0.02
#: Events of a worker that are looked at again when it reused less than was thought, at most: those
#: since its prompt was routed count. No more than the directory remembers keys: an event of one
#: that it has forgotten says nothing.
RECENT = 4096


class WorkerKeeper:
    """Implements harness.prefixes.PrefixKeeper."""

    def __init__(
        self, directory: PrefixDirectory, names: PageNames, read: ReadEvents, recent: int = RECENT
    ) -> None:
        """`recent`: events of each worker that are remembered."""
        self._directory = directory
        self._names = names
        self._read = read
        self._n_recent = recent
        self._recent: dict[str, deque[CacheEvent]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()

    def prefilled(
        self,
        request: Request,
        prefill: InstanceSpec,
        decode: InstanceSpec,
        expected_tokens: int,
        reused_tokens: int,
    ) -> None:
        if reused_tokens < expected_tokens:
            self._directory.correct(prefill.name, request, reused_tokens)
            for event in self._recent.get(prefill.name, ()):
                self._directory.event(prefill.name, event)
        self._ask(prefill.name)
        self._ask(decode.name)

    def copied(self, request: Request, sink: InstanceSpec, tokens: int) -> None:
        self._ask(sink.name)

    def forget(self, worker: str) -> None:
        """Its memory is lost, or what it said of it."""
        self._recent.pop(worker, None)
        self._directory.forget(worker)

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _ask(self, worker: str) -> None:
        if worker in self._asking:
            self._again.add(worker)
            return
        task = asyncio.get_running_loop().create_task(self._follow(worker))
        self._asking[worker] = task
        task.add_done_callback(lambda _: self._asking.pop(worker, None))

    async def _follow(self, worker: str) -> None:
        while True:
            await asyncio.sleep(DELAY_S)
            self._again.discard(worker)
            try:
                events = await self._read(worker)
            except (ServingError, aiohttp.ClientError, TimeoutError, OSError):
                self.forget(worker)
                return
            self._take(worker, events)
            if worker not in self._again:
                return

    def _take(self, worker: str, events: Sequence[WorkerEvent]) -> None:
        recent = self._recent.setdefault(worker, deque(maxlen=self._n_recent))
        for group_name, stored, page in events:
            group = Group(str(group_name))
            for key in self._names.blocks(group, int(str(page), 16)):
                event = CacheEvent(group, bool(stored), key)
                recent.append(event)
                self._directory.event(worker, event)
