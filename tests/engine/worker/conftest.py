"""Workers in this process (each with its data plane), and the monolithic engine as oracle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engine.cache.checkpoints import CheckpointPolicy  # noqa: E402
from engine.cache.pool import Group, HybridPool  # noqa: E402
from engine.cache.storage import CacheStorage  # noqa: E402
from engine.model.config import shape  # noqa: E402
from engine.model.layout import CacheLayout  # noqa: E402
from engine.model.model import Model  # noqa: E402
from engine.model.weights import random_weights  # noqa: E402
from engine.pacing import Pacing  # noqa: E402
from engine.runner import Runner  # noqa: E402
from engine.scheduler import Limits, Scheduler  # noqa: E402
from engine.sequence import Sampling, Sequence  # noqa: E402
from engine.worker.loading import load_engine  # noqa: E402
from engine.worker.options import WorkerOptions  # noqa: E402
from engine.worker.worker import Worker  # noqa: E402

PAGE = 16


class Engine:
    """Model, pool and scheduler without a loop: one engine that does everything, step by step.

    With `poison`, whatever is freed is filled with NaN, so that any read of it shows.
    """

    def __init__(
        self,
        model: str = "tiny",
        pages: int = 64,
        slots: int = 16,
        limits: Limits = Limits(),
        interval_blocks: int = 2,
        poison: bool = True,
    ) -> None:
        torch.set_num_threads(1)
        config = shape(model)
        layout = CacheLayout(config, pages + 1, slots + 1, PAGE)
        self.storage = CacheStorage(layout)
        self.pool = HybridPool(
            pages,
            slots,
            PAGE,
            policy=CheckpointPolicy(interval_blocks),
            first_page=1,
            first_slot=1,
            on_freed=self._poison if poison else None,
        )
        self.scheduler = Scheduler(self.pool, limits)
        self.runner = Runner(Model(config, random_weights(config, 0)), self.storage)
        if poison:
            self.storage.poison(tuple(range(1, slots + 1)), tuple(range(1, pages + 1)))

    def _poison(self, group: Group, number: int) -> None:
        if group is Group.KV:
            self.storage.poison(pages=(number,))
        else:
            self.storage.poison(slots=(number,))

    def step(self) -> list[Sequence]:
        step = self.scheduler.schedule()
        return self.scheduler.complete(step, self.runner.execute(step))

    def generate(
        self, prompt: list[int], count: int, sampling: Sampling = Sampling(), tenant: str = ""
    ) -> list[int]:
        """The `count` tokens after `prompt`."""
        sequence = Sequence("r", list(prompt), count, tenant=tenant, sampling=sampling)
        self.scheduler.add(sequence)
        while not sequence.finish:
            self.step()
        return sequence.tokens[len(prompt) :]


@pytest.fixture
def engine() -> Callable[..., Engine]:
    return Engine


@pytest.fixture
async def start_worker() -> AsyncIterator[Callable[..., Awaitable[Worker]]]:
    workers: list[Worker] = []
    crashes: list[BaseException] = []

    async def start(pacing: Pacing | None = None, **options: Any) -> Worker:
        settings = WorkerOptions(
            socket=None,
            listen=None,
            **{"page_tokens": PAGE, "pages": 64, "slots": 16, "checkpoint_interval": 2, **options},
        )
        worker = Worker(settings, load_engine(settings), pacing)
        await worker.start(crashes.append)
        workers.append(worker)
        return worker

    yield start
    try:
        async with asyncio.timeout(20):
            await asyncio.gather(*(worker.stop() for worker in workers))
    finally:
        assert not crashes


@pytest.fixture
def nothing_leaked() -> Callable[..., Awaitable[None]]:
    async def check(*workers: Worker) -> None:
        async with asyncio.timeout(10):
            for worker in workers:
                while worker.jobs or worker.arrivals or worker.pool.leases:
                    await asyncio.sleep(0.01)
                figures = worker.pool.figures()
                assert figures[Group.KV].owned == figures[Group.STATE].owned == 0
                assert figures[Group.KV].pinned == figures[Group.STATE].pinned == 0

    return check
