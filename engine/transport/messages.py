"""Bodies of control frames: what is said at the handshake, in an offer, a grant and a commit.

JSON, decoded strictly: unknown shapes raise FrameError, counts are bounded before allocation.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from engine.transport.codec import BF16, CODECS
from engine.transport.errors import FrameError
from engine.transport.frames import MAX_CHUNK_BYTES, MAX_CONTROL_BYTES
from engine.transport.regions import ChunkPlan, Kind, Region, RegionSize

MAX_REGIONS = 4096
MAX_REGION_BYTES = 1 << 40
MAX_LAYERS = 1 << 16
MAX_CHUNKS = 1 << 20
#: What a chunk has unless a manifest says otherwise: each costs its lane a turn in the interpreter,
#: which beside copying 2 MiB is little; and one that is lost or damaged goes again whole.
CHUNK_BYTES = 2 << 20
MAX_NAME = 256
#: Chunk numbers in one ACK or NACK.
MAX_LISTED = 65_536
_KINDS = {int(kind): kind for kind in Kind}


class Key(NamedTuple):
    """One attempt at delivering one request's cache."""

    request_id: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a transfer will carry, declared before any byte of it.

    regions: every region with its bytes, each once. n_tokens: tokens that the whole cache covers;
    held_tokens of them are already at the receiver and do not cross (the state always does).
    codecs: kind -> wire codec for regions that do not cross as they lie in memory.
    meta: small JSON for the worker at the other end.
    """

    regions: tuple[RegionSize, ...]
    n_tokens: int
    held_tokens: int = 0
    tenant: str = ""
    chunk_bytes: int = CHUNK_BYTES
    codecs: Mapping[Kind, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all regions, as they lie in memory."""
        return sum(item.size_bytes for item in self.regions)

    def validate(self) -> None:
        """Raises ValueError where a bound is broken; both ends call it."""
        if not 0 < len(self.regions) <= MAX_REGIONS:
            raise ValueError(f"{len(self.regions)} regions; 1 to {MAX_REGIONS} would do")
        # A multiple of 4 KiB never cuts a value of any codec in two.
        if not 4096 <= self.chunk_bytes <= MAX_CHUNK_BYTES or self.chunk_bytes % 4096:
            raise ValueError(
                f"chunk_bytes = {self.chunk_bytes}; a multiple of 4096 up to {MAX_CHUNK_BYTES}"
            )
        for item in self.regions:
            (layer, _), size = item
            if not (0 <= size < MAX_REGION_BYTES and 0 <= layer < MAX_LAYERS):
                raise ValueError(f"region {item} is out of bounds")
        if ChunkPlan.count_chunks(self.regions, self.chunk_bytes) > MAX_CHUNKS:
            raise ValueError(f"more than {MAX_CHUNKS} chunks; raise chunk_bytes")
        if not 0 <= self.held_tokens <= self.n_tokens < 1 << 48:
            raise ValueError(f"held_tokens {self.held_tokens} of n_tokens {self.n_tokens}")
        for kind, codec in self.codecs.items():
            if codec not in CODECS:
                raise ValueError(f"wire codec {codec!r}; {', '.join(CODECS)} would do")
            for item in self.regions:
                if codec == BF16 and item.region.kind is kind and item.size_bytes % 4:
                    raise ValueError(f"region {item} is not made of float32 values")
        if len({item.region for item in self.regions}) != len(self.regions):
            raise ValueError("a region is named twice")

    def to_json(self) -> dict[str, Any]:
        return {
            "regions": [[r.region.layer, int(r.region.kind), r.size_bytes] for r in self.regions],
            "n_tokens": self.n_tokens,
            "held_tokens": self.held_tokens,
            "tenant": self.tenant,
            "chunk_bytes": self.chunk_bytes,
            "codecs": {str(int(kind)): name for kind, name in self.codecs.items()},
            "meta": dict(self.meta),
        }

    @classmethod
    def from_json(cls, value: Any, validated: bool = False) -> Manifest:
        """Strict inverse of `to_json`. `validated`: by this side's own other process, so that its
        bounds need not be looked at again. Raises FrameError."""
        body = _object(value)
        regions = body.get("regions")
        if not isinstance(regions, list) or len(regions) > MAX_REGIONS:
            raise FrameError("manifest: regions must be a list of [layer, kind, bytes]")
        try:
            manifest = cls(
                regions=tuple(
                    [
                        RegionSize(Region(_int(layer), _kind(kind)), _int(size))
                        for layer, kind, size in regions
                    ]
                ),
                n_tokens=_int(body["n_tokens"]),
                held_tokens=_int(body["held_tokens"]),
                tenant=_name(body["tenant"]),
                chunk_bytes=_int(body["chunk_bytes"]),
                codecs={Kind(int(k)): _name(v) for k, v in _object(body["codecs"]).items()},
                meta=_object(body["meta"]),
            )
            if not validated:
                manifest.validate()
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"manifest: {error}") from error
        return manifest


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a connection. `lane` is -1 for the control connection.

    layout names everything that gives bytes their meaning (page size, widths, dtypes, state
    orientation); unlike layouts refuse each other. instance: the incarnation of the instance that
    dials, as it says (0: it does not), for the audit; what it may do goes by its certificate.
    """

    layout: str
    lane: int
    codecs: tuple[str, ...] = ("raw",)
    instance: int = 0

    def encode(self) -> bytes:
        return _dump(
            {
                "layout": self.layout,
                "lane": self.lane,
                "codecs": list(self.codecs),
                "instance": self.instance,
            }
        )

    @classmethod
    def decode(cls, body: bytes) -> Hello:
        value = _object(_load(body))
        codecs = value.get("codecs")
        if not isinstance(codecs, list) or len(codecs) > 16:
            raise FrameError("hello: codecs must be a short list")
        lane = _int(value.get("lane"))
        if not -1 <= lane < 256:
            raise FrameError(f"hello: lane {lane}")
        instance = _int(value.get("instance", 0))
        if not 0 <= instance < 1 << 64:
            raise FrameError(f"hello: instance {instance}")
        return cls(_name(value.get("layout")), lane, tuple(_name(c) for c in codecs), instance)


@dataclass(frozen=True, slots=True)
class Offer:
    """Asks for blocks. `key.attempt` also stands in the header of every later frame."""

    key: Key
    manifest: Manifest

    def encode(self) -> bytes:
        return _dump({"request": self.key.request_id, "manifest": self.manifest.to_json()})

    @classmethod
    def decode(cls, body: bytes, attempt: int) -> Offer:
        value = _object(_load(body))
        request = _name(value.get("request"))
        return cls(Key(request, attempt), Manifest.from_json(value.get("manifest")))


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks are reserved: send at most `credit_bytes` unacknowledged. `have`: a bitmap of chunks
    that arrived before a reconnect (bit n of byte n // 8)."""

    credit_bytes: int
    have: bytes = b""

    def encode(self) -> bytes:
        return _dump(
            {"credit": self.credit_bytes, "have": base64.b64encode(self.have).decode("ascii")}
        )

    @classmethod
    def decode(cls, body: bytes) -> Grant:
        value = _object(_load(body))
        have = value.get("have")
        if not isinstance(have, str) or len(have) > MAX_CHUNKS // 4:
            raise FrameError("grant: bitmap is missing or too long")
        try:
            return cls(_int(value.get("credit")), base64.b64decode(have, validate=True))
        except ValueError as error:
            raise FrameError(f"grant: {error}") from error


@dataclass(frozen=True, slots=True)
class Commit:
    """All chunks are sent. `digest`: over the checksums of all chunks in order (`digest_of`)."""

    digest: int
    first_token: int = -1
    meta: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        return _dump(
            {
                "digest": f"{self.digest:032x}",
                "first_token": self.first_token,
                "meta": dict(self.meta),
            }
        )

    @classmethod
    def decode(cls, body: bytes) -> Commit:
        value = _object(_load(body))
        try:
            digest = int(_name(value.get("digest")), 16)
        except ValueError as error:
            raise FrameError("commit: the digest is not hexadecimal") from error
        return cls(digest, _int(value.get("first_token")), _object(value.get("meta")))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was refused, aborted or ended. `retryable`: another attempt may help."""

    text: str
    retryable: bool = True

    def encode(self) -> bytes:
        return _dump({"reason": self.text[:1000], "retryable": self.retryable})

    @classmethod
    def decode(cls, body: bytes) -> Reason:
        value = _object(_load(body))
        text = value.get("reason")
        if not isinstance(text, str):
            raise FrameError("reason: not a string")
        return cls(text, value.get("retryable") is True)


def check_size(value: Mapping[str, Any], what: str) -> None:
    """Raises ValueError where `value` is not JSON or would not fit a control frame."""
    try:
        size = len(_dump(value))
    except orjson.JSONEncodeError as error:
        raise ValueError(f"{what}: {error}") from error
    if size > MAX_CONTROL_BYTES - 4096:
        raise ValueError(f"{what} of {size} bytes as JSON; {MAX_CONTROL_BYTES - 4096} would do")


def encode_numbers(numbers: Iterable[int], size: str = "I") -> bytes:
    """Chunk numbers (u32, `I`) or transfer numbers (u64, `Q`) as a little-endian array."""
    values = tuple(numbers)
    return struct.pack(f"<{len(values)}{size}", *values)


def decode_numbers(body: bytes, size: str = "I") -> tuple[int, ...]:
    width = struct.calcsize(f"<{size}")
    if len(body) % width or len(body) > MAX_LISTED * 8:
        raise FrameError(f"a list of {len(body)} bytes")
    return struct.unpack(f"<{len(body) // width}{size}", body)


def _dump(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def _load(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError as error:
        raise FrameError(f"control body is not JSON: {type(error).__name__}") from error


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FrameError(f"expected an object, found {type(value).__name__}")
    return value


def _kind(value: Any) -> Kind:
    kind = _KINDS.get(_int(value))
    if kind is None:
        raise FrameError(f"region kind {value}")
    return kind


def _int(value: Any) -> int:
    if type(value) is not int:
        raise FrameError(f"expected an integer, found {type(value).__name__}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise FrameError(f"expected a string of at most {MAX_NAME} characters")
    return value
