"""Data connections leave a control that paces for one that does not, where the path is near."""

from __future__ import annotations

import socket

import pytest

from engine.transport.pacing import (
    NEAR_RTT_S,
    UNPACED,
    chosen,
    congestion_of,
    data_options,
    host_congestion,
)
from engine.transport.sockets import TcpOptions, apply_options


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
