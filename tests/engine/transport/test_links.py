"""The monitor names the cause on real shaped links; needs root and a TUN device or netem."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from harness.links.factory import shaped_link
from harness.links.probe import probe
from harness.links.spec import parse_link

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="shaped links need root")


@functools.cache
def lossy_backend() -> str:
    """The backend that can delay and lose, or an empty string."""
    offers = probe()
    return next((name for name in ("netem", "tun") if offers.available(name)), "")


@contextlib.asynccontextmanager
async def worker(prefix: list[str], part: str, options: dict) -> AsyncIterator[Any]:
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-m", "engine.transport.peers", part, json.dumps(options)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None

    async def ask(job: dict | None) -> dict:
        if job is not None:
            process.stdin.write(json.dumps(job).encode() + b"\n")
        answer: dict = json.loads(await process.stdout.readline())
        return answer

    try:
        yield ask
    finally:
        process.stdin.close()
        await process.wait()


async def verdicts(link_table: dict, layers: int, layer_bytes: int) -> list[str]:
    """The verdicts that one transfer over a link of this specification went through."""
    backend = lossy_backend()
    if not backend:
        pytest.skip("neither netem nor TUN here")
    table = {"backend": backend, **link_table}
    arena = {"arena_bytes": layers * layer_bytes}
    async with shaped_link(parse_link(table, "test")) as link:
        from_side, to_side = link.sides
        host = link.bind_host(to_side)
        async with (
            worker(link.launch_prefix(to_side), "sink", {**arena, "host": host}) as sink,
            worker(link.launch_prefix(from_side), "source", arena) as source,
        ):
            port = (await sink(None))["port"]
            await source(None)
            to = list(await link.expose(to_side, host, port))
            job = {"layers": layers, "layer_bytes": layer_bytes, "to": to, "chunk_bytes": 1 << 16}
            answer = await source(job)
    return list(answer["verdicts"])


async def test_link_bound_is_saturated() -> None:
    seen = await verdicts({"rate_gbps": 0.05, "rtt_ms": 4.0, "queue_ms": 30.0}, 4, 4 << 20)
    assert "saturated" in seen
    assert "receiver-limited" not in seen


async def test_lossy_link_is_lossy() -> None:
    loss = {"model": "independent", "probability": 0.03}
    seen = await verdicts({"rate_gbps": 0.1, "rtt_ms": 4.0, "loss": loss}, 4, 1 << 20)
    assert "lossy" in seen


async def test_idle_link_is_free() -> None:
    seen = await verdicts({"rate_gbps": 1.0, "rtt_ms": 4.0}, 1, 4096)
    assert set(seen) <= {"free"}
