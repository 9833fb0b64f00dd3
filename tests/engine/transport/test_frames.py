"""The wire format: round trips, bounds, and a parser that survives whatever arrives."""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from engine.transport.errors import FrameError
from engine.transport.frames import (
    BULK,
    HEADER_BYTES,
    MAX_BATCH,
    MAX_BATCH_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    ROW_BYTES,
    Frame,
    FrameReader,
    Header,
    Type,
    checksum,
    control_frame,
    decode_header,
    decode_table,
    encode_frame,
    encode_header,
    encode_table,
)
from engine.transport.messages import (
    Commit,
    Grant,
    Hello,
    Key,
    Manifest,
    Offer,
    Reason,
    check_size,
    decode_numbers,
    encode_numbers,
)
from engine.transport.regions import Kind, Region, RegionSize

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
other_headers = st.builds(
    Header,
    type=st.sampled_from([t for t in Type if t is not Type.BATCH]),
    body_bytes=st.integers(0, MAX_CONTROL_BYTES),
    attempt=u32,
    source=u64,
    target=u64,
    transfer=u64,
    layer=u16,
    kind=u16,
    chunk=u32,
    checksum=u64,
)
batch_headers = st.builds(
    Header,
    type=st.just(Type.BATCH),
    body_bytes=st.integers(MAX_BATCH * ROW_BYTES + 1, MAX_BATCH_BYTES),
    attempt=u32,
    source=u64,
    target=u64,
    transfer=u64,
    layer=st.just(0),
    kind=st.just(0),
    chunk=st.integers(1, MAX_BATCH),
    checksum=u64,
)
headers = other_headers | batch_headers
frames = st.builds(
    control_frame,
    st.sampled_from([t for t in Type if t not in BULK]),
    source=u64,
    target=u64,
    transfer=u64,
    attempt=u32,
    body=st.binary(max_size=300),
)


def test_header_is_64_bytes_and_starts_with_the_magic() -> None:
    data = encode_header(Header(Type.DATA, 5, source=1))
    assert (HEADER_BYTES, data[:6]) == (64, b"PRFK\x02\x06")


@given(headers)
def test_header_round_trip(header: Header) -> None:
    assert decode_header(encode_header(header)) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_in_a_header_is_always_found(header: Header, bit: int) -> None:
    data = bytearray(encode_header(header))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        decode_header(data)


@given(st.lists(frames, max_size=5), st.integers(1, 97))
def test_frames_come_out_whatever_the_pieces(sent: list[Frame], size: int) -> None:
    stream = b"".join(encode_frame(frame) for frame in sent)
    reader = FrameReader()
    got = [f for at in range(0, len(stream), size) for f in reader.feed(stream[at : at + size])]
    assert got == sent


@given(st.binary(max_size=400))
@example(b"PRFK" + bytes(60))
def test_random_bytes_never_do_more_than_raise_frame_error(data: bytes) -> None:
    reader = FrameReader()
    with contextlib.suppress(FrameError):
        list(reader.feed(data))
    # Whatever came, no more than one header or one bounded body is kept.
    assert len(reader._buffer) <= max(len(data), HEADER_BYTES)


@pytest.mark.parametrize(
    ("type_", "size"),
    [
        (Type.DATA, MAX_CHUNK_BYTES + 1),
        (Type.BATCH, MAX_BATCH_BYTES + 1),
        (Type.OFFER, MAX_CONTROL_BYTES + 1),
    ],
)
def test_length_beyond_the_bound_is_refused_before_allocation(type_: Type, size: int) -> None:
    data = encode_header(Header(type_, size, chunk=1))
    with pytest.raises(FrameError, match="the bound is"):
        decode_header(data)


def reseal(data: bytearray) -> bytes:
    data[60:] = struct.pack("<I", xxhash.xxh3_64_intdigest(bytes(data[:60])) & 0xFFFFFFFF)
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 0, "magic"),
        (4, 9, "wire version 9"),
        (5, 99, "frame type 99"),
        (6, 1, "reserved"),
        (7, 1, "reserved"),
        (56, 1, "reserved"),
    ],
)
def test_each_wrong_field_has_its_message(at: int, value: int, message: str) -> None:
    data = bytearray(encode_header(Header(Type.PING)))
    data[at] = value
    with pytest.raises(FrameError, match=message):
        decode_header(reseal(data))


@pytest.mark.parametrize("count", [0, 5, MAX_BATCH + 1, 2**32 - 1])
def test_a_batch_of_no_chunks_or_of_more_than_its_body_holds_is_refused(count: int) -> None:
    data = encode_header(Header(Type.BATCH, 5 * ROW_BYTES, chunk=count))
    with pytest.raises(FrameError, match=f"a batch of {count} chunks in 60 bytes"):
        decode_header(data)


tables = st.lists(st.tuples(u32, u64), min_size=1, max_size=MAX_BATCH)


def batch_header(table: bytes) -> Header:
    count = len(table) // ROW_BYTES
    return Header(Type.BATCH, len(table) + 4096, chunk=count, checksum=checksum([table]))


@given(tables)
def test_table_round_trip(rows: list[tuple[int, int]]) -> None:
    table = encode_table(rows)
    header = decode_header(encode_header(batch_header(table)))
    assert decode_table(header, table) == rows


@given(tables, st.integers(0, ROW_BYTES * 8 - 1))
def test_a_flipped_bit_in_a_table_is_always_found(rows: list[tuple[int, int]], bit: int) -> None:
    table = bytearray(encode_table(rows))
    header = batch_header(bytes(table))
    table[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError, match="table checksum"):
        decode_table(header, table)


@given(batch_headers, st.binary(max_size=200))
def test_random_tables_never_do_more_than_raise_frame_error(header: Header, table: bytes) -> None:
    with contextlib.suppress(FrameError):
        decode_table(header, table)


def test_bulk_on_a_control_connection_and_a_damaged_body() -> None:
    for type_ in (Type.DATA, Type.BATCH):
        with pytest.raises(FrameError, match=f"{type_.name} on a control connection"):
            list(FrameReader().feed(encode_header(Header(type_, 40, chunk=1))))
    frame = encode_frame(control_frame(Type.OFFER, source=1, target=2, body=b"abc"))
    with pytest.raises(FrameError, match="body checksum"):
        list(FrameReader().feed(frame[:-1] + b"d"))


def test_checksum_of_parts_is_that_of_the_whole() -> None:
    assert checksum([b"ab", memoryview(b"cd")]) == checksum([b"abcd"])


MANIFEST = Manifest(
    (RegionSize(Region(3, Kind.STATE), 12), RegionSize(Region(3, Kind.KV), 4097)),
    n_tokens=100,
    held_tokens=64,
    tenant="t",
    chunk_bytes=4096,
    codecs={Kind.STATE: "bf16"},
    meta={"x": [1]},
)


def test_bodies_round_trip() -> None:
    offer = Offer(Key("r", 3), MANIFEST)
    assert Offer.decode(offer.encode(), 3) == offer
    hello = Hello("layout", 2, ("raw", "bf16"))
    assert Hello.decode(hello.encode()) == hello
    hello = Hello("layout", -1, ("raw",), 2**64 - 1)
    assert Hello.decode(hello.encode()) == hello
    of_an_older_peer = b'{"layout":"layout","lane":0,"codecs":["raw"]}'
    assert Hello.decode(of_an_older_peer).instance == 0
    for claimed in (b"-1", b"18446744073709551616", b'"7"'):
        with pytest.raises(FrameError):
            Hello.decode(of_an_older_peer[:-1] + b',"instance":' + claimed + b"}")
    grant = Grant(77, b"\x01\xff")
    assert Grant.decode(grant.encode()) == grant
    commit = Commit(2**128 - 1, 5, {"a": 1})
    assert Commit.decode(commit.encode()) == commit
    assert decode_numbers(encode_numbers([1, 2**32 - 1])) == (1, 2**32 - 1)
    assert decode_numbers(encode_numbers([2**63], "Q"), "Q") == (2**63,)


json_values = st.recursive(
    st.sampled_from([None, True, 0, -1, 4096, 2**70, 1.5, "", "1", "kv"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.just("1"), inner),
    max_leaves=8,
)
field_names = st.sampled_from(
    [
        "regions", "n_tokens", "held_tokens", "tenant", "chunk_bytes", "codecs", "meta", "manifest",
        "request", "layout", "lane", "credit", "have", "digest", "first_token", "reason",
    ]
)  # fmt: skip


@given(
    st.binary(max_size=60)
    | st.dictionaries(field_names, json_values).map(lambda v: json.dumps(v).encode())
)
@example(b"[" * 100_000)
@example(b'{"credit":1,"have":"\xc3\xa9"}')
def test_random_bodies_never_do_more_than_raise_frame_error(body: bytes) -> None:
    for decode in (
        lambda: Hello.decode(body),
        lambda: Offer.decode(body, 0),
        lambda: Grant.decode(body),
        lambda: Commit.decode(body),
        lambda: Reason.decode(body),
        lambda: decode_numbers(body),
    ):
        with contextlib.suppress(FrameError):
            decode()


def test_manifest_that_no_frame_could_carry() -> None:
    with pytest.raises(ValueError, match="manifest of 10"):
        check_size(replace(MANIFEST, meta={"x": "a" * (1 << 20)}).to_json(), "manifest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"regions": []}, "0 regions"),
        ({"regions": [[0, 0, 1], [0, 0, 1]]}, "named twice"),
        ({"regions": [[0, 0, 1 << 41]]}, "out of bounds"),
        ({"regions": [[0, 0, 1 << 39]], "chunk_bytes": 4096}, "chunks"),
        ({"regions": [[0, 9, 1]]}, "9"),
        ({"regions": [[0, 0]]}, "manifest"),
        ({"chunk_bytes": 1 << 30}, "chunk_bytes"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"held_tokens": 101}, "held_tokens"),
        ({"n_tokens": True}, "integer"),
        ({"codecs": {"1": "zip"}}, "codec"),
    ],
)
def test_manifest_bounds(change: dict, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        Manifest.from_json({**MANIFEST.to_json(), **change})
