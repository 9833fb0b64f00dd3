"""TLS by Python's `ssl`, with records kept in memory between OpenSSL and the socket.

`ssl` on a socket makes one system call for each record of 16 KiB it writes and two for each it
reads. Here a call carries many records, which halves what a sender pays beside the cipher. Each
record that is read is a call from Python all the same.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

from engine.transport.tls import Buffer, TlsSocket

#: Payload sealed, and ciphertext read, at a time: what stays in a core's cache.
PIECE_BYTES = 1 << 18
#: A record's header, type byte and tag, for as many records as make up a piece.
_ROOM_BYTES = PIECE_BYTES + 32 * (PIECE_BYTES >> 14)


class MemoryTls(TlsSocket):
    """See `TlsSocket`."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        super().__init__(raw)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._records = memoryview(bytearray(_ROOM_BYTES))
        #: Records of the `send` in progress that did not fit, and how much payload they hold.
        self._sealed = b""
        self._sealed_payload = 0

    def handshake(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send_pending()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("the TLS handshake took too long") from None
                self.raw.settimeout(left_s)
                if not self._fill():
                    raise ConnectionResetError("closed during the TLS handshake") from None
            except ssl.SSLError:
                self._send_pending()  # the peer is told why
                raise
            else:
                self._send_pending()
                self.raw.settimeout(timeout_s)
                return

    def identity(self) -> str:
        # Sequence of relative distinguished names, each a sequence of (name, value) pairs.
        subject: Any = dict(self._tls.getpeercert() or {}).get("subject", ())
        pairs = [pair for part in subject for pair in part]
        return next((str(value) for name, value in pairs if name == "commonName"), "")

    def send_views(self, views: Sequence[Buffer]) -> None:
        for view in views:
            for at in range(0, len(view), PIECE_BYTES):
                self._tls.write(view[at : at + PIECE_BYTES])
                if self._outgoing.pending >= PIECE_BYTES:
                    self._send_pending()
        self._send_pending()

    def recv(self, size: int) -> bytes:
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                if not self._fill():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    def recv_buffered(self, size: int) -> bytes:
        try:
            return self._tls.read(size)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return b""

    def recv_into(self, view: memoryview) -> int:
        while True:
            try:
                count: Any = self._tls.read(len(view), view)  # an int where a buffer is given
                return int(count)
            except ssl.SSLWantReadError:
                if not self._fill():
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    def send(self, data: bytes | bytearray) -> int:
        if not self._sealed:
            self._sealed_payload = self._tls.write(data[:PIECE_BYTES])
            self._sealed = self._outgoing.read()
        while self._sealed:
            sent = self.raw.send(self._sealed)
            self._sealed = self._sealed[sent:]
        return self._sealed_payload

    def _fill(self) -> int:
        """Read records; 0 at the end of the stream."""
        count = self.raw.recv_into(self._records)
        self._incoming.write(self._records[:count])
        return count

    def _send_pending(self) -> None:
        if self._outgoing.pending:
            self.raw.sendall(self._outgoing.read())
