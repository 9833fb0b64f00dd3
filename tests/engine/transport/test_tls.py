"""TLS of either kind: bytes arrive whole, small buffers and ends of streams are met."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.transport.certificates import make_authority, make_certificate
from engine.transport.cipher import CipherRate, measure_cipher, median_rate
from engine.transport.control import Pipe
from engine.transport.security import (
    Security,
    SecurityError,
    client_context,
    peer_identity,
    server_context,
    tls_ends,
)
from engine.transport.sockets import receive_views, send_views, sever
from engine.transport.tls import PIECE_BYTES, Stream, TlsSocket, Wrap
from engine.transport.tls_memory import MemoryTls

try:
    from engine.transport import tls_records
    from engine.transport.tls_records import RecordsContext, RecordsTls
except ImportError as absent:
    NOT_IN_C = str(absent)
else:
    NOT_IN_C = ""


@pytest.fixture(scope="module")
def securities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Security, Security]:
    directory: Path = tmp_path_factory.mktemp("certs")
    authority = make_authority(directory)
    made = [(*make_certificate(directory, name), authority) for name in ("source", "sink")]
    source, sink = (Security(str(c), str(k), str(a)) for c, k, a in made)
    return source, sink


def by_memory(security: Security, server_side: bool) -> Wrap:
    context = (server_context if server_side else client_context)(security)
    return lambda raw: MemoryTls(raw, context, server_side)


def by_records(security: Security, server_side: bool) -> Wrap:
    if NOT_IN_C:
        pytest.skip(NOT_IN_C)
    return tls_ends(security, server_side)


KINDS = [
    (by_memory, by_memory),
    (by_records, by_records),
    (by_memory, by_records),
    (by_records, by_memory),
]
Pair = tuple[TlsSocket, TlsSocket]


@pytest.fixture(params=KINDS, ids=lambda kinds: "-".join(kind.__name__[3:] for kind in kinds))
def pair(request: Any, securities: tuple[Security, Security]) -> Iterator[Pair]:
    """(the side that dialled, the side that listens), after their handshake."""
    left, right = socket.socketpair()
    dialled = request.param[0](securities[0], False)(left)
    listening = request.param[1](securities[1], True)(right)
    thread = threading.Thread(target=listening.handshake, args=(20.0,))
    thread.start()
    dialled.handshake(20.0)
    thread.join()
    yield dialled, listening
    dialled.close()
    listening.close()


def test_views_of_all_sizes_arrive(pair: Pair) -> None:
    sizes = [1, 64, PIECE_BYTES, 3 * PIECE_BYTES + 17, 5, 4096, 4097, 0, 9 << 20, 2]
    views = [memoryview(os.urandom(size)) for size in sizes]
    views[1::2] = [memoryview(bytearray(view)) for view in views[1::2]]
    sending = threading.Thread(target=send_views, args=(pair[0], views))
    sending.start()
    got = [memoryview(bytearray(size)) for size in sizes]
    receive_views(pair[1], got)
    sending.join()
    assert [bytes(view) for view in got] == [bytes(view) for view in views]


def test_both_know_who_the_other_is(pair: Pair) -> None:
    assert (peer_identity(pair[0]), peer_identity(pair[1])) == ("sink", "source")


def test_a_pipe_hands_over_what_came_with_earlier_records(
    pair: Pair,
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


def test_the_end_of_a_stream_is_told(pair: Pair) -> None:
    pair[0].sendall(b"last")
    sever(pair[0])
    assert pair[1].recv(100) == b"last"
    assert pair[1].recv(100) == b""
    with pytest.raises(ConnectionResetError):
        receive_views(pair[1], [memoryview(bytearray(1))])


@pytest.mark.parametrize("kind", [by_memory, by_records])
def test_a_handshake_that_does_not_come_is_bounded(
    kind: Any, securities: tuple[Security, Security]
) -> None:
    left, right = socket.socketpair()
    with left, right:
        secure = kind(securities[1], True)(left)
        with pytest.raises(TimeoutError):
            secure.handshake(0.05)


@pytest.mark.parametrize("kind", [by_memory, by_records])
def test_a_peer_that_leaves_during_the_handshake_is_told(
    kind: Any, securities: tuple[Security, Security]
) -> None:
    left, right = socket.socketpair()
    right.close()
    with left, pytest.raises(ConnectionError):
        kind(securities[0], False)(left).handshake(5.0)


@pytest.mark.parametrize("kinds", KINDS)
def test_a_stranger_is_refused(
    kinds: Any, securities: tuple[Security, Security], tmp_path: Path
) -> None:
    """By the side that listens, and the side that dialled is told why."""
    authority = make_authority(tmp_path)
    mine = make_certificate(tmp_path, "source")
    theirs = Path(securities[0].authority)
    stranger = Security(str(mine[0]), str(mine[1]), str(theirs))
    assert authority != theirs
    left, right = socket.socketpair()
    dialled = kinds[0](stranger, False)(left)
    listening = kinds[1](securities[1], True)(right)
    caught: list[BaseException] = []

    def listen() -> None:
        try:
            listening.handshake(20.0)
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    with left, right:
        with pytest.raises(ssl.SSLError):  # TLS 1.3 tells the dialling side with its first read
            dialled.handshake(20.0)
            dialled.recv(1)
        thread.join()
    assert isinstance(caught[0], ssl.SSLError)
    assert "verify" in str(caught[0]).lower()


@pytest.mark.parametrize("kind", [by_memory, by_records])
def test_a_side_without_a_certificate_is_refused(
    kind: Any, securities: tuple[Security, Security]
) -> None:
    left, right = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    dialled = MemoryTls(left, context, False)
    thread = threading.Thread(target=lambda: _quietly(dialled))
    thread.start()
    with left, right:
        with pytest.raises(ssl.SSLError):
            kind(securities[1], True)(right).handshake(20.0)
        thread.join()


@pytest.mark.parametrize("kind", [by_memory, by_records])
def test_older_versions_are_refused(kind: Any, securities: tuple[Security, Security]) -> None:
    left, right = socket.socketpair()
    context = client_context(securities[0])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    dialled = MemoryTls(left, context, False)
    thread = threading.Thread(target=lambda: _quietly(dialled))
    thread.start()
    with left, right:
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
            kind(securities[1], True)(right).handshake(20.0)
        thread.join()


def _quietly(stream: TlsSocket) -> None:
    with contextlib.suppress(OSError):
        stream.handshake(20.0)
        stream.recv(1)


def test_a_key_of_another_certificate_is_refused(securities: tuple[Security, Security]) -> None:
    mixed = Security(securities[0].certificate, securities[1].key, securities[0].authority)
    if NOT_IN_C:
        pytest.skip(NOT_IN_C)
    with pytest.raises(ssl.SSLError, match="mismatch"):
        RecordsContext(mixed.certificate, mixed.key, mixed.authority, True)
    with pytest.raises(SecurityError, match=r"source\.pem"):
        tls_ends(mixed, server_side=True)


def test_without_the_module_in_c_python_s_own_is_used(
    securities: tuple[Security, Security], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "engine.transport.tls_records", None)
    left, right = socket.socketpair()
    with left, right:
        assert isinstance(tls_ends(securities[0], server_side=False)(left), MemoryTls)


def test_all_that_is_called_of_openssl_is_known_to_be_there() -> None:
    if NOT_IN_C:
        pytest.skip(NOT_IN_C)
    source = Path(tls_records.__file__).read_text()
    called = set(re.findall(r"\b_lib\.(\w+)", source))
    assert called == set(tls_records._CALLED_FROM_PYTHON)


def test_a_damaged_record_ends_the_connection(pair: Pair) -> None:
    """Whatever reads it; nothing of it is handed over."""
    pair[0].raw.sendall(b"\x17\x03\x03\x00\x30" + os.urandom(48))
    with pytest.raises(ssl.SSLError):
        receive_views(pair[1], [memoryview(bytearray(100_000))])


def test_why_a_read_failed_is_told_after_good_records(pair: Pair) -> None:
    pair[0].sendall(b"good")
    pair[0].raw.sendall(b"\x17\x03\x03\x00\x30" + os.urandom(48))
    with pytest.raises(ssl.SSLError, match=r"(?i)record"):
        receive_views(pair[1], [memoryview(bytearray(100))])


def test_a_record_that_drips_in_is_bounded(pair: Pair) -> None:
    """Less than a byte each timeout would be; it never becomes whole."""
    pair[1].settimeout(0.2)
    over = threading.Event()

    def drip() -> None:
        for byte in b"\x17\x03\x03\x40\x00" + bytes(100):
            if over.wait(0.05):
                return
            pair[0].raw.sendall(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TimeoutError):
        pair[1].recv(10)
    assert dripping.is_alive()
    over.set()
    dripping.join()


def drip(sock: socket.socket, data: bytes, gap_s: float) -> float:
    """Send `data` in five pieces, `gap_s` apart; returns the longest that it really was."""
    size, longest_s, sent_s = -(-len(data) // 5), 0.0, time.monotonic()
    for at in range(0, len(data), size):
        time.sleep(gap_s)
        sock.sendall(data[at : at + size])
        longest_s, sent_s = max(longest_s, time.monotonic() - sent_s), time.monotonic()
    return longest_s


def read_what_drips(into: Stream, sock: socket.socket, data: bytes, size: int) -> None:
    """Read `size` bytes of `data`, which take longer than the timeout, each piece less. Where this
    machine could not keep that pace, nothing is said."""
    into.settimeout(0.5)
    with ThreadPoolExecutor(1) as other:
        dripping = other.submit(drip, sock, data, 0.2)
        try:
            receive_views(into, [memoryview(bytearray(size))])
        except TimeoutError:
            if dripping.result() < 0.4:
                raise


def test_progress_renews_the_timeout_of_a_read_of_many_bytes(pair: Pair) -> None:
    """Even within a record; as of a plain socket."""
    before, (caught, records) = pair[0].raw, socket.socketpair()
    pair[0].raw = caught
    pair[0].sendall(bytes(10_000))
    pair[0].raw = before
    read_what_drips(pair[1], before, records.recv(1 << 16), 10_000)
    caught.close()
    records.close()
    left, right = socket.socketpair()
    with left, right:
        read_what_drips(right, left, bytes(10_000), 10_000)


def test_a_side_that_only_sends_has_nothing_unread(pair: Pair) -> None:
    """Its close would be a reset, which drops what it sent."""
    pair[0].raw.setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[0].raw.recv(1)


def test_a_read_that_waits_is_woken_by_a_severed_socket(pair: Pair) -> None:
    pair[1].settimeout(None)
    caught: list[BaseException] = []

    def read() -> None:
        try:
            receive_views(pair[1], [memoryview(bytearray(1 << 20))])
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    pair[0].sendall(os.urandom(50_000))
    sever(pair[1])
    thread.join(20.0)
    assert isinstance(caught[0], ConnectionError)


def test_a_closed_end_is_not_used(pair: Pair) -> None:
    """Its descriptor may be another's by now."""
    pair[1].close()
    with pytest.raises(OSError):
        pair[1].recv(1)
    with pytest.raises(OSError):
        pair[1].sendall(b"x")


def test_a_timeout_holds_for_reads_and_writes(pair: Pair) -> None:
    pair[0].settimeout(0.05)
    with pytest.raises(TimeoutError):
        receive_views(pair[0], [memoryview(bytearray(100_000))])
    with pytest.raises(TimeoutError):
        pair[0].sendall(bytes(64 << 20))


def test_a_signal_is_answered_while_a_read_waits(pair: Pair) -> None:
    class Rung(Exception):
        pass

    def ring(*_: object) -> None:
        raise Rung

    pair[1].settimeout(None)
    before = signal.signal(signal.SIGUSR1, ring)
    reader = threading.get_ident()
    bell = threading.Timer(0.05, signal.pthread_kill, (reader, signal.SIGUSR1))
    try:
        with pytest.raises(Rung):
            bell.start()
            receive_views(pair[1], [memoryview(bytearray(1 << 20))])
    finally:
        bell.join()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("pair", [(by_records, by_records)], indirect=True, ids=["records"])
def test_a_connection_is_used_by_one_thread_at_a_time(pair: Pair) -> None:
    pair[1].settimeout(None)
    room = memoryview(bytearray(8))
    reading = threading.Thread(target=receive_views, args=(pair[1], [room]))
    reading.start()
    with pytest.raises(RuntimeError, match="another thread"):
        while reading.is_alive():
            pair[1].open(memoryview(bytearray(8)))
            time.sleep(0.001)
    pair[0].sendall(b"together")
    reading.join(20.0)
    assert bytes(room) == b"together"


@pytest.mark.parametrize("pair", [(by_records, by_records)], indirect=True, ids=["records"])
def test_what_is_no_memory_to_write_to_is_refused(pair: Pair) -> None:
    """And what went before is not harmed."""
    strange: Any = [memoryview(bytearray(4)), 5]
    for views in (strange, [memoryview(b"read-only")]):
        with pytest.raises((TypeError, BufferError)):
            pair[1].recv_views(views)
    with pytest.raises(TypeError):
        pair[0].send_views(strange)
    pair[0].sendall(b"whole")
    assert pair[1].recv(5) == b"whole"


@pytest.mark.parametrize("pair", [(by_records, by_records)], indirect=True, ids=["records"])
def test_a_certificate_that_cannot_be_read_ends_the_connection_as_tls_does(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(der: bytes) -> None:
        raise tls_records.x509.InvalidVersion("no such version", 7)

    monkeypatch.setattr(tls_records.x509, "load_der_x509_certificate", unreadable)
    with pytest.raises(ssl.SSLError, match="no such version"):
        pair[0].identity()


def test_connections_that_are_over_are_freed(securities: tuple[Security, Security]) -> None:
    """Without a farewell on a descriptor that is another's by then."""
    left, right = socket.socketpair()
    ends = [by_records(securities[0], False)(left), by_records(securities[1], True)(right)]
    thread = threading.Thread(target=ends[1].handshake, args=(20.0,))
    thread.start()
    ends[0].handshake(20.0)
    thread.join()
    assert all(isinstance(end, RecordsTls) for end in ends)
    number = left.fileno()
    left.close()
    other, watched = socket.socketpair()
    if other.fileno() != number:
        os.dup2(other.fileno(), number)
    watched.setblocking(False)
    ends.clear()
    gc.collect()
    with pytest.raises(BlockingIOError):
        watched.recv(100)
    if other.fileno() != number:
        os.close(number)
    other.close()
    watched.close()
    right.close()


def test_the_cipher_is_measured(securities: tuple[Security, Security]) -> None:
    rate = measure_cipher(*securities, size_bytes=4 << 20)
    assert rate.cipher.startswith("TLS_")
    assert rate.bound_gbps == min(rate.seal_gbps, rate.open_gbps) > 0
    assert rate.cpu_s_per_gb == pytest.approx(8 / rate.seal_gbps + 8 / rate.open_gbps)


def test_rates_of_several_rounds_are_taken_in_the_middle() -> None:
    rates = [CipherRate("x", 1.0, 30.0), CipherRate("x", 3.0, 10.0), CipherRate("x", 2.0, 20.0)]
    assert median_rate(rates) == CipherRate("x", 2.0, 20.0)
