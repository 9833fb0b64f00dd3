"""TLS by Python's `ssl`, with records kept in memory between OpenSSL and the socket.

`ssl` on a socket makes one system call for each record of 16 KiB it writes and two for each it
reads. Here a call carries many records, which halves what a sender pays beside the cipher. Each
record that is read is a call from Python all the same.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from engine.transport.tls import PIECE_BYTES, Buffer, TlsSocket

#: A record's header, type byte and tag, for as many records as make up a piece.
_ROOM_BYTES = PIECE_BYTES + 32 * (PIECE_BYTES >> 14)


class MemoryTls(TlsSocket):
    """See `TlsSocket`."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        super().__init__(raw, server_side)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._records = memoryview(bytearray(_ROOM_BYTES))
        #: Records on their way to the socket.
        self._unsent = memoryview(b"")

    def identity(self) -> str:
        # Sequence of relative distinguished names, each a sequence of (name, value) pairs.
        subject: Any = dict(self._tls.getpeercert() or {}).get("subject", ())
        pairs = [pair for part in subject for pair in part]
        return next((str(value) for name, value in pairs if name == "commonName"), "")

    def cipher(self) -> str:
        known = self._tls.cipher()
        return known[0] if known else ""

    def negotiate(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def seal(self, data: Buffer) -> None:
        self._tls.write(data)  # all of it: memory has room

    def open(self, view: memoryview) -> int | None:
        try:
            count: Any = self._tls.read(len(view), view)  # an int where a buffer is given
        except ssl.SSLWantReadError:
            return None
        except ssl.SSLZeroReturnError:
            return 0
        return int(count)

    def flush(self) -> None:
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            self._unsent = self._unsent[self.raw.send(self._unsent) :]

    def fill(self) -> int:
        count = self.raw.recv_into(self._records)
        self._incoming.write(self._records[:count])
        return count
