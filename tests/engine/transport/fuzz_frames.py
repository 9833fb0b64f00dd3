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
    from engine.transport.frames import (
        HEADER_BYTES,
        ROW_BYTES,
        VERSION,
        FrameReader,
        Type,
        control_frame,
        decode_header,
        decode_table,
    )
    from engine.transport.messages import Key, Manifest, Offer
    from engine.transport.receiver import Receiver
    from engine.transport.regions import Kind, Region, RegionSize


MANIFEST = Manifest(tuple(RegionSize(Region(layer, Kind.KV), 40) for layer in range(8)), n_tokens=1)


def sealed(data: bytes) -> bytes:
    """The input as one frame whose magic, length and checksums are right."""
    header = bytearray(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    body = data[HEADER_BYTES:]
    header[:8] = struct.pack("<4sBBH", b"PRFK", VERSION, header[5] % len(Type) + 1, 0)
    header[8:12] = struct.pack("<I", len(body))
    header[16:40] = struct.pack("<QQQ", 11, 22, header[32] % 2)
    covered = body
    if header[5] == Type.BATCH:
        count = header[44] % 8 + 1
        header[44:48] = struct.pack("<I", count)
        covered = body[: count * ROW_BYTES]
    header[48:60] = struct.pack("<QI", xxhash.xxh3_64_intdigest(covered), 0)
    header[60:] = struct.pack("<I", xxhash.xxh3_64_intdigest(bytes(header[:60])) & 0xFFFFFFFF)
    return bytes(header) + body


def granted_receiver() -> Receiver:
    """One whose transfer 1 of peer 11 has its memory."""
    receiver = Receiver(22)
    receiver.on_connected(11, "")
    offer = Offer(Key("r"), MANIFEST).encode()
    frame = control_frame(Type.OFFER, source=11, target=22, transfer=1, body=offer)
    receiver.on_frame(0.0, 11, frame)
    receiver.grant(0.0, (11, 1))
    return receiver


def one_input(data: bytes) -> None:
    receiver = granted_receiver()
    reader = FrameReader()
    stream = sealed(data[1:]) if data[:1] >= b"\x80" else data
    with contextlib.suppress(FrameError):
        for frame in reader.feed(stream):
            receiver.on_frame(0.0, 11, frame)
    receiver = granted_receiver()
    with contextlib.suppress(FrameError):
        header = decode_header(stream[:HEADER_BYTES])
        if header.type is not Type.BATCH:
            receiver.begin_chunk(0.0, header)
            return
        table = stream[HEADER_BYTES : HEADER_BYTES + header.chunk * ROW_BYTES]
        places = receiver.begin_batch(0.0, header, decode_table(header, table)) or []
        slots = [place for place in places if not isinstance(place, int)]
        if slots:
            receiver.end_batch(0.0, slots, [slot.checksum for slot in slots])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
