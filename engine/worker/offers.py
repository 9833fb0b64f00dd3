"""What an offer says about a cache: its prompt, and the size of every region of it.

The prompt travels in the offer, so that the receiver can find what it holds already and name the
blocks that arrive.
"""

from __future__ import annotations

import array
import base64
from collections.abc import Mapping, Sequence
from typing import Any

from engine.model.layout import CacheLayout
from engine.transport.client import Refusal
from engine.transport.messages import Manifest
from engine.transport.regions import Kind, RegionSize
from engine.worker.media import region_sizes

#: Prefix of the refusal that tells the sender how much of the prompt is really held here.
HELD = "held_tokens="


def describe(
    layout: CacheLayout,
    prompt: Sequence[int],
    held_tokens: int,
    tenant: str,
    codecs: Mapping[Kind, str],
    meta: Mapping[str, Any] | None = None,
) -> Manifest:
    """The offer of the cache of `prompt`, whose first `held_tokens` (whole pages) do not cross."""
    return Manifest(
        regions=_regions(layout, len(prompt) - held_tokens),
        n_tokens=len(prompt),
        held_tokens=held_tokens,
        tenant=tenant,
        codecs=codecs,
        meta={"prompt": pack_tokens(prompt), **(meta or {})},
    )


def prompt_of(layout: CacheLayout, manifest: Manifest) -> list[int]:
    """The prompt of an offer that fits this layout. Raises Refusal."""
    try:
        prompt = unpack_tokens(manifest.meta["prompt"])
    except (KeyError, TypeError, ValueError) as error:
        raise Refusal("the offer carries no prompt", retryable=False) from error
    held = manifest.held_tokens
    if (
        len(prompt) != manifest.n_tokens
        or held % layout.page_tokens
        or {each.region: each.size_bytes for each in manifest.regions}
        != {each.region: each.size_bytes for each in _regions(layout, len(prompt) - held)}
    ):
        raise Refusal("the offer does not fit this model's cache layout", retryable=False)
    return prompt


def held_instead(reason: str) -> int | None:
    """Tokens that a receiver which refused for `reason` says it holds; None: that is not why."""
    known = reason.partition(HELD)[2]
    return int(known) if known.isdigit() else None


def _regions(layout: CacheLayout, n_tokens: int) -> tuple[RegionSize, ...]:
    """Every region of a cache in which `n_tokens` latents cross."""
    return tuple(
        RegionSize(region, size)
        for layer in range(layout.config.layers)
        for region, size in region_sizes(layout, layer, n_tokens)
    )


def pack_tokens(tokens: Sequence[int]) -> str:
    """Token ids as text: two or four bytes each (little-endian hosts, as on the data plane)."""
    code = "H" if max(tokens) < 1 << 16 else "I"
    return code + base64.b64encode(array.array(code, tokens).tobytes()).decode("ascii")


def unpack_tokens(text: str) -> list[int]:
    """Inverse of `pack_tokens`. Raises ValueError."""
    if not isinstance(text, str) or text[:1] not in ("H", "I"):
        raise ValueError("not packed tokens")
    tokens = array.array(text[0])
    tokens.frombytes(base64.b64decode(text[1:], validate=True))
    return tokens.tolist()
