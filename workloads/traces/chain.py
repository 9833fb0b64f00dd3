"""Chain ids from block contents: an id that names a block and everything before it."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def chained(contents: Iterable[bytes]) -> tuple[int, ...]:
    """One id of 63 bits for each block: the hash of the block after all blocks before it."""
    digest = xxhash.xxh3_64()
    ids = []
    for content in contents:
        digest.update(content)
        ids.append(digest.intdigest() >> 1)
    return tuple(ids)
