"""Data connections leave a control that paces for one that does not, where the path is near."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest

from engine.transport.arena import SharedArena
from engine.transport.inbound import Inbound
from engine.transport.messages import Key, Manifest
from engine.transport.outbound import Peer, Session
from engine.transport.pacing import (
    NEAR_RTT_S,
    UNPACED,
    chosen,
    congestion_of,
    data_options,
    host_congestion,
)
from engine.transport.regions import Kind, Region, RegionSize
from engine.transport.settings import Settings
from engine.transport.sockets import TcpOptions, apply_options
from engine.transport.tls import Stream


@pytest.mark.parametrize(
    ("named", "current", "min_rtt_s", "expected"),
    [
        ("", "bbr", NEAR_RTT_S / 2, UNPACED),
        ("", "bbr", NEAR_RTT_S, ()),  # far enough for a link to be what limits
        ("", "bbr", 0.0, ()),  # nothing is known of the path
        ("", "cubic", NEAR_RTT_S / 2, ()),
        ("bbr", "bbr", NEAR_RTT_S / 2, ()),  # asked for by name
    ],
)
def test_what_is_chosen(
    named: str, current: str, min_rtt_s: float, expected: tuple[str, ...]
) -> None:
    assert chosen(named, current, min_rtt_s) == expected


def test_loopback_is_near() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
    ):
        host = host_congestion()
        assert congestion_of(sock) == host
        named = TcpOptions(sndbuf_bytes=1 << 16, congestion=host)
        assert data_options(named, sock) == named
        options = data_options(TcpOptions(sndbuf_bytes=1 << 16), sock)
        assert options.sndbuf_bytes == 1 << 16
        with socket.socket() as data:
            apply_options(data, options)
            used = congestion_of(data)
        # A loaded machine may take longer than a near path does, and then nothing changes.
        assert used in {host, *(UNPACED if host == "bbr" else ())}


def test_data_connections_take_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control connection keeps the host's control: it is what the choice is made by."""
    met: list[str] = []

    def choose(options: TcpOptions, connected: Stream) -> TcpOptions:
        met.append(congestion_of(connected))
        return replace(options, congestion="reno")  # every host has it and lets anyone take it

    monkeypatch.setattr("engine.transport.outbound.data_options", choose)
    arena = SharedArena.create(4096)
    settings = Settings(incarnation=1, layout="t", lanes=2)
    inbound = Inbound(replace(settings, incarnation=2), arena, lambda: None, None, lambda: True)
    session = Session(Peer("127.0.0.1", inbound.port), settings, arena, lambda: None)
    try:
        manifest = Manifest((RegionSize(Region(0, Kind.KV), 4096),), n_tokens=1)
        session.open(Key("r"), manifest)
        until_s = time.monotonic() + 20
        sockets: list[Stream | None] = [None]
        while None in sockets:
            assert time.monotonic() < until_s
            inbound.accept()
            inbound.service(time.monotonic())
            session.service(time.monotonic(), True)
            sockets = [lane.socket for lane in session.lanes]
            time.sleep(0.001)
        assert [congestion_of(sock) for sock in sockets if sock is not None] == ["reno", "reno"]
        assert met[0] == host_congestion()
    finally:
        session.close()
        inbound.close()
        arena.close()
