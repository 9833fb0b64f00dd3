"""What every backend promises, with real bytes. Rates are checked generously: hosts are noisy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from harness.links.shape import FRAME_BYTES, SEGMENT_PAYLOAD_BYTES
from harness.links.spec import parse_link
from harness.links.state import LinkState
from harness.links.tbf import TbfLink

BACKENDS = ["relay", "tbf", "tun", pytest.param("netem", marks=pytest.mark.netem)]
DELAYING = ["relay", "tun", pytest.param("netem", marks=pytest.mark.netem)]
PAYLOAD_BYTES = 3_000_000


@pytest.mark.parametrize("backend", BACKENDS)
async def test_bytes_cross_once_and_are_counted_on_the_link(
    backend: str, open_backend, listen
) -> None:
    link = await open_backend(backend, rate_gbps=0.1)
    traffic = await listen(link, "pd")
    received, seconds = await traffic.send(PAYLOAD_BYTES)
    assert received == PAYLOAD_BYTES
    frames = PAYLOAD_BYTES * FRAME_BYTES / SEGMENT_PAYLOAD_BYTES
    # A host's delays can only make it slower; a burst's worth may pass before the rate bites.
    assert seconds > 0.8 * frames * 8 / 0.1e9
    forward = link.direction("prfaas", "pd")
    assert frames * 0.99 < forward.sent_bytes() < frames * 1.3
    assert link.direction("pd", "prfaas").sent_bytes() < 0.2 * frames
    assert backend in (link.backend, link.state.backend)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_traffic_inside_a_cluster_does_not_cross(backend: str, open_backend, listen) -> None:
    link = await open_backend(backend, rate_gbps=0.05)
    traffic = await listen(link, "pd")
    link.sample()
    before = link.forward.sent_bytes() + link.reverse.sent_bytes()
    received, _ = await traffic.send(PAYLOAD_BYTES, crossing=False)
    assert received == PAYLOAD_BYTES
    # Neighbour discovery may cross, a cache may not.
    assert link.forward.sent_bytes() + link.reverse.sent_bytes() - before < 2_000


@pytest.mark.parametrize("backend", BACKENDS)
async def test_directions_are_shaped_apart(backend: str, open_backend, listen) -> None:
    link = await open_backend(backend, rate_gbps=1.0, reverse={"rate_gbps": 0.04})
    there, back = await listen(link, "pd"), await listen(link, "prfaas")
    _, fast = await there.send(1_000_000)
    _, slow = await back.send(1_000_000)
    # 1 MB back needs 0.21 s at 40 Mbit/s whatever the host does.
    assert slow > 0.16
    assert fast < slow
    assert link.reverse.sent_bytes() > 1_000_000


@pytest.mark.parametrize("backend", DELAYING)
async def test_delay_is_applied(backend: str, open_backend, listen) -> None:
    link = await open_backend(backend, rate_gbps=1.0, rtt_ms=200)
    traffic = await listen(link, "pd")
    _, seconds = await traffic.send(1)
    assert seconds > 0.199
    assert pytest.approx(link.forward.signals.min_rtt_s) == 0.2


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_rate_step_and_an_outage_are_followed(backend: str, open_backend, listen) -> None:
    link = await open_backend(
        backend,
        rate_gbps=0.02,
        schedule=[{"at_s": 0.5, "down": True}, {"at_s": 1.5, "down": False, "rate_gbps": 0.2}],
    )
    traffic = await listen(link, "pd")
    link.start_schedule()
    began_s = asyncio.get_running_loop().time()
    transfer = asyncio.create_task(traffic.send(4_000_000))
    await asyncio.sleep(began_s + 1.0 - asyncio.get_running_loop().time())
    link.sample()
    during = link.forward.sent_bytes()
    assert link.forward.signals.rate_bps == 0.0
    received, _ = await transfer
    assert received == 4_000_000
    # 0.5 s at 20 Mbit/s carries 1.25 MB at most (and the queue drains); the rest waits for 1.5 s.
    assert during < 2_000_000
    assert asyncio.get_running_loop().time() - began_s > 1.5
    assert link.forward.signals.rate_bps == 0.2e9


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_falling_rate_lets_go_of_what_is_queued(backend: str, open_backend, listen) -> None:
    """A token bucket made smaller must still hold the largest packet in its queue."""
    link = await open_backend(
        backend, rate_gbps=0.2, schedule=[{"at_s": 0.4, "rate_gbps": 0.04}], queue_ms=20
    )
    traffic = await listen(link, "pd")
    link.start_schedule()
    began_s = asyncio.get_running_loop().time()
    received, _ = await traffic.send(12_000_000)
    assert received == 12_000_000
    assert asyncio.get_running_loop().time() - began_s > 0.4


async def test_htb_serves_where_there_is_no_tbf(offers, listen) -> None:
    if not offers.available("tbf"):
        pytest.skip(offers.by_backend["tbf"].reason)
    spec = parse_link(
        {"rate_gbps": 0.1, "schedule": [{"at_s": 0, "rate_gbps": 0.1}, {"at_s": 0.5, "down": True}]}
    )
    link = TbfLink(spec, LinkState.new("tbf", ("prfaas", "pd"), persistent=False), "htb")
    try:
        await link.open()
        traffic = await listen(link, "pd")
        received, seconds = await traffic.send(PAYLOAD_BYTES)
        assert received == PAYLOAD_BYTES
        assert seconds > 0.8 * PAYLOAD_BYTES * 8 / 0.1e9
        before = link.forward.sent_bytes()
        assert before > PAYLOAD_BYTES
        for timed in spec.timeline():
            await link.apply(timed.shape)
        link.sample()
        assert link.forward.sent_bytes() >= before
        assert "htb" in link.description
    finally:
        await link.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_signals_report_a_saturated_link(backend: str, open_backend, listen) -> None:
    link = await open_backend(backend, rate_gbps=0.05, queue_ms=40)
    traffic = await listen(link, "pd")
    transfer = asyncio.create_task(traffic.send(5_000_000))
    seen = []
    while not transfer.done():
        await asyncio.sleep(0.05)
        seen.append((link.forward.signals.utilisation, link.forward.signals.backlog_bytes))
    await transfer
    # A busy host may not fill the link, but what crosses must show, and on the right side.
    assert max(utilisation for utilisation, _ in seen) > 0.3
    assert max(backlog for _, backlog in seen) > 0
    assert link.reverse.signals.utilisation < 0.3


async def test_loss_is_applied_and_counted_by_tun(open_backend, listen) -> None:
    link = await open_backend(
        "tun",
        rate_gbps=0.2,
        rtt_ms=1,
        queue_ms=200,
        loss={"model": "independent", "probability": 0.02},
    )
    traffic = await listen(link, "pd")
    received, _ = await traffic.send(6_000_000)
    assert received == 6_000_000
    counters = link.forward.counters
    share = counters.dropped_packets / (counters.sent_packets + counters.dropped_packets)
    assert 0.008 < share < 0.05


async def test_relay_resets_what_it_cannot_connect(open_backend) -> None:
    link = await open_backend("relay", rate_gbps=1.0)
    host, port = await link.expose("pd", "127.0.0.1", 1)
    with pytest.raises(ConnectionResetError):
        reader, _ = await asyncio.open_connection(host, port)
        await asyncio.wait_for(reader.read(1), 5)


async def test_relay_passes_on_a_reset(open_backend) -> None:
    link = await open_backend("relay", rate_gbps=1.0)

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.transport.abort()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    host, port = await link.expose("pd", "127.0.0.1", server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"x")
    # An abort without unread data is a clean end to TCP; either way the stream ends soon.
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(1), 5) == b""
    writer.close()
    server.close()


async def test_relay_holds_back_a_sender_whose_receiver_is_slow(open_backend) -> None:
    link = await open_backend("relay", rate_gbps=10.0)
    reading = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reading.wait()
        writer.write(str(len(await reader.read())).encode())
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    host, port = await link.expose("pd", "127.0.0.1", server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(bytes(80_000_000))
    await asyncio.sleep(1.0)
    # Relay allowance, socket buffers and stream limits are far below what was offered.
    assert link.forward.sent_bytes() < 60_000_000
    reading.set()
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 30) == b"80000000"
    server.close()


@pytest.mark.parametrize("backend", ["relay", "tun"])
async def test_a_lost_emulator_is_a_failure_of_the_link(backend: str, open_backend) -> None:
    link = await open_backend(backend, rate_gbps=1.0)
    assert link.failure is None
    os.kill(link.state.emulator.pid, signal.SIGKILL)
    for _ in range(60):
        await asyncio.sleep(0.05)
        if link.failure:
            break
    assert link.failure == f"the {backend} emulator process ended (exit code -9)"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_totals_stay_readable_after_close(backend: str, open_backend, listen) -> None:
    link = await open_backend(backend, rate_gbps=1.0)
    await (await listen(link, "pd")).send(1_000_000)
    await link.close()
    assert link.forward.sent_bytes() > 1_000_000
    assert link.read_counters()[0].sent_bytes == link.forward.sent_bytes()


async def test_closing_ends_even_when_its_caller_is_cancelled(open_backend) -> None:
    link = await open_backend("relay", rate_gbps=1.0)
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not link.state.path.exists()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_close_removes_everything_and_may_be_repeated(backend: str, open_backend) -> None:
    link = await open_backend(backend, rate_gbps=1.0)
    state = link.state
    paths = [Path("/run/netns") / name for name in state.namespaces] + [state.path]
    assert all(path.exists() for path in paths)
    await link.close()
    await link.close()
    assert not any(path.exists() for path in paths)
    assert state.emulator is None or not state.emulator.alive()
