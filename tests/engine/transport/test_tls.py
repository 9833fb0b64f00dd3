"""TLS through memory: bytes arrive whole, small buffers and ends of streams are met."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.transport.certificates import make_authority, make_certificate
from engine.transport.cipher import measure_cipher
from engine.transport.control import Pipe
from engine.transport.security import Security, client_context, peer_identity, server_context
from engine.transport.sockets import receive_views, send_views, sever
from engine.transport.tls import PIECE_BYTES, TlsSocket


@pytest.fixture(scope="module")
def securities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Security, Security]:
    directory: Path = tmp_path_factory.mktemp("certs")
    authority = make_authority(directory)
    made = [(*make_certificate(directory, name), authority) for name in ("source", "sink")]
    source, sink = (Security(str(c), str(k), str(a)) for c, k, a in made)
    return source, sink


@pytest.fixture
def pair(securities: tuple[Security, Security]) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """(the side that dialled, the side that listens), after their handshake."""
    left, right = socket.socketpair()
    dialled = TlsSocket(left, client_context(securities[0]), "sink")
    listening = TlsSocket(right, server_context(securities[1]))
    thread = threading.Thread(target=listening.handshake, args=(20.0,))
    thread.start()
    dialled.handshake(20.0)
    thread.join()
    yield dialled, listening
    dialled.close()
    listening.close()


def test_views_of_all_sizes_arrive(pair: tuple[TlsSocket, TlsSocket]) -> None:
    sizes = [1, 64, PIECE_BYTES, 3 * PIECE_BYTES + 17, 5]
    views = [memoryview(os.urandom(size)) for size in sizes]
    sending = threading.Thread(target=send_views, args=(pair[0], views))
    sending.start()
    got = [memoryview(bytearray(size)) for size in sizes]
    receive_views(pair[1], got)
    sending.join()
    assert [bytes(view) for view in got] == [bytes(view) for view in views]


def test_both_know_who_the_other_is(pair: tuple[TlsSocket, TlsSocket]) -> None:
    assert (peer_identity(pair[0]), peer_identity(pair[1])) == ("sink", "source")


def test_a_pipe_hands_over_what_came_with_earlier_records(
    pair: tuple[TlsSocket, TlsSocket],
) -> None:
    """And what does not fit into the socket is kept, in order."""
    out, into = Pipe(pair[0]), Pipe(pair[1])
    data = os.urandom(3 << 20)
    for at in range(0, len(data), 50_000):
        out.send(data[at : at + 50_000])
    assert out.wants_write
    got = bytearray()
    while len(got) < len(data):
        got += into.receive()
        out.flush()
    assert bytes(got) == data
    assert not out.wants_write


def test_the_end_of_a_stream_is_told(pair: tuple[TlsSocket, TlsSocket]) -> None:
    pair[0].sendall(b"last")
    sever(pair[0])
    assert pair[1].recv(100) == b"last"
    assert pair[1].recv(100) == b""
    with pytest.raises(ConnectionResetError):
        receive_views(pair[1], [memoryview(bytearray(1))])


def test_a_handshake_that_does_not_come_is_bounded(securities: tuple[Security, Security]) -> None:
    left, right = socket.socketpair()
    with left, right:
        secure = TlsSocket(left, server_context(securities[1]))
        with pytest.raises(TimeoutError):
            secure.handshake(0.05)


def test_the_cipher_is_measured(securities: tuple[Security, Security]) -> None:
    rate = measure_cipher(*securities, size_bytes=4 << 20)
    assert rate.cipher.startswith("TLS_")
    assert rate.bound_gbps == min(rate.seal_gbps, rate.open_gbps) > 0
    assert rate.cpu_s_per_gb == pytest.approx(8 / rate.seal_gbps + 8 / rate.open_gbps)
