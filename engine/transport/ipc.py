"""Messages between a worker and its data plane: length-prefixed JSON over a socketpair.

Both ends trust each other (parent and child); the bound guards against a bug, not an attacker.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import orjson

Message = dict[str, Any]
_LENGTH = struct.Struct("<I")
MAX_BYTES = 16 << 20


def encode(message: Message) -> bytes:
    body = orjson.dumps(message, option=orjson.OPT_NON_STR_KEYS)
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Cuts a byte stream into messages."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[Message]:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > MAX_BYTES:
                raise ValueError(f"a message of {size} bytes")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            message = orjson.loads(self._buffer[start + _LENGTH.size : end])
            start = end
            yield message
        del self._buffer[:start]


def send(sock: socket.socket, message: Message) -> None:
    """Blocking send of one message."""
    sock.sendall(encode(message))
