"""Coverage-guided fuzzing of the wire parser, with atheris where it is installed.

    python tests/engine/transport/fuzz_frames.py -atheris_runs=200000

The receiver is fed what a stranger may send: whatever the bytes, only FrameError may come out, and
memory stays bounded. Half of the inputs get valid checksums, so that they reach the bodies.
"""

from __future__ import annotations

import contextlib
import struct
import sys

import atheris

with atheris.instrument_imports():
    import xxhash

    from engine.transport.errors import FrameError
    from engine.transport.frames import HEADER_BYTES, FrameReader, Type, decode_header
    from engine.transport.receiver import Receiver


def sealed(data: bytes) -> bytes:
    """The input as one frame whose magic, length and checksums are right."""
    header = bytearray(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    body = data[HEADER_BYTES:]
    header[:8] = struct.pack("<4sBBH", b"PRFK", 1, header[5] % len(Type) + 1, 0)
    header[8:12] = struct.pack("<I", len(body))
    header[16:32] = struct.pack("<QQ", 11, 22)
    header[48:60] = struct.pack("<QI", xxhash.xxh3_64_intdigest(body), 0)
    header[60:] = struct.pack("<I", xxhash.xxh3_64_intdigest(bytes(header[:60])) & 0xFFFFFFFF)
    return bytes(header) + body


def one_input(data: bytes) -> None:
    receiver = Receiver(22)
    receiver.on_connected(11, "")
    reader = FrameReader()
    stream = sealed(data[1:]) if data[:1] >= b"\x80" else data
    with contextlib.suppress(FrameError):
        for frame in reader.feed(stream):
            receiver.on_frame(0.0, 11, frame)
    with contextlib.suppress(FrameError):
        receiver.begin_chunk(0.0, decode_header(stream[:HEADER_BYTES]))


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
