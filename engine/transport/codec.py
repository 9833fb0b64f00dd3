"""Wire codecs: how a chunk's bytes are written on the wire. `raw` is as they lie in memory.

`bf16` carries float32 memory as bfloat16, rounded to nearest even: half the bytes, relative error
of each value at most 2^-8 (NaN stays NaN, infinities and zeros stay themselves). It is meant for
the recurrent state only, and is chosen by name for a kind of region.
"""

from __future__ import annotations

from collections.abc import Sequence

RAW = "raw"
BF16 = "bf16"
CODECS = (RAW, BF16)


def wire_bytes(codec: str, size: int) -> int:
    """Bytes on the wire of `size` bytes of memory."""
    return size // 2 if codec == BF16 else size


def encode_views(codec: str, views: Sequence[memoryview]) -> Sequence[memoryview]:
    """What to send for the memory in `views`. `raw` gives the views themselves."""
    if codec == RAW:
        return views
    import numpy

    words = numpy.frombuffer(b"".join(views), dtype=numpy.uint32)
    # Adding half of the dropped part, less one where the kept part is even, rounds to nearest even;
    # a NaN could overflow into an infinity that way, so its top mantissa bit is set instead.
    rounded = (words + (numpy.uint32(0x7FFF) + ((words >> 16) & 1))) >> 16
    nan = (words & 0x7FFFFFFF) > 0x7F800000
    rounded[nan] = (words[nan] >> 16) | 0x40
    return [rounded.astype(numpy.uint16).data.cast("B")]


def decode_into(codec: str, body: memoryview, views: Sequence[memoryview]) -> None:
    """Write a verified chunk's memory from its body on the wire."""
    if codec != BF16:
        raise ValueError(f"codec {codec!r}")
    import numpy

    words = numpy.frombuffer(body, dtype=numpy.uint16).astype(numpy.uint32) << 16
    data = words.data.cast("B")
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)
