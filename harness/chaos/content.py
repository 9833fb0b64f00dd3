"""What caches hold in a campaign: small integers from which every wrong byte shows.

A token's row names its tenant, layer, position and a hash of the prompt up to it; a state's row its
tenant, layer, length and the same hash. So a cache is right exactly if its bytes are equal to those
computed from the tokens alone, and a wrong one says whose it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from engine.model.config import ModelConfig
from engine.model.layout import CacheLayout
from workloads.request import Request

PAGE_TOKENS = 4
VOCAB = 50_021
#: Two layers of either kind: latents of 16 bytes a token, states of 32 and convolutions of 96.
MODEL = ModelConfig(
    name="chaos",
    hidden=8,
    layers=4,
    vocab=VOCAB,
    kda_heads=1,
    d_k=2,
    d_v=4,
    mla_heads=1,
    kv_lora_rank=2,
    nope_dim=2,
    rope_dim=2,
    v_dim=2,
    dense_ffn=8,
    mla_every=2,
)
TOKEN_BYTES = MODEL.latent_dim * 4
_MASK = (1 << 64) - 1
_ROW = struct.Struct("<QQ")
_STATE = struct.Struct("<QQQQ")
POISON = 0xEE


def layout_of(pages: int, slots: int) -> CacheLayout:
    """Scratch page and slot included, as the worker's own loader does."""
    return CacheLayout(MODEL, pages + 1, slots + 1, PAGE_TOKENS)


def _link(chain: int, token: int) -> int:
    chain = (chain ^ token) * 0x9E3779B97F4A7C15 & _MASK
    return chain ^ chain >> 29


class History:
    """The right cache of one sequence, grown with its tokens."""

    __slots__ = ("_chains", "_tag", "rows")

    def __init__(self, tenant: str) -> None:
        self._tag = tag_of(tenant)
        self._chains = [0x51ED270B27EB1A2D]
        self.rows: dict[int, bytearray] = {layer: bytearray() for layer in MODEL.mla_layers}

    def grow(self, tokens: Sequence[int], stop: int) -> None:
        """Know the first `stop` of `tokens`; earlier ones must not have changed."""
        chains = self._chains
        for position in range(len(chains) - 1, stop):
            chain = _link(chains[-1], tokens[position])
            chains.append(chain)
            for layer, rows in self.rows.items():
                rows += _ROW.pack(self._tag << 48 | layer << 32 | position, chain)

    def state(self, layer: int, n_tokens: int) -> bytes:
        """The state and the convolution entries of `layer` at `n_tokens`."""
        chain = self._chains[n_tokens]
        state = _STATE.pack(self._tag << 48 | layer, n_tokens, chain, chain ^ _MASK)
        conv = _STATE.pack(self._tag << 48 | layer | 1 << 40, n_tokens, chain, chain ^ _MASK)
        return state + conv * 3

    def next_token(self, n_tokens: int) -> int:
        """What greedy sampling gives after `n_tokens`."""
        return self._chains[n_tokens] % (VOCAB - 1) + 1


def tag_of(tenant: str) -> int:
    """A small number that stands for a tenant in every row (16 bits, never that of poison)."""
    return 1 + sum(tenant.encode()) % 0xDD00


def describe(found: bytes, expected: bytes, width: int) -> str:
    """What the first wrong row of `found` is, for a violation."""
    for start in range(0, len(expected), width):
        row = found[start : start + width]
        if row == expected[start : start + width]:
            continue
        where = f"row {start // width}"
        if len(row) < width:
            return f"{where} is missing"
        if row == bytes([POISON]) * width:
            return f"{where} was freed"
        if not any(row):
            return f"{where} was never written"
        tag = int.from_bytes(row[6:8], "little")
        if tag != int.from_bytes(expected[start + 6 : start + 8], "little"):
            return f"{where} belongs to tenant {tag}"
        return f"{where} is of another prompt or position"
    return "nothing"


def prompt_of(request: Request, seed: int) -> list[int]:
    """Token ids: equal block ids give equal tokens whatever the tenant; the tail is unique."""
    size = request.block_tokens
    tokens = [
        1 + _link(_link(seed, block), offset) % (VOCAB - 1)
        for block in request.block_ids
        for offset in range(size)
    ][: request.input_tokens]
    chain = _link(_link(seed, 7), request.id)
    while len(tokens) < request.input_tokens:
        chain = _link(chain, len(tokens))
        tokens.append(1 + chain % (VOCAB - 1))
    return tokens


def right_tokens(request: Request, seed: int) -> list[int]:
    """What one engine alone would generate."""
    tokens = prompt_of(request, seed)
    history = History(request.tenant)
    while len(tokens) < request.input_tokens + request.output_tokens:
        history.grow(tokens, len(tokens))
        tokens.append(history.next_token(len(tokens)))
    return tokens[request.input_tokens :]
