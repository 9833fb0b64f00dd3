"""The digest of a whole transfer, made from the checksums of its chunks in order."""

from __future__ import annotations

from array import array

import xxhash


def digest_of(checksums: array[int]) -> int:
    """xxh3-128 over the chunks' xxh3-64 (array of u64, native order: little-endian hosts only).

    Equal digests mean that both ends hashed the same bytes of every chunk; the cost does not grow
    with the bytes a second time.
    """
    return xxhash.xxh3_128_intdigest(memoryview(checksums).cast("B"))
