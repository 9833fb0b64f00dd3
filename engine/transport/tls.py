"""TLS over a connected TCP socket, as the transport uses it.

Two implementations speak the same TLS 1.3: `tls_chain` moves a chunk of many records in one call of
OpenSSL, `tls_memory` does with what Python's `ssl` offers. A `TlsSocket` is used by one thread at a
time (OpenSSL objects are not safe for two); `shutdown` is for any.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

Buffer = bytes | bytearray | memoryview


class TlsSocket(ABC):
    """The part of a socket's interface that the transport uses; `raw` carries the records.

    A peer that ends the connection without TLS's own farewell is told by `recv` as an ended stream:
    the framing has lengths and a digest, so nothing is taken for whole that was cut off.
    """

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw

    @abstractmethod
    def handshake(self, timeout_s: float) -> None:
        """Raises ssl.SSLError, TimeoutError however the bytes drip in, ConnectionResetError."""

    @abstractmethod
    def identity(self) -> str:
        """Common name of the verified peer; after the handshake."""

    # --- blocking ----------------------------------------------------------------------------

    def sendall(self, data: Buffer) -> None:
        self.send_views([data])

    @abstractmethod
    def send_views(self, views: Sequence[Buffer]) -> None:
        """All bytes of all views, small ones together."""

    @abstractmethod
    def recv(self, size: int) -> bytes:
        """At most `size` bytes; none at the end of the stream. Of a non-blocking socket raises
        BlockingIOError where nothing is there."""

    @abstractmethod
    def recv_buffered(self, size: int) -> bytes:
        """Of a non-blocking socket: what has come already, though a selector does not know of it;
        nothing where nothing has or the stream has ended."""

    @abstractmethod
    def recv_into(self, view: memoryview) -> int:
        """See `recv`; returns how many bytes it wrote into `view`."""

    # --- non-blocking ------------------------------------------------------------------------

    @abstractmethod
    def send(self, data: bytes | bytearray) -> int:
        """How many bytes of `data` were sent. Raises BlockingIOError where records of it wait for
        room: call again with the same bytes in front."""

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
