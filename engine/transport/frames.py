"""The wire format: a fixed 64-byte header, then `body_bytes` of body. No I/O.

A chunk of a cache crosses in a DATA frame of its own, small ones of one transfer together in a
BATCH: behind its header a table of the chunks' numbers and checksums, then their bodies in that
order. How long each body is follows from the manifest, which both ends know.

Every field that sizes memory is bounded before anything is allocated. The header carries its own
checksum, so a damaged length is never believed; the body's checksum is xxh3-64. The incarnations of
both ends stand in every header: a frame of an earlier life is recognised wherever it turns up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from engine.transport.errors import FrameError

MAGIC = b"PRFK"
#: Raised with every change of the wire format; unlike versions refuse each other at the handshake.
VERSION = 2
MAX_CONTROL_BYTES = 1 << 20
MAX_CHUNK_BYTES = 8 << 20
#: Chunks in one BATCH, and the bytes of its table and all their bodies.
MAX_BATCH = 64
MAX_BATCH_BYTES = 2 << 20

# magic, version, type, flags, body_bytes, attempt, source, target, transfer, layer, kind, chunk,
# body checksum, reserved; the header's own checksum (low 32 bits of xxh3-64) follows.
_FIELDS = struct.Struct("<4sBBHIIQQQHHIQI")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size

# One row of a batch's table: the chunk's number in the manifest (`ChunkPlan`), xxh3-64 of its body.
_ROW = struct.Struct("<IQ")
ROW_BYTES = _ROW.size


class Type(IntEnum):
    """Frame types. Values are wire format."""

    HELLO = 1
    WELCOME = 2
    OFFER = 3
    GRANT = 4
    REFUSE = 5
    DATA = 6
    ACK = 7
    NACK = 8
    COMMIT = 9
    COMMITTED = 10
    CANCEL = 11
    CANCELLED = 12
    ABORTED = 13
    LEASE = 14
    PING = 15
    PONG = 16
    ERROR = 17
    LOST = 18
    BATCH = 19


#: What goes over data connections; everything else is control.
BULK = frozenset((Type.DATA, Type.BATCH))

_TYPES = {int(t): t for t in Type}
_BODY_BOUNDS = {Type.DATA: MAX_CHUNK_BYTES, Type.BATCH: MAX_BATCH_BYTES}


class Header(NamedTuple):
    """One frame's header.

    source, target: incarnations of sender and addressee (0: not known yet, handshake only).
    transfer: the sender's number of the transfer, 0 for frames of no transfer.
    layer, kind, chunk: which chunk (DATA); chunk: how many chunks (BATCH). checksum: xxh3-64 of the
    body, of a BATCH of its table.
    """

    type: Type
    body_bytes: int = 0
    attempt: int = 0
    source: int = 0
    target: int = 0
    transfer: int = 0
    layer: int = 0
    kind: int = 0
    chunk: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """A header and its body (control frames; the body of DATA goes straight into its blocks)."""

    header: Header
    body: bytes = b""


def checksum(views: Sequence[bytes | bytearray | memoryview]) -> int:
    """xxh3-64 over the views as one string of bytes."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def encode_header(header: Header) -> bytes:
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.type,
        0,
        header.body_bytes,
        header.attempt,
        header.source,
        header.target,
        header.transfer,
        header.layer,
        header.kind,
        header.chunk,
        header.checksum,
        0,
    )
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF)


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Parse exactly HEADER_BYTES. Raises FrameError for anything that is not a valid header."""
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    (
        magic,
        version,
        type_,
        flags,
        body_bytes,
        attempt,
        source,
        target,
        transfer,
        layer,
        kind,
        chunk,
        body_checksum,
        reserved,
    ) = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"magic {magic!r}: the peer does not speak this protocol")
    if version != VERSION:
        raise FrameError(f"wire version {version}; this side speaks {VERSION}")
    (check,) = _CHECK.unpack_from(data, _FIELDS.size)
    if check != xxhash.xxh3_64_intdigest(bytes(data[: _FIELDS.size])) & 0xFFFFFFFF:
        raise FrameError("header checksum differs")
    frame_type = _TYPES.get(type_)
    if frame_type is None:
        raise FrameError(f"frame type {type_} is not known")
    if reserved or flags:
        raise FrameError("reserved header fields are not zero")
    limit = _BODY_BOUNDS.get(frame_type, MAX_CONTROL_BYTES)
    if body_bytes > limit:
        raise FrameError(f"{frame_type.name} body of {body_bytes} bytes; the bound is {limit}")
    if frame_type is Type.BATCH and not (0 < chunk <= MAX_BATCH and chunk * ROW_BYTES < body_bytes):
        raise FrameError(f"a batch of {chunk} chunks in {body_bytes} bytes")
    return Header(
        frame_type,
        body_bytes,
        attempt,
        source,
        target,
        transfer,
        layer,
        kind,
        chunk,
        body_checksum,
    )


def encode_table(rows: Sequence[tuple[int, int]]) -> bytes:
    """The table of a BATCH: of each chunk its number and the xxh3-64 of its body."""
    return b"".join([_ROW.pack(number, digest) for number, digest in rows])


def decode_table(header: Header, table: bytes | bytearray | memoryview) -> list[tuple[int, int]]:
    """Rows of the table that follows `header`, `header.chunk` of them. Raises FrameError."""
    if len(table) != header.chunk * ROW_BYTES:
        raise FrameError(f"a table of {len(table)} bytes for {header.chunk} chunks")
    if xxhash.xxh3_64_intdigest(table) != header.checksum:
        raise FrameError("table checksum differs")
    return list(_ROW.iter_unpack(table))


def control_frame(
    type_: Type, *, source: int, target: int, transfer: int = 0, attempt: int = 0, body: bytes = b""
) -> Frame:
    """A frame with the length and checksum of its body filled in."""
    header = Header(
        type_, len(body), attempt, source, target, transfer, checksum=xxhash.xxh3_64_intdigest(body)
    )
    return Frame(header, body)


def encode_frame(frame: Frame) -> bytes:
    return encode_header(frame.header) + frame.body


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one frame, so memory is bounded.

    `feed` raises FrameError at the first invalid byte; after that the stream is lost for good.
    """

    __slots__ = ("_buffer", "_control_only", "_header")

    def __init__(self, control_only: bool = True) -> None:
        self._buffer = bytearray()
        self._header: Header | None = None
        self._control_only = control_only

    def body_needed(self) -> int:
        """Bytes of body still to come for the header that was read last (0 with no header)."""
        return 0 if self._header is None else self._header.body_bytes - len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[Frame]:
        view = memoryview(data)
        while True:
            need = HEADER_BYTES if self._header is None else self._header.body_bytes
            take = need - len(self._buffer)
            self._buffer += view[:take]
            view = view[take:]
            if len(self._buffer) < need:
                return
            if self._header is None:
                self._header = decode_header(self._buffer)
                if self._control_only and self._header.type in BULK:
                    raise FrameError(f"{self._header.type.name} on a control connection")
                self._buffer.clear()
                continue
            body = bytes(self._buffer)
            header, self._header = self._header, None
            self._buffer.clear()
            if xxhash.xxh3_64_intdigest(body) != header.checksum:
                raise FrameError(f"{header.type.name} body checksum differs")
            yield Frame(header, body)
