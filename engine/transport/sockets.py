"""TCP as the data plane uses it: options, exact reads and writes, plain or TLS."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.transport.errors import FrameError
from engine.transport.frames import HEADER_BYTES, Frame, FrameReader, encode_frame
from engine.transport.tls import Stream, TlsSocket, Wrap

#: sendmsg and recvmsg take at most this many ranges a call (IOV_MAX of Linux).
MAX_RANGES = 1024


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """Per socket. sndbuf_bytes, rcvbuf_bytes: 0 leaves the kernel's autotuning, which is better
    unless the limits in net.ipv4.tcp_{w,r}mem are far from the bandwidth-delay product.
    congestion: a congestion control by name, empty for the host's default."""

    sndbuf_bytes: int = 0
    rcvbuf_bytes: int = 0
    congestion: str = ""


def apply_options(sock: socket.socket, options: TcpOptions) -> None:
    """Set before connect or listen: window scaling is fixed by the handshake."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if options.sndbuf_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.sndbuf_bytes)
    if options.rcvbuf_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.rcvbuf_bytes)
    if options.congestion:
        sock.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion.encode("ascii")
        )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this host only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, options: TcpOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        apply_options(sock, options)
        sock.bind((host, port))
        sock.listen(256)
    except OSError:
        sock.close()
        raise
    return sock


def dial(
    host: str,
    port: int,
    options: TcpOptions,
    timeout_s: float,
    secure: Wrap | None,
) -> Stream:
    """Connect and, where it is to be secure, finish TLS. The socket still has the timeout set."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        apply_options(sock, options)
        sock.settimeout(timeout_s)
        sock.connect((host, port))
        if secure is None:
            return sock
        stream = secure(sock)
        stream.handshake(timeout_s)
        return stream
    except BaseException:
        sock.close()
        raise


def read_frame(sock: Stream, deadline_s: float) -> Frame:
    """One control frame during a handshake; `deadline_s` on time.monotonic(), whatever the pace at
    which bytes drip in. Raises OSError, FrameError."""
    reader = FrameReader()
    need = HEADER_BYTES
    header_read = 0
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left_s)
        # Byte counts are exact: what follows the frame belongs to the connection's next reader.
        data = sock.recv(need)
        if not data:
            raise ConnectionResetError("closed during the handshake")
        for frame in reader.feed(data):
            return frame
        need -= len(data)
        if need == 0 and not header_read:
            header_read = 1
            need = reader.body_needed()
        if need == 0:
            raise FrameError("the handshake frame is not complete")


def write_frame(sock: Stream, frame: Frame) -> None:
    sock.sendall(encode_frame(frame))


def send_views(sock: Stream, views: Sequence[memoryview | bytes]) -> None:
    """All bytes of all views, blocking."""
    if isinstance(sock, TlsSocket):
        sock.send_views(views)
        return
    pending = list(views)
    while pending:
        sent = sock.sendmsg(pending[:MAX_RANGES])
        pending = _after(pending, sent)


def receive_views(sock: Stream, views: Sequence[memoryview]) -> None:
    """Fill all views, blocking. Raises ConnectionResetError at end of stream."""
    if isinstance(sock, TlsSocket):
        sock.recv_views(views)
        return
    pending: list[memoryview] = list(views)
    while pending:
        count = sock.recvmsg_into(pending[:MAX_RANGES], 0, socket.MSG_WAITALL)[0]
        if not count:
            raise ConnectionResetError("closed")
        pending = _after(pending, count)


def _after(views: list, count: int) -> list:
    """The views without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            rest = views[index:]
            if count:
                rest[0] = memoryview(view)[count:]
            return rest
        count -= len(view)
    return []


def sever(sock: Stream) -> None:
    """Wake every thread blocked on the socket; its owner closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
