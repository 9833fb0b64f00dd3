"""What TCP itself knows of a link: samples of TCP_INFO.

`struct tcp_info` grows with the kernel (232 bytes on 6.1, 280 on 6.18), so fields are read by
offset as far as the returned length goes.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

#: Room for future kernels; the call returns how much it filled.
_MAX_BYTES = 512
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Counters of one connection, as the kernel keeps them (0 where it does not).

    rtt_s, min_rtt_s; cwnd in segments; retransmits (segments, total); bytes_acked and
    bytes_retransmitted (total); unsent_bytes: in the socket, not yet sent; busy_s: time with data
    outstanding, of which rwnd_limited_s and sndbuf_limited_s were spent waiting for the receiver's
    window and for this side's buffer.
    """

    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    cwnd: int = 0
    retransmits: int = 0
    bytes_acked: int = 0
    bytes_retransmitted: int = 0
    unsent_bytes: int = 0
    busy_s: float = 0.0
    rwnd_limited_s: float = 0.0
    sndbuf_limited_s: float = 0.0


def parse_tcp_info(data: bytes) -> TcpInfo:
    """Read the fields that lie within `data`; unknown minimum RTT (all ones) reads as 0."""

    def u32(offset: int) -> int:
        return _U32.unpack_from(data, offset)[0] if len(data) >= offset + 4 else 0

    def u64(offset: int) -> int:
        return _U64.unpack_from(data, offset)[0] if len(data) >= offset + 8 else 0

    min_rtt_us = u32(148)
    return TcpInfo(
        rtt_s=u32(68) * 1e-6,
        min_rtt_s=0.0 if min_rtt_us == 0xFFFFFFFF else min_rtt_us * 1e-6,
        cwnd=u32(80),
        retransmits=u32(100),
        bytes_acked=u64(120),
        bytes_retransmitted=u64(208),
        unsent_bytes=u32(144),
        busy_s=u64(168) * 1e-6,
        rwnd_limited_s=u64(176) * 1e-6,
        sndbuf_limited_s=u64(184) * 1e-6,
    )


def read_tcp_info(sock: socket.socket) -> TcpInfo:
    """Raises OSError for a closed socket."""
    return parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MAX_BYTES))
