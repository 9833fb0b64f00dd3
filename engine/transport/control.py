"""Non-blocking byte pipes of the plane's loop: control connections and the worker's socket."""

from __future__ import annotations

from collections.abc import Iterable

from engine.transport.errors import FrameError
from engine.transport.frames import Frame, FrameReader, encode_frame
from engine.transport.sockets import sever
from engine.transport.tls import Stream, TlsSocket

#: A peer that leaves so much unread is not coming back; its connection is closed.
MAX_UNSENT_BYTES = 8 << 20
PIECE_BYTES = 1 << 16


class Pipe:
    """A non-blocking stream with a bounded outgoing buffer."""

    def __init__(self, sock: Stream) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def keep(self, data: bytes) -> None:
        """To go out with the next `flush`. Raises OSError where the peer does not read."""
        self._unsent += data
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.flush()
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise BlockingIOError("the peer does not read")

    def send(self, data: bytes) -> None:
        """Send or keep. Raises OSError where the peer is gone or does not read."""
        self.keep(data)
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def receive(self) -> bytes:
        """What is there, about 1 MiB at most. Raises ConnectionResetError at end of stream."""
        data = bytearray()
        while len(data) < 1 << 20:
            try:
                piece = self.socket.recv(PIECE_BYTES)
            except BlockingIOError:
                break
            if not piece:
                if data:
                    break  # handed over first; the next call meets the end again
                raise ConnectionResetError("closed")
            data += piece
            if len(piece) < PIECE_BYTES and not isinstance(self.socket, TlsSocket):
                break  # drained
        if isinstance(self.socket, TlsSocket):
            # The selector knows nothing of what was read but not handed over.
            while piece := self.socket.recv_buffered(1 << 16):
                data += piece
        return bytes(data)

    def close(self) -> None:
        sever(self.socket)
        self.socket.close()


class Control(Pipe):
    """A control connection after its handshake; `peer` is the incarnation at the other end."""

    def __init__(self, sock: Stream, peer: int, identity: str) -> None:
        super().__init__(sock)
        self.peer = peer
        self.identity = identity
        self._reader = FrameReader()

    def frames(self) -> list[Frame]:
        """Frames that have arrived. Raises OSError, FrameError: the connection is over."""
        return list(self._reader.feed(self.receive()))

    def send_frames(self, frames: Iterable[Frame]) -> None:
        """Frames that are due together go out in one call."""
        self.send(b"".join(map(encode_frame, frames)))


#: What ends a connection and nothing else.
BROKEN = (OSError, FrameError)
