"""Names of cache blocks: a hash chain over blocks of tokens, salted by tenant.

A key names its block and everything before it, so two prompts share a prefix exactly as far as
their keys are equal. Keys of different tenants differ whatever the tokens are. blake2b is used
because the tokens are a tenant's own choice: a collision must not be constructible.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

_SALT_BITS = 64


def tenant_salt(tenant: str) -> int:
    """64 bits that stand for the tenant in every key of its blocks."""
    return int.from_bytes(blake2b(tenant.encode(), digest_size=_SALT_BITS // 8).digest(), "little")


def block_keys(
    tokens: Sequence[int], block_tokens: int, tenant: str = "", after: Sequence[int] = ()
) -> list[int]:
    """128-bit keys of the full blocks of `tokens`; the partial tail has none.

    `after` holds the keys of the first blocks, where known already; the answer starts with them.
    """
    keys = list(after)
    full = len(tokens) // block_tokens
    if len(keys) >= full:
        return keys[:full]
    done = len(keys) * block_tokens
    data = np.asarray(tokens[done : full * block_tokens], dtype="<i8").tobytes()
    width = 8 * block_tokens
    parent = (keys[-1] if keys else tenant_salt(tenant)).to_bytes(16, "little")
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=16).digest()
        keys.append(int.from_bytes(parent, "little"))
    return keys


def keys_of_ids(block_ids: Sequence[int], tenant: str = "") -> list[int]:
    """Keys from a trace's block ids, which are chained already (see `workloads.Request`)."""
    salt = tenant_salt(tenant) << _SALT_BITS
    return [salt | block_id for block_id in block_ids]
