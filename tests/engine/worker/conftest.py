"""Workers in this process, each with its data plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.cache.figures import Group
from engine.cache.storage import CacheStorage
from engine.pacing import Pacing
from engine.transport.arena import SharedArena
from engine.worker.loading import load_engine
from engine.worker.options import WorkerOptions
from engine.worker.worker import Worker

PAGE = 16


@pytest.fixture
def crashes() -> list[BaseException]:
    """What ended engine loops; a test that expects one takes it out."""
    return []


@pytest.fixture
async def start_worker(crashes) -> AsyncIterator[Callable[..., Awaitable[Worker]]]:
    workers: list[Worker] = []

    async def start(pacing: Pacing | None = None, staging_bytes: int = 0, **options: Any) -> Worker:
        settings = WorkerOptions(
            socket=None,
            listen=None,
            **{"page_tokens": PAGE, "pages": 64, "slots": 16, "checkpoint_interval": 2, **options},
        )
        engine = load_engine(settings)
        if staging_bytes:
            # As on a GPU: the cache lies outside the arena.
            engine = replace(
                engine,
                storage=CacheStorage(engine.layout),
                arena=SharedArena.create(staging_bytes),
                staged=True,
            )
        worker = Worker(settings, engine, pacing)
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
        for worker in workers:
            for _ in range(1000):
                if not (worker.jobs or worker.arrivals or worker.pool.leases):
                    break
                await asyncio.sleep(0.01)
            figures = worker.pool.figures()
            assert worker.pool.leases == len(worker.jobs) == len(worker.arrivals) == 0
            assert figures[Group.KV].owned == figures[Group.STATE].owned == 0
            assert figures[Group.KV].pinned == figures[Group.STATE].pinned == 0

    return check
