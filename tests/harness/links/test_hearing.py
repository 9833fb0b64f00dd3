"""What the senders' TCP saw becomes what the control plane knows of a link."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from aiohttp import ClientSession, UnixConnector, web

from engine.transport.observed import Observed
from harness.fleets.senders import listen_to_senders
from harness.links.base import HEARD_S, LinkDirection, verdict_by_use
from harness.links.counters import Counters
from harness.links.shape import Shape

SEEN = Observed("lossy", 2, 8e6, 0.03, 0.01, 5, 0.02, 0.1, 0.2, 70_000)
SHAPE = Shape(100e6)


def seen_and_counted(end_to_end: bool, later_s: float) -> LinkDirection:
    direction = LinkDirection("a", "b", end_to_end)
    direction.observe(0.0, Counters(), SHAPE, 0.01)
    direction.hear(1.0, SEEN)
    direction.observe(1.0 + later_s, Counters(12_500_000, 9000, 0, 1000), SHAPE, 0.01)
    return direction


def test_tcp_that_crosses_the_link_is_believed() -> None:
    signals = seen_and_counted(True, 0.05).signals
    assert (signals.verdict, signals.loss, signals.rtt_s) == ("lossy", 0.02, 0.03)
    assert signals.backlog_bytes == 70_000
    assert (signals.connections, signals.goodput_bps, signals.retransmits) == (2, 8e6, 5)


def test_tcp_that_ends_at_a_relay_knows_only_what_waits() -> None:
    signals = seen_and_counted(False, 0.05).signals
    assert (signals.verdict, signals.loss) == ("saturated", 0.0)
    assert signals.rtt_s == pytest.approx(0.01 + 1000 * 8 / 100e6)
    assert signals.backlog_bytes == 70_000


def test_old_words_do_not_count() -> None:
    signals = seen_and_counted(True, HEARD_S + 0.1).signals
    assert signals.backlog_bytes == 1000
    assert signals.verdict != "lossy"


def test_an_idle_link_is_free_and_has_its_own_rtt() -> None:
    direction = LinkDirection("a", "b")
    direction.observe(0.0, Counters(), SHAPE, 0.01)
    direction.hear(1.0, Observed())
    assert (direction.signals.verdict, direction.signals.rtt_s) == ("free", 0.01)


def test_retransmits_are_counted_on() -> None:
    direction = LinkDirection("a", "b")
    direction.hear(1.0, SEEN)
    direction.hear(2.0, replace(SEEN, retransmits=7))
    assert direction.signals.retransmits == 12


def test_verdict_by_use() -> None:
    assert [verdict_by_use(use) for use in (0.0, 0.6, 0.99)] == ["free", "busy", "saturated"]


async def test_senders_are_asked_and_the_dead_are_skipped(tmp_path) -> None:
    rows = [
        {
            **dict.fromkeys(("rtt_s", "min_rtt_s", "loss", "rwnd_limited", "sndbuf_limited"), 0.0),
            "seconds": 0.5,
            "connections": 2,
            "goodput_bps": 8e6,
            "retransmits": 1,
            "busy": 1.0,
            "backlog_bytes": 10,
            "verdict": "busy",
            "host": "h",
            "port": 1,
        }
    ]

    async def samples(_: web.Request) -> web.Response:
        elsewhere = [{**row, "port": 2, "verdict": "lossy", "connections": 9} for row in rows]
        return web.json_response([*rows, *elsewhere])

    app = web.Application()
    app.router.add_get("/link-samples", samples)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "up.sock")).start()
    heard: asyncio.Queue[Observed] = asyncio.Queue()

    class Ear:
        def hear(self, now_s: float, seen: Observed) -> None:
            heard.put_nowait(seen)

    sessions = {
        name: ClientSession("http://w", connector=UnixConnector(str(tmp_path / f"{name}.sock")))
        for name in ("up", "down")
    }
    task = asyncio.create_task(listen_to_senders(lambda: sessions, lambda: {("h", 1)}, Ear(), 0.01))
    seen = await asyncio.wait_for(heard.get(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for session in sessions.values():
        await session.close()
    await runner.cleanup()
    assert (seen.verdict, seen.connections, seen.backlog_bytes) == ("busy", 2, 10)
