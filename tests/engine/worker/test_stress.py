"""Random traffic with random departures: every answer right, nothing left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from engine.sequence import Sampling
from engine.worker.errors import WorkerError
from engine.worker.messages import DecodeRequest, Destination, Key, PrefillRequest


@pytest.mark.parametrize("seed", [1, 2])
async def test_cancellations_at_any_point_leak_nothing(seed, start_worker, engine, nothing_leaked):
    rng = random.Random(seed)
    tight = {"pages": 24, "slots": 6, "max_batch": 4}
    staging_bytes = 60_000 if seed == 2 else 0
    p = await start_worker(role="prefill", staging_bytes=staging_bytes, **tight)
    d = await start_worker(role="decode", staging_bytes=staging_bytes, **tight)
    alone = engine()
    common = [rng.randrange(256) for _ in range(80)]
    outcomes: dict[str, int] = {"right": 0, "left": 0, "failed": 0}

    async def serve(name: str, prompt: list[int], count: int) -> list[int]:
        key = Key(name, 1)
        place = Destination("127.0.0.1", d.courier.plane.port, d.incarnation)
        held = rng.choice((0, 32, 64))
        delivered = False
        try:
            await p.prefill(PrefillRequest(key, prompt, 0, 0, held, 0, "", Sampling(), place))
            delivered = True
            await asyncio.sleep(rng.random() * 0.01)
            request = DecodeRequest(key, count, True, Sampling())
            return [token.id async for token in d.stream(key, d.take(request))]
        finally:
            # What a router does when an attempt ends before its decode did.
            p.abandon(key)
            d.abandon(key)
            assert delivered or key not in p.jobs

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * 0.5)
        prompt = common[: rng.choice((0, 40, 80))] + [
            rng.randrange(256) for _ in range(rng.randrange(1, 90))
        ]
        count = rng.randrange(1, 40)
        task = asyncio.create_task(serve(f"r{number}", prompt, count))
        if rng.random() < 0.4:
            await asyncio.wait([task], timeout=rng.random() * 0.3)
            task.cancel()
        elif rng.random() < 0.2:
            await asyncio.wait([task], timeout=rng.random() * 0.3)
            rng.choice((p, d)).abandon(Key(f"r{number}", 1))
        try:
            tokens = await task
        except asyncio.CancelledError:
            outcomes["left"] += 1
        except WorkerError:
            outcomes["failed"] += 1
        else:
            assert tokens == alone.generate(prompt, count)
            outcomes["right"] += 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(number) for number in range(40)))
    await nothing_leaked(p, d)
    assert outcomes["right"] > 5
    assert sum(outcomes.values()) == 40
    for worker in (p, d):
        assert worker.state == "ready" and not worker.loop._jobs
