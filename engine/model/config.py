"""Model shapes and what they cost: cache bytes and floating-point work. Torch-free.

A layer is either KDA (Kimi Delta Attention: a fixed-size recurrent state per request) or MLA
(multi-head latent attention: one latent vector per token). Counting layers from 1, a layer is MLA
when its number is a multiple of `mla_every`, or when it is the last.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

STATE_ITEMSIZE = 4
"""The recurrent state is fp32 in every cache: rounding it compounds over the whole context."""

DTYPE_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class InputError(ValueError):
    """Bad input from a user; the message names the place, what was found and what would do."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Kimi Linear shape. All sizes are counts of elements; `d_k` is the KDA key dimension and
    `d_v` its value dimension (they may differ).

    `experts == 0` means that every feed-forward block is dense. Otherwise the first
    `dense_layers` blocks are dense and the others route each token to `experts_per_token` of
    `experts`, beside `shared_experts` that see every token.
    """

    name: str
    hidden: int
    layers: int
    vocab: int
    kda_heads: int
    d_k: int
    d_v: int
    mla_heads: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    dense_ffn: int
    mla_every: int = 4
    conv_width: int = 4
    gate_rank: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 1
    routed_scale: float = 1.0
    renormalize: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.layers < 1 or self.mla_every < 1 or self.conv_width < 2:
            raise InputError(f"{self.name}: layers and mla_every must be >= 1, conv_width >= 2")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise InputError(
                f"{self.name}: experts_per_token is {self.experts_per_token}, "
                f"must be 1 to {self.experts}"
            )

    # --- layers -------------------------------------------------------------------------------

    def is_mla(self, layer: int) -> bool:
        """Whether `layer` (from 0) is MLA: every `mla_every`-th, and the last."""
        return (layer + 1) % self.mla_every == 0 or layer == self.layers - 1

    def is_moe(self, layer: int) -> bool:
        """Whether the feed-forward block of `layer` (from 0) routes to experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.layers) if self.is_mla(i))

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.layers) if not self.is_mla(i))

    @property
    def qk_dim(self) -> int:
        """Dimension of an MLA query or key; the attention scale is `qk_dim ** -0.5`."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Values kept per token in one MLA layer's cache."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def conv_channels(self) -> int:
        """Channels of one KDA layer's short convolution: q, k and v side by side."""
        return self.kda_heads * (2 * self.d_k + self.d_v)

    @property
    def low_rank(self) -> int:
        """Rank of the decay and output gates' projections (the key dimension by default)."""
        return self.gate_rank or self.d_k

    # --- cache bytes --------------------------------------------------------------------------

    def kda_state_bytes(self) -> int:
        """fp32 recurrent state of one request in one KDA layer."""
        return self.kda_heads * self.d_v * self.d_k * STATE_ITEMSIZE

    def conv_bytes(self, dtype: str = "bfloat16") -> int:
        """Convolution inputs of one request kept in one KDA layer: `conv_width - 1` per channel."""
        return (self.conv_width - 1) * self.conv_channels * DTYPE_ITEMSIZE[dtype]

    def state_bytes(self, dtype: str = "bfloat16") -> int:
        """Fixed cache bytes of one request: state and convolution of every KDA layer."""
        return len(self.kda_layers) * (self.kda_state_bytes() + self.conv_bytes(dtype))

    def kv_bytes_per_token(self, dtype: str = "bfloat16") -> int:
        """Cache bytes that each further token adds, over all MLA layers."""
        return len(self.mla_layers) * self.latent_dim * DTYPE_ITEMSIZE[dtype]

    def request_bytes(self, n_tokens: int, dtype: str = "bfloat16") -> int:
        """Cache bytes of a request of `n_tokens`: S_kv(l) = fixed + per-token x l."""
        return self.state_bytes(dtype) + n_tokens * self.kv_bytes_per_token(dtype)

    def fingerprint(self) -> str:
        """Identifies model shape and cache layout; two engines may exchange caches only if equal.

        The state's V-first order is part of it, so that a reader of the other order is refused
        even where d_k == d_v hides the difference.
        """
        text = json.dumps({**asdict(self), "name": "", "state": "slot,head,v,k"}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # --- parameters and work ------------------------------------------------------------------

    def _mixer_params(self, layer: int) -> int:
        if self.is_mla(layer):
            return (
                self.hidden * self.mla_heads * self.qk_dim
                + self.hidden * self.latent_dim
                + self.kv_lora_rank * self.mla_heads * (self.nope_dim + self.v_dim)
                + self.mla_heads * self.v_dim * self.hidden
            )
        keys, values = self.kda_heads * self.d_k, self.kda_heads * self.d_v
        projections = self.hidden * (2 * keys + 2 * values + self.kda_heads)
        gates = self.low_rank * (2 * self.hidden + keys + values)
        return projections + gates + self.conv_width * self.conv_channels

    def _ffn_params(self, layer: int, experts: float) -> float:
        if not self.is_moe(layer):
            return 3 * self.hidden * self.dense_ffn
        expert = 3 * self.hidden * self.expert_ffn
        return self.hidden * self.experts + expert * (experts + self.shared_experts)

    def parameters(self) -> int:
        """Weights of all layers, embedding and output head (norm gains and gate biases, which
        are below 0.1 %, apart)."""
        layers = sum(
            self._mixer_params(i) + int(self._ffn_params(i, self.experts))
            for i in range(self.layers)
        )
        return layers + 2 * self.vocab * self.hidden

    def active_parameters(self) -> int:
        """Weights that one token multiplies with, the output head included."""
        layers = sum(
            self._mixer_params(i) + int(self._ffn_params(i, self.experts_per_token))
            for i in range(self.layers)
        )
        return layers + self.vocab * self.hidden

    def _recurrence_flops(self) -> int:
        """The delta rule per token over all KDA layers: decay, k^T S, rank-one update, q^T S."""
        return len(self.kda_layers) * self.kda_heads * 7 * self.d_k * self.d_v

    def prefill_flops(self, n_tokens: int, cached_tokens: int = 0) -> float:
        """Work to compute tokens `cached_tokens` .. `n_tokens` of a prompt: two per weight and
        token, causal attention with expanded keys in MLA, the recurrence in KDA, one output row.

        Counts the recurrence itself, not the extra work of a chunked form, so that a utilisation
        derived from it compares implementations.
        """
        new = n_tokens - cached_tokens
        pairs = (n_tokens * (n_tokens + 1) - cached_tokens * (cached_tokens + 1)) // 2
        body = self.active_parameters() - self.vocab * self.hidden
        attention = 2 * self.mla_heads * (self.qk_dim + self.v_dim) * pairs * len(self.mla_layers)
        head = 2 * self.vocab * self.hidden
        return 2.0 * body * new + attention + self._recurrence_flops() * new + head

    def decode_flops(self, context_tokens: int) -> float:
        """Work of one decode step of one request with `context_tokens` cached (absorbed MLA)."""
        attention = 2 * self.mla_heads * (self.latent_dim + self.kv_lora_rank) * context_tokens
        return (
            2.0 * self.active_parameters()
            + attention * len(self.mla_layers)
            + self._recurrence_flops()
        )

    def decode_bytes(self, batch: int, context_tokens: int, dtype: str = "bfloat16") -> float:
        """Memory traffic of one decode step: the weights that `batch` tokens touch once (expected
        distinct experts under uniform routing), each request's state read and written, and its
        latents read."""
        hit = (
            self.experts * (1 - (1 - self.experts_per_token / self.experts) ** batch)
            if self.experts
            else 0.0
        )
        weights = self.vocab * self.hidden + sum(
            self._mixer_params(i) + self._ffn_params(i, hit) for i in range(self.layers)
        )
        cache = 2 * self.state_bytes(dtype) + context_tokens * self.kv_bytes_per_token(dtype)
        return weights * DTYPE_ITEMSIZE[dtype] + batch * cache


_TINY = ModelConfig(
    name="tiny",
    hidden=48,
    layers=4,
    vocab=256,
    kda_heads=2,
    d_k=16,
    d_v=24,
    mla_heads=3,
    kv_lora_rank=16,
    nope_dim=12,
    rope_dim=8,
    v_dim=20,
    dense_ffn=64,
    experts=8,
    experts_per_token=2,
    expert_ffn=24,
    shared_experts=1,
    routed_scale=2.446,
)

_KIMI_48B = ModelConfig(
    name="kimi-linear-48b",
    hidden=2304,
    layers=27,
    vocab=163_840,
    kda_heads=32,
    d_k=128,
    d_v=128,
    mla_heads=32,
    kv_lora_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    dense_ffn=9216,
    experts=256,
    experts_per_token=8,
    expert_ffn=1024,
    shared_experts=1,
    routed_scale=2.446,
)


def _variant(base: ModelConfig, **changes: object) -> ModelConfig:
    return ModelConfig(**{**asdict(base), **changes})


SHAPES: dict[str, ModelConfig] = {
    config.name: config
    for config in (
        _TINY,
        _variant(_TINY, name="tiny-7to1", layers=8, mla_every=8),
        # The paced benchmark's model: fixed bytes / bytes per token is that of `paper-1t` when one
        # of its tokens stands for 64 (fp32 convolution and latents), and compute is negligible.
        ModelConfig(
            name="bench",
            hidden=64,
            layers=4,
            vocab=512,
            kda_heads=2,
            d_k=48,
            d_v=16,
            mla_heads=2,
            kv_lora_rank=32,
            nope_dim=16,
            rope_dim=8,
            v_dim=16,
            dense_ffn=128,
            gate_rank=16,
        ),
        ModelConfig(
            name="small",
            hidden=128,
            layers=4,
            vocab=1024,
            kda_heads=2,
            d_k=32,
            d_v=32,
            mla_heads=2,
            kv_lora_rank=64,
            nope_dim=32,
            rope_dim=16,
            v_dim=32,
            dense_ffn=256,
            experts=8,
            experts_per_token=2,
            expert_ffn=64,
            shared_experts=1,
            routed_scale=2.446,
        ),
        _KIMI_48B,
        # Only the cache geometry (57 layers, 64 heads) follows from the paper; width, experts and
        # vocabulary are chosen to reach 1T parameters.
        _variant(
            _KIMI_48B,
            name="paper-1t",
            hidden=7168,
            layers=57,
            kda_heads=64,
            mla_heads=64,
            dense_ffn=18_432,
            experts=384,
            expert_ffn=2048,
        ),
    )
}


def shape(name: str) -> ModelConfig:
    """The shipped shape of that name; raises InputError that lists the names."""
    try:
        return SHAPES[name]
    except KeyError:
        raise InputError(f"model shape {name!r} is unknown; have {', '.join(SHAPES)}") from None
