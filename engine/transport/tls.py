"""TLS over a connected TCP socket, as the transport uses it.

Two implementations speak the same TLS 1.3: `tls_records` moves a chunk of many records in one call,
`tls_memory` does with what Python's `ssl` offers. A `TlsSocket` is used by one thread at a time
(OpenSSL's objects are not safe for two); `shutdown` is for any.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

Buffer = bytes | bytearray | memoryview

#: Payload sealed before it is sent: its records stay in a core's cache.
PIECE_BYTES = 1 << 18


class TlsSocket(ABC):
    """The part of a socket's interface that the transport uses; `raw` carries the records.

    A peer that ends the connection without TLS's own farewell is told as an ended stream: the
    framing has lengths and a digest, so nothing is taken for whole that was cut off.
    """

    def __init__(self, raw: socket.socket, server_side: bool) -> None:
        self.raw = raw
        #: What a listening side says last, tickets, leaves with its first answer: a dialling side
        #: that sends and closes would leave them unread, and its close would drop what it sent.
        self._listens = server_side
        #: Of the `send` in progress: sealed, and not all of it out.
        self._sealed_bytes = 0

    @abstractmethod
    def identity(self) -> str:
        """Common name of the verified peer; after the handshake."""

    @abstractmethod
    def cipher(self) -> str:
        """Name of the cipher suite; after the handshake."""

    # --- records -----------------------------------------------------------------------------

    @abstractmethod
    def negotiate(self) -> bool:
        """Go on with the handshake. False: what it has to say waits for a `flush`, then it needs
        records of the peer (`fill`). Raises ssl.SSLError."""

    @abstractmethod
    def seal(self, data: Buffer) -> None:
        """Its records wait for a `flush`."""

    @abstractmethod
    def open(self, view: memoryview) -> int | None:
        """How many bytes of records that have come it put into `view`, which has room; None: there
        is no whole record; 0: the stream has ended. Raises ssl.SSLError."""

    @abstractmethod
    def flush(self) -> None:
        """Send all records that wait. Raises BlockingIOError, TimeoutError: some still do."""

    @abstractmethod
    def fill(self) -> int:
        """Read records, where `open` or `negotiate` found none; their bytes, 0 at the end of the
        stream. Raises BlockingIOError, TimeoutError."""

    # --- blocking ----------------------------------------------------------------------------

    def handshake(self, timeout_s: float) -> None:
        """Raises ssl.SSLError, TimeoutError however the bytes drip in, ConnectionResetError."""
        deadline_s = time.monotonic() + timeout_s
        over = False
        while not over:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the TLS handshake took too long")
            self.raw.settimeout(left_s)
            try:
                over = self.negotiate()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self.flush()  # the peer is told why
                raise
            if not (over and self._listens):
                self.flush()
            if not over and not self.fill():
                raise ConnectionResetError("closed during the TLS handshake")
        self.raw.settimeout(timeout_s)

    # As of plain sockets, the timeout is of each wait while many bytes are moved: progress renews
    # it, and a peer that is slow without end is for those to end who know what it sends.

    def sendall(self, data: Buffer) -> None:
        """Meant for what fits into the socket's buffer, as frames of a handshake do: the timeout is
        of each wait, where that of a plain socket's `sendall` is of the whole call."""
        self.send_views([data])

    def send_views(self, views: Sequence[Buffer]) -> None:
        """All bytes of all views, small ones together."""
        waiting_bytes = 0
        for view in views:
            for at in range(0, len(view), PIECE_BYTES):
                piece = view[at : at + PIECE_BYTES]
                self.seal(piece)
                waiting_bytes += len(piece)
                if waiting_bytes >= PIECE_BYTES:
                    self.flush()
                    waiting_bytes = 0
        self.flush()

    def recv_views(self, views: Sequence[memoryview]) -> None:
        """Fill all views. Raises ConnectionResetError where the stream ends before."""
        for view in views:
            at = 0
            while at < len(view):
                count = self.open(view[at:])
                if count is None and self.fill():
                    continue
                if not count:
                    raise ConnectionResetError("closed")
                at += count

    def recv(self, size: int) -> bytes:
        """At most `size` bytes; none at the end of the stream. The timeout is of the whole call. Of
        a non-blocking socket raises BlockingIOError where nothing is there."""
        room = bytearray(size)
        return bytes(room[: self._recv_into(memoryview(room))]) if size else b""

    def _recv_into(self, view: memoryview) -> int:
        timeout_s = self.raw.gettimeout()
        deadline_s = time.monotonic() + (timeout_s or 0.0)
        try:
            while (count := self.open(view)) is None:
                if not self.fill():
                    return 0
                if timeout_s:  # however the bytes of a record drip in
                    self.raw.settimeout(max(deadline_s - time.monotonic(), 1e-6))
        finally:
            if timeout_s and self.raw.fileno() >= 0:
                self.raw.settimeout(timeout_s)
        return count

    # --- non-blocking ------------------------------------------------------------------------

    def recv_buffered(self, size: int) -> bytes:
        """What has come already, though a selector does not know of it; nothing where nothing has
        or the stream has ended."""
        room = bytearray(size)
        return bytes(room[: self.open(memoryview(room)) or 0])

    def send(self, data: bytes | bytearray) -> int:
        """How many bytes of `data` were sent. Raises BlockingIOError where records of it wait for
        room: call again with the same bytes in front."""
        if not self._sealed_bytes:
            part = data[:PIECE_BYTES]
            self.seal(part)
            self._sealed_bytes = len(part)
        self.flush()
        sent, self._sealed_bytes = self._sealed_bytes, 0
        return sent

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


#: A connection of the transport, plain or not.
Stream = socket.socket | TlsSocket
#: Makes one end of a connection, before its handshake.
Wrap = Callable[[socket.socket], TlsSocket]
