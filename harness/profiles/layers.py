"""Bytes that a request's cache holds, from a model's layers: S_kv(l) = fixed + per token x l."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from workloads.section import Table


class _Layer(Table):
    """`count` equal layers. Both sizes are of all of them."""

    count: int = Field(ge=1)
    value_bytes: int = Field(2, ge=1, description="bytes of a cached value (2: bf16)")

    def fixed_bytes(self) -> int:
        return 0

    def per_token_bytes(self) -> int:
        return 0


class LinearAttention(_Layer):
    """KDA, Gated DeltaNet, Lightning: a state a head and the tail of the short convolutions."""

    kind: Literal["linear-attention"]
    heads: int = Field(ge=1)
    key_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)
    state_bytes: int = Field(4, ge=1, description="bytes of a state value (4: fp32)")
    conv_channels: int = Field(0, ge=0, description="channels of all convolved streams")
    conv_entries: int = Field(0, ge=0, description="past inputs kept per channel")

    def fixed_bytes(self) -> int:
        state = self.heads * self.key_dim * self.value_dim * self.state_bytes
        return self.count * (state + self.conv_channels * self.conv_entries * self.value_bytes)


class LatentAttention(_Layer):
    """MLA: one latent row (compressed KV and the shared key part) a token."""

    kind: Literal["latent-attention"]
    latent_dim: int = Field(ge=1)

    def per_token_bytes(self) -> int:
        return self.count * self.latent_dim * self.value_bytes


class GroupedAttention(_Layer):
    """GQA: a key and a value a KV head and token."""

    kind: Literal["grouped-attention"]
    kv_heads: int = Field(ge=1)
    key_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)

    def per_token_bytes(self) -> int:
        return self.count * self.kv_heads * (self.key_dim + self.value_dim) * self.value_bytes


class WindowAttention(GroupedAttention):
    """Sliding window: the last `window_tokens` tokens, counted in full for shorter prompts too."""

    kind: Literal["window-attention"]  # type: ignore[assignment]
    window_tokens: int = Field(ge=1)

    def fixed_bytes(self) -> int:
        return super().per_token_bytes() * self.window_tokens

    def per_token_bytes(self) -> int:
        return 0


Layer = Annotated[
    LinearAttention | LatentAttention | GroupedAttention | WindowAttention,
    Field(discriminator="kind"),
]


def cache_bytes(layers: Iterable[_Layer]) -> tuple[int, int]:
    """(fixed, per token) bytes of a request's whole cache."""
    kept = list(layers)
    return (
        sum(layer.fixed_bytes() for layer in kept),
        sum(layer.per_token_bytes() for layer in kept),
    )
