"""TLS over a connected TCP socket, with records kept in memory between OpenSSL and the socket.

OpenSSL on a socket makes one system call for each record of 16 KiB it writes and two for each it
reads. Here a call carries many records, which halves what a sender pays beside the cipher.
A `TlsSocket` is used by one thread at a time (OpenSSL objects are not safe for two).
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any

#: Payload sealed, and ciphertext read, at a time: what stays in a core's cache.
PIECE_BYTES = 1 << 18
#: A record's header, type byte and tag, for as many records as make up a piece.
_ROOM_BYTES = PIECE_BYTES + 32 * (PIECE_BYTES >> 14)


class TlsSocket:
    """The part of a socket's interface that the transport uses; `raw` carries the records.

    A peer that ends the connection without TLS's own farewell is told by `recv` as an ended stream:
    the framing has lengths and a digest, so nothing is taken for whole that was cut off.
    """

    def __init__(
        self, raw: socket.socket, context: ssl.SSLContext, server_name: str | None = None
    ) -> None:
        """`server_name` is given by the side that dialled; None: this side listens."""
        self.raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        self._records = memoryview(bytearray(_ROOM_BYTES))
        #: Records of the `send` in progress that did not fit, and how much payload they hold.
        self._sealed = b""
        self._sealed_payload = 0

    def handshake(self, timeout_s: float) -> None:
        """Raises ssl.SSLError, TimeoutError however the bytes drip in, ConnectionResetError."""
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

    def getpeercert(self) -> dict[str, Any]:
        return dict(self._tls.getpeercert() or {})

    # --- blocking ----------------------------------------------------------------------------

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        self.send_views([data])

    def send_views(self, views: Sequence[bytes | bytearray | memoryview]) -> None:
        """All bytes of all views, small ones together."""
        for view in views:
            for at in range(0, len(view), PIECE_BYTES):
                self._tls.write(view[at : at + PIECE_BYTES])
                if self._outgoing.pending >= PIECE_BYTES:
                    self._send_pending()
        self._send_pending()

    def recv(self, size: int) -> bytes:
        """At most `size` bytes; none at the end of the stream. Of a non-blocking socket raises
        BlockingIOError where nothing is there."""
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                if not self._fill():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    def recv_buffered(self, size: int) -> bytes:
        """What was read with an earlier record already; never touches the socket."""
        try:
            return self._tls.read(size)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return b""

    def recv_into(self, view: memoryview) -> int:
        """See `recv`; returns how many bytes it wrote into `view`."""
        while True:
            try:
                count: Any = self._tls.read(len(view), view)  # an int where a buffer is given
                return int(count)
            except ssl.SSLWantReadError:
                if not self._fill():
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    # --- non-blocking ------------------------------------------------------------------------

    def send(self, data: bytes | bytearray) -> int:
        """How many bytes of `data` were sent. Raises BlockingIOError where records of it wait for
        room: call again with the same bytes in front."""
        if not self._sealed:
            self._sealed_payload = self._tls.write(data[:PIECE_BYTES])
            self._sealed = self._outgoing.read()
        while self._sealed:
            sent = self.raw.send(self._sealed)
            self._sealed = self._sealed[sent:]
        return self._sealed_payload

    # --- the socket below --------------------------------------------------------------------

    def fileno(self) -> int:
        return self.raw.fileno()

    def settimeout(self, value: float | None) -> None:
        self.raw.settimeout(value)

    def setblocking(self, flag: bool) -> None:
        self.raw.setblocking(flag)

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None:
        self.raw.setsockopt(level, name, value)

    def getsockopt(self, level: int, name: int, size: int) -> bytes:
        return self.raw.getsockopt(level, name, size)

    def shutdown(self, how: int) -> None:
        """Touches no TLS state: another thread may be in it."""
        self.raw.shutdown(how)

    def close(self) -> None:
        self.raw.close()

    def _fill(self) -> int:
        """Read records; 0 at the end of the stream."""
        count = self.raw.recv_into(self._records)
        self._incoming.write(self._records[:count])
        return count

    def _send_pending(self) -> None:
        if self._outgoing.pending:
            self.raw.sendall(self._outgoing.read())


#: A connection of the transport, plain or not.
Stream = socket.socket | TlsSocket
