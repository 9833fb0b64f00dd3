"""The yardstick: the same bytes over plain sockets, with no protocol and no checksums."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from engine.transport.arena import SharedArena
from engine.transport.pacing import congestion_of, data_options
from engine.transport.sockets import TcpOptions, apply_options, listen, receive_views, send_views

_SIZE = struct.Struct("<QQ")
PIECE_BYTES = 1 << 20


class RawSink:
    """Accepts connections that name an offset and a size, reads that many bytes into the arena, and
    answers with one byte."""

    def __init__(self, host: str, arena: SharedArena) -> None:
        self._arena = arena
        self._listener = listen(host, 0, TcpOptions())
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            head = bytearray(_SIZE.size)
            receive_views(sock, [memoryview(head)])
            offset, size = _SIZE.unpack(head)
            for at in range(offset, offset + size, PIECE_BYTES):
                part = min(PIECE_BYTES, offset + size - at)
                receive_views(sock, self._arena.views([(at, part)]))
            sock.sendall(b"!")


def send_options(address: tuple[str, int]) -> tuple[TcpOptions, str]:
    """What the transport would set on data connections to `address`, so that both are measured
    under the same congestion control; and its name."""
    with socket.create_connection(address) as sock:
        options = data_options(TcpOptions(), sock)
        return options, options.congestion or congestion_of(sock)


def send_raw(
    address: tuple[str, int],
    arena: SharedArena,
    size: int,
    connections: int,
    options: TcpOptions,
) -> None:
    """Send `size` bytes over `connections` at once; returns when all are received."""
    share = -(-size // connections)

    def send(offset: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            apply_options(sock, options)
            sock.connect(address)
            end = min(offset + share, size)
            sock.sendall(_SIZE.pack(offset, end - offset))
            for at in range(offset, end, PIECE_BYTES):
                send_views(sock, arena.views([(at, min(PIECE_BYTES, end - at))]))
            sock.recv(1)

    threads = [threading.Thread(target=send, args=(offset,)) for offset in range(0, size, share)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
