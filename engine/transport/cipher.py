"""How fast one core seals and opens TLS records: the bound that encryption puts on a connection.

The same contexts, cipher and record size as on the wire, but no socket: two ends in one thread that
hand each other records through memory. CPU time is counted, so a busy machine does not matter.
"""

from __future__ import annotations

import os
import ssl
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.transport.security import Security, client_context, server_context

PIECE_BYTES = 1 << 20


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
    """Pass `size_bytes` in pieces of 1 MiB. Raises SecurityError."""
    to_receiver, to_sender = ssl.MemoryBIO(), ssl.MemoryBIO()
    out = client_context(sender).wrap_bio(to_sender, to_receiver)
    into = server_context(receiver).wrap_bio(to_receiver, to_sender, server_side=True)
    _handshake(out, into)
    piece = memoryview(os.urandom(PIECE_BYTES))
    buffer = memoryview(bytearray(PIECE_BYTES))
    sealing_s = opening_s = 0.0
    pieces = max(1, size_bytes // PIECE_BYTES)
    for number in range(pieces + 1):
        began_s = time.thread_time()
        out.write(piece)
        sealed_s = time.thread_time()
        at = 0
        while at < PIECE_BYTES:
            count: Any = into.read(PIECE_BYTES - at, buffer[at:])  # an int: a buffer is given
            at += int(count)
        if number:  # the first one touches the memory
            sealing_s += sealed_s - began_s
            opening_s += time.thread_time() - sealed_s
    gigabits = pieces * PIECE_BYTES * 8 / 1e9
    known = out.cipher()
    return CipherRate(known[0] if known else "", gigabits / sealing_s, gigabits / opening_s)


def median_rate(rates: Sequence[CipherRate]) -> CipherRate:
    """Of one or more measured over time, each figure by itself."""
    return CipherRate(
        rates[0].cipher,
        statistics.median(rate.seal_gbps for rate in rates),
        statistics.median(rate.open_gbps for rate in rates),
    )


def _handshake(*ends: ssl.SSLObject) -> None:
    waiting = list(ends)
    while waiting:
        for end in list(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
