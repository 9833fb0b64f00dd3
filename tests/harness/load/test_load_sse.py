"""The event-stream parser over arbitrary boundaries of reads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.sse import SseParser


def parse(*reads: bytes) -> list[bytes]:
    parser = SseParser()
    return [payload for read in reads for payload in parser.feed(read)] + parser.finish()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces, cut at `places` (taken modulo its length)."""
    edges = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


payloads = st.lists(
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20),
    max_size=6,
)
cuts = st.lists(st.integers(0, 10_000), max_size=30)
noise = st.sampled_from([b"", b": ping", b"event: message", b"id: 7", b"retry: 10", b":"])


@given(payloads, cuts, st.sampled_from([b"\n", b"\r\n", b"\r"]), noise, st.booleans())
def test_boundaries_never_matter(
    texts: list[str], places: list[int], end: bytes, extra: bytes, spaced: bool
) -> None:
    sent = b""
    for value in texts:
        if extra:
            sent += extra + end
        sent += (b"data: " if spaced else b"data:") + value.encode() + end + end
    # Without the optional space a payload that begins with one would lose it.
    wanted = [value.encode() if spaced else value.encode().removeprefix(b" ") for value in texts]
    assert parse(*cut(sent, places)) == wanted


@given(payloads, st.lists(st.sampled_from(["\n\n", "\r\n\r\n", "\r\r", "\n: ping\n\n"])))
def test_an_event_a_read(texts: list[str], ends: list[str]) -> None:
    reads = [f"data: {value}{end}".encode() for value, end in zip(texts, ends, strict=False)]
    parser = SseParser()
    found = [parser.feed(read) for read in reads]
    wanted = [[value.encode()] for value, _ in zip(texts, ends, strict=False)]
    # An event that ends in CR is whole already; a LF that follows would belong to it.
    assert found == wanted


@given(st.binary(max_size=200), cuts)
def test_any_bytes_parse_alike_however_they_are_cut(data: bytes, places: list[int]) -> None:
    assert parse(*cut(data, places)) == parse(data)


@given(st.lists(st.text("abc", max_size=3), min_size=1, max_size=5), cuts)
def test_lines_of_one_event_are_joined(lines: list[str], places: list[int]) -> None:
    sent = "".join(f"data: {line}\n" for line in lines).encode() + b"\n"
    assert parse(*cut(sent, places)) == ["\n".join(lines).encode()]


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (b"data: [DONE]", [b"[DONE]"]),
        (b"data: a\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data\n\n", [b""]),
        (b"data:\n\n", [b""]),
        (b"data:  a\n\n", [b" a"]),
        (b": only a comment\n\n", []),
        (b"\n\n\n\ndata: a\n\n\n\n", [b"a"]),
        (b"datum: a\n\n", []),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"", []),
    ],
)
def test_forms(sent: bytes, wanted: list[bytes]) -> None:
    assert parse(sent) == wanted
    assert parse(*(bytes([each]) for each in sent)) == wanted


def test_an_event_is_given_as_soon_as_it_is_whole() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r\n\r\n") == [b"a"]
    assert parser.feed(b"data: b\r\r") == [b"b"]
    assert parser.feed(b"\ndata: c\n\n") == [b"c"]
