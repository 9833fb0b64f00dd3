"""The response parser: bodies by length, by chunks and by the connection's end, cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.http1 import ProtocolError, ResponseParser, host_header, request_head


def parse(*reads: bytes, eof: bool = False) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    body = b"".join([parser.feed(read) for read in reads])
    if eof:
        parser.eof()
    return parser, body


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


cuts = st.lists(st.integers(0, 10_000), max_size=30)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), cuts, st.sampled_from(
    [b"", b";name=value"]), st.sampled_from([b"", b"X-Sum: 1\r\n"]))  # fmt: skip
def test_chunks_cut_anywhere(
    pieces: list[bytes], places: list[int], extension: bytes, trailer: bytes
) -> None:
    sent = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent += b"".join(b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in pieces)
    sent += b"0\r\n" + trailer + b"\r\n"
    parser, body = parse(*cut(sent, places))
    assert (body, parser.ended, parser.keep_alive) == (b"".join(pieces), True, True)


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.booleans())
def test_a_chunk_a_read(pieces: list[bytes], upper: bool) -> None:
    size = b"%X" if upper else b"%x"
    reads = [(size + b"\r\n%b\r\n") % (len(each), each) for each in pieces]
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n") == b""
    assert [parser.feed(read) for read in reads] == pieces
    assert not parser.ended
    assert (parser.feed(b"0\r\n\r\n"), parser.ended) == (b"", True)


@given(st.binary(max_size=80), cuts)
def test_a_length_cut_anywhere(content: bytes, places: list[int]) -> None:
    sent = b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
    parser, body = parse(*cut(sent, places))
    assert (body, parser.status, parser.ended) == (content, 503, True)


@given(st.binary(max_size=80), cuts)
def test_a_body_until_the_connection_ends(content: bytes, places: list[int]) -> None:
    sent = b"HTTP/1.0 200 OK\r\n\r\n" + content
    parser, body = parse(*cut(sent, places), eof=True)
    assert (body, parser.ended, parser.keep_alive) == (content, True, False)


@given(st.binary(max_size=300), cuts)
def test_no_bytes_break_it_but_by_a_protocol_error(data: bytes, places: list[int]) -> None:
    parser = ResponseParser()
    try:
        for read in cut(data, places):
            parser.feed(read)
        parser.eof()
    except ProtocolError:
        return


def test_interim_responses_are_skipped() -> None:
    parser, body = parse(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    )
    assert (parser.status, body) == (200, b"ok")


@pytest.mark.parametrize(
    ("head", "keep"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive", True),
        (b"HTTP/1.1 204 No Content", True),
    ],
)
def test_whether_the_connection_can_carry_more(head: bytes, keep: bool) -> None:
    parser, _ = parse(head + b"\r\n\r\n")
    assert (parser.ended, parser.keep_alive) == (True, keep)


def test_bytes_after_the_end_are_not_trusted() -> None:
    parser, body = parse(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n")
    assert (body, parser.keep_alive) == (b"ok", False)


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokXX",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    ],
)
def test_what_is_not_http_is_an_error(sent: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse(sent)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    ],
)
def test_an_early_end_is_an_error(sent: bytes) -> None:
    with pytest.raises(ProtocolError, match="closed before"):
        parse(sent, eof=True)


def test_request_head() -> None:
    from urllib.parse import urlsplit

    before, after = request_head("/v1/completions", "host:8000", {"A": "b"})
    assert before + b"3" + after == (
        b"POST /v1/completions HTTP/1.1\r\nHost: host:8000\r\nA: b\r\nContent-Length: 3\r\n\r\n"
    )
    assert host_header(urlsplit("http://[::1]:8000/v1")) == "[::1]:8000"
    assert host_header(urlsplit("https://host:443")) == "host"
    with pytest.raises(ValueError, match="line break"):
        request_head("/", "host", {"A": "b\r\nEvil: 1"})
