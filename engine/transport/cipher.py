"""How fast one core seals and opens TLS records: the bound that encryption puts on a connection.

Both ends as on the wire, in one thread over a socket pair whose share is not counted. CPU time is
counted, so a busy machine does not matter.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.transport.security import Security, tls_ends
from engine.transport.tls import TlsSocket

PIECE_BYTES = 1 << 16
HANDSHAKE_S = 20.0


@dataclass(frozen=True, slots=True)
class CipherRate:
    """Payload Gbit/s of one core that does nothing but seal (a sender) or open (a receiver)."""

    cipher: str
    seal_gbps: float
    open_gbps: float

    @property
    def bound_gbps(self) -> float:
        """What one core at each end can pass."""
        return min(self.seal_gbps, self.open_gbps)

    @property
    def cpu_s_per_gb(self) -> float:
        """Of both ends together."""
        return 8 / self.seal_gbps + 8 / self.open_gbps


def measure_cipher(sender: Security, receiver: Security, size_bytes: int = 128 << 20) -> CipherRate:
    """Pass `size_bytes` in pieces of 64 KiB. Raises SecurityError."""
    left, right = socket.socketpair()
    with left, right:
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PIECE_BYTES)
        out = tls_ends(sender, server_side=False)(left)
        into = tls_ends(receiver, server_side=True)(right)
        with ThreadPoolExecutor(1) as other:
            listening = other.submit(into.handshake, HANDSHAKE_S)
            out.handshake(HANDSHAKE_S)
            listening.result()
        piece = memoryview(os.urandom(PIECE_BYTES))
        room = memoryview(bytearray(PIECE_BYTES))
        sealing_s = opening_s = 0.0
        pieces = max(1, size_bytes // PIECE_BYTES)
        for number in range(pieces + 1):
            began_s = time.thread_time()
            out.seal(piece)
            sealed_s = time.thread_time() - began_s
            out.flush()
            opened_s = _open(into, room)
            if number:  # the first one touches the memory
                sealing_s += sealed_s
                opening_s += opened_s
        gigabits = pieces * PIECE_BYTES * 8 / 1e9
        return CipherRate(out.cipher(), gigabits / sealing_s, gigabits / opening_s)


def _open(into: TlsSocket, room: memoryview) -> float:
    """Fill `room`; CPU seconds of this thread, without those of the socket."""
    at, taken_s = 0, 0.0
    while at < len(room):
        began_s = time.thread_time()
        count = into.open(room[at:])
        taken_s += time.thread_time() - began_s
        if count is None:
            into.fill()
        else:
            at += count
    return taken_s


def median_rate(rates: Sequence[CipherRate]) -> CipherRate:
    """Of one or more measured over time, each figure by itself."""
    return CipherRate(
        rates[0].cipher,
        statistics.median(rate.seal_gbps for rate in rates),
        statistics.median(rate.open_gbps for rate in rates),
    )
