"""Which congestion control data connections use: the host's, but on a near path none that paces.

BBR spreads its segments in time. Where the device's queue does not do that for it (`fq`), the
kernel sets a timer for each segment of at most 64 KiB, which costs as much processor as copying
it. Over a path whose round trip is a fraction of a millisecond the processor is what limits, so a
data connection takes one there that sends when acknowledgements come; a loss is made good in no
time.
"""

from __future__ import annotations

import socket
from dataclasses import replace

from engine.transport.monitor import read_tcp_info
from engine.transport.sockets import TcpOptions
from engine.transport.tls import Stream

#: Paths with a shorter round trip are near: within a host or a rack. At 0.1 % of random loss cubic
#: still carries 1.5 Gbit/s a connection over one (Mathis); BBR is for what is farther.
NEAR_RTT_S = 0.0003
#: Controls that pace, and what takes their place, best first: which of them a process may choose
#: is the host's to say (net.ipv4.tcp_allowed_congestion_control).
PACED = frozenset({"bbr", "bbr2", "bbr3"})
UNPACED = ("cubic", "reno")
_NAME_BYTES = 16


def congestion_of(sock: Stream) -> str:
    """The congestion control that a socket uses."""
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    return name.rstrip(b"\0").decode("ascii")


def host_congestion() -> str:
    """The congestion control that a new socket of this host gets."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return congestion_of(sock)


def data_options(options: TcpOptions, connected: Stream) -> TcpOptions:
    """Options of data connections to where `connected` leads. One that `options` names is taken as
    it is. Set before they connect: a socket that BBR has once paced stays paced."""
    rtt_s = read_tcp_info(connected).min_rtt_s
    unpaced = chosen(options.congestion, congestion_of(connected), rtt_s)
    for name in unpaced:
        if _allowed(name):
            return replace(options, congestion=name)
    return options


def chosen(named: str, current: str, min_rtt_s: float) -> tuple[str, ...]:
    """What to take instead of the `current` control, best first; empty: stay with it. min_rtt_s 0:
    not known."""
    if named or current not in PACED or not 0.0 < min_rtt_s < NEAR_RTT_S:
        return ()
    return UNPACED


def _allowed(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode("ascii"))
        except OSError:
            return False
    return True
