"""What the prefill workers' transport says of the link that their caches cross.

The link's own counters do not know why it carries what it carries, nor what still waits at the
workers. Their monitors do (TCP_INFO of every connection, `engine.transport.monitor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import aiohttp

from engine.transport.observed import Observed, observe

INTERVAL_S = 0.5
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class Hearer(Protocol):
    """A direction of a link that takes what its senders' TCP saw."""

    def hear(self, now_s: float, seen: Observed) -> None: ...


async def listen_to_senders(
    sessions: Callable[[], Mapping[str, aiohttp.ClientSession]],
    across: Callable[[], Collection[tuple[str, int]]],
    direction: Hearer,
    interval_s: float = INTERVAL_S,
) -> None:
    """Until cancelled: ask every worker that `sessions` names for its samples, and tell `direction`
    those of peers dialled at the addresses `across` (others do not cross the link). A worker that
    does not answer has nothing to say."""
    loop = asyncio.get_running_loop()
    then_s = loop.time()
    while True:
        await asyncio.sleep(interval_s)
        asked = sessions()
        answers = await asyncio.gather(*(_samples(name, each) for name, each in asked.items()))
        now_s, addresses = loop.time(), across()
        crossing = (
            row for rows in answers for row in rows if (row["host"], row["port"]) in addresses
        )
        direction.hear(now_s, observe(crossing, now_s - then_s))
        then_s = now_s


async def _samples(name: str, session: aiohttp.ClientSession) -> list[dict[str, Any]]:
    try:
        async with session.get("/link-samples", timeout=_TIMEOUT) as response:
            if response.status != 200:
                return []
            return [{**row, "plane": name} for row in await response.json()]
    except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError):
        return []  # RuntimeError: its session was closed for a restart
