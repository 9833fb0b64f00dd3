"""TCP_INFO by offset and length; the verdict as a pure function over samples written here."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from typing import Any

import pytest

from engine.transport.messages import Key
from engine.transport.monitor import (
    LinkMonitor,
    LinkSample,
    LinkState,
    TcpInfo,
    Thresholds,
    Verdict,
    advance,
    difference,
    parse_tcp_info,
    read_tcp_info,
)
from engine.transport.outbound import Peer

IDLE = LinkSample(0, 0.02, 4, 0.0, 0.004, 0.004, 0, 0.0, 0.0, 0.0, 0.0, 0, 0)
BUSY = replace(IDLE, busy=0.9, goodput_bps=5e8)
SATURATED = replace(BUSY, busy=1.0, goodput_bps=9.5e8, rtt_s=0.030, backlog_bytes=10**7)
SLOW_READER = replace(BUSY, busy=1.0, rwnd_limited=0.3)
LOSSY = replace(BUSY, busy=1.0, loss=0.02, retransmits=5, rtt_s=0.006)


def verdicts(*stages: tuple[LinkSample, int]) -> list[str]:
    """The verdict at the end of each stage of `count` samples of 20 ms."""
    state, now, seen = LinkState(), 0.0, []
    for sample, count in stages:
        for _ in range(count):
            now += 0.02
            state = advance(state, replace(sample, time_s=now), Thresholds())
        seen.append(state.verdict)
    return seen


def test_fields_are_read_by_offset() -> None:
    data = bytearray(280)
    for offset, value in ((68, 4200), (80, 10), (100, 7), (144, 99), (148, 4000)):
        struct.pack_into("=I", data, offset, value)
    for offset, value in ((120, 5 << 32), (168, 10**6), (176, 250_000), (184, 1000), (208, 1448)):
        struct.pack_into("=Q", data, offset, value)
    assert parse_tcp_info(bytes(data)) == TcpInfo(
        rtt_s=0.0042,
        min_rtt_s=0.004,
        cwnd=10,
        retransmits=7,
        bytes_acked=5 << 32,
        bytes_retransmitted=1448,
        unsent_bytes=99,
        busy_s=1.0,
        rwnd_limited_s=0.25,
        sndbuf_limited_s=0.001,
    )


@pytest.mark.parametrize("length", [0, 104, 192, 232, 280, 512])
def test_shorter_and_longer_structures_are_read_as_far_as_they_go(length: int) -> None:
    info = parse_tcp_info(b"\x01" * length)
    assert (info.bytes_retransmitted > 0) is (length >= 216)
    assert (info.retransmits > 0) is (length >= 104)


def test_unknown_minimum_rtt_is_none() -> None:
    data = bytearray(232)
    struct.pack_into("=I", data, 148, 0xFFFFFFFF)
    assert parse_tcp_info(bytes(data)).min_rtt_s == 0.0


def test_difference_of_two_readings() -> None:
    before = [TcpInfo(bytes_acked=1000, busy_s=1.0), TcpInfo(bytes_acked=0)]
    after = [
        TcpInfo(0.005, 0.004, 10, 3, 126_000, 2500, 10, 1.02, 0.005, 0.01),
        TcpInfo(0.009, 0.006, 10, 0, 0, 0, 0, 0.0, 0.0, 0.0),
    ]
    sample = difference(before, after, 7.0, 0.02, 55)
    assert sample.goodput_bps == pytest.approx(8 * 125_000 / 0.02)
    assert sample.rtt_s == 0.005  # only the connection that moves counts
    assert sample.min_rtt_s == 0.004
    assert sample.loss == pytest.approx(2500 / 127_500)
    assert sample.busy == pytest.approx(1.0)
    assert sample.rwnd_limited == pytest.approx(0.25)
    assert sample.sndbuf_limited == pytest.approx(0.5)
    assert (sample.retransmits, sample.unsent_bytes, sample.backlog_bytes) == (3, 10, 55)


def test_each_cause_is_named_and_then_forgotten() -> None:
    for sample, verdict in (
        (BUSY, "busy"),
        (SATURATED, "saturated"),
        (SLOW_READER, "receiver-limited"),
        (LOSSY, "lossy"),
    ):
        assert verdicts((IDLE, 20), (sample, 50), (IDLE, 50)) == ["free", verdict, "free"]


def test_one_odd_sample_changes_nothing() -> None:
    assert verdicts((BUSY, 50), (LOSSY, 1), (BUSY, 20), (SATURATED, 1), (BUSY, 20)) == ["busy"] * 5


def test_a_figure_that_hovers_at_the_threshold_does_not_flap() -> None:
    """Queue of 2.5 ms is the threshold at 4 ms; 2.0 ms is below it and above what leaves."""
    over, under = (replace(BUSY, busy=1.0, rtt_s=0.004 + q) for q in (0.0035, 0.002))
    assert verdicts((under, 50), (over, 50), (under, 100)) == ["busy", "saturated", "saturated"]
    assert verdicts((over, 50), (replace(under, rtt_s=0.0045), 100)) == ["saturated", "busy"]


def test_monitor_skips_connections_that_were_replaced() -> None:
    monitor = LinkMonitor()
    assert monitor.read(1.0, [(0, TcpInfo(bytes_acked=100)), (1, TcpInfo())], 0) is None
    sample = monitor.read(1.5, [(0, TcpInfo(bytes_acked=5)), (1, TcpInfo(bytes_acked=500))], 0)
    assert sample is not None
    assert (sample.connections, sample.goodput_bps) == (1, 8000.0)
    assert monitor.state.verdict is Verdict.FREE


def test_a_real_socket() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        peer, _ = server.accept()
        client.sendall(b"x" * 1000)
        peer.recv(1000, socket.MSG_WAITALL)
        peer.close()
        assert read_tcp_info(client).bytes_acked in (1000, 1001)


async def test_slow_reader_is_named_through_the_client(bench: Any) -> None:
    """The proxy reads slowly with its receive buffer full: the window is the limit."""
    _, receiver = await bench.decoder()
    sender = await bench.sender(sample_s=0.02)
    proxy = await bench.proxy(receiver, rate_bytes_s=1 << 20, rcvbuf_bytes=1 << 16)
    manifest = bench.manifest(4, kv=7 << 20, state=4096, chunk_bytes=256 * 1024)
    peer = Peer("127.0.0.1", proxy.port)
    transfer = await sender.open(peer, Key("r"), manifest)
    bench.push_all(transfer)
    rows = []

    def limited() -> bool:
        rows.extend(sender.link_samples())
        return bool(rows) and rows[-1]["verdict"] == "receiver-limited"

    await bench.until(limited, 20)
    assert {"time_s", "goodput_bps", "rtt_s", "host", "port", "verdict"} <= rows[0].keys()
    await transfer.cancel()
