"""Token ids for prompts that repeat exactly where the workload's prefixes repeat.

The token at offset j of a block is a hash of (seed, block id, j), so equal ids give equal tokens in
every process, and a partial block is a prefix of its whole. What no block id covers is a hash of
(seed, worker, request id, j): it is unique, also among workers that share a seed.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
from numpy.typing import NDArray

from workloads.errors import InputError
from workloads.request import Request

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
#: Memory of a prompt while it is made, bytes a token: its stream, temporaries and text.
_TOKEN_BYTES = 64
#: Shorter prompts fit every machine, and are not worth asking it.
_LONG_TOKENS = 1 << 22
_BLOCK_DOMAIN, _UNIQUE_DOMAIN = 1, 2


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection that avalanches."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_one(x: int) -> int:
    """`_mix` of one value: numpy costs more for one than for a hundred."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _key(*parts: int) -> int:
    """One 64-bit key of several integers, order mattering."""
    key = 0
    for part in parts:
        key = _mix_one((key + part * _GOLDEN + _GOLDEN) & _MASK)
    return key


@cache
def _steps(size: int) -> NDArray[np.uint64]:
    return np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)


def _stream(keys: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """`n` 64-bit values for each key, [keys, n]."""
    # Kept for each power of two: at most twice the memory of the longest prompt.
    steps = _steps(1 << (n - 1).bit_length())[:n]
    return _mix(keys[:, None] + steps)


def _check_fits(tokens: int) -> None:
    """Raises InputError where a prompt of so many tokens does not fit the machine's memory."""
    needed = tokens * _TOKEN_BYTES
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > whole:
        raise InputError(
            f"input_tokens: a prompt of {tokens} tokens takes about {needed / 1e9:.0f} GB to make, "
            f"this machine has {whole / 1e9:.0f} GB of memory; make prompts shorter"
        )


def prompt_tokens(
    request: Request, vocab_size: int, seed: int, *, first_id: int = 0, worker: int = 0
) -> NDArray[np.int32]:
    """The prompt of `request`: [input_tokens] int32 ids from `first_id` to `vocab_size` - 1.

    Raises InputError where there is no id to choose, or no memory for so many.
    """
    span = vocab_size - first_id
    if first_id < 0 or span < 2:
        raise InputError(
            f"vocab_size: found {vocab_size} with first_id {first_id}, needs two ids or more"
        )
    total = request.input_tokens
    if total > _LONG_TOKENS:
        _check_fits(total)
    covered = min(total, len(request.block_ids) * request.block_tokens)
    parts = []
    if covered:
        seed_key = np.uint64(_key(seed, _BLOCK_DOMAIN))
        ids = np.fromiter((i & _MASK for i in request.block_ids), np.uint64)
        parts.append(_stream(_mix(_mix(ids) ^ seed_key), request.block_tokens).ravel()[:covered])
    if covered < total:
        key = _key(seed, _UNIQUE_DOMAIN, worker, request.id)
        parts.append(_stream(np.array([key], np.uint64), total - covered)[0])
    # The high bits scaled to the span: the bias is below span / 2^32.
    high = np.concatenate(parts) >> np.uint64(32)
    return ((high * np.uint64(span)) >> np.uint64(32)).astype(np.int32) + np.int32(first_id)
