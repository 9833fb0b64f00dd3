"""Weights in the form in which the forward pass multiplies them (related projections stacked)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.ops.moe import ExpertWeights


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """`project` [conv_channels + 2 rank + H, hidden] stacks q, k, v, the inner halves of the decay
    and the output gate, and beta. `conv` [W, conv_channels], oldest tap first. `decay_up`
    [H K, rank], `gate_up` [H V, rank], `a_log` [H] and `dt_bias` [H, K] fp32, `norm` [V]."""

    project: Tensor
    conv: Tensor
    decay_up: Tensor
    gate_up: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """`project` [H (nope+rope) + rank + rope, hidden] stacks q and the latent with the shared key
    part; `up_key` [H, nope, rank]; `up_value` [H, v, rank]; `norm` [rank]."""

    project: Tensor
    norm: Tensor
    up_key: Tensor
    up_value: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class DenseWeights:
    """`gate_up` [2 ffn, hidden], `down` [hidden, ffn]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Routed experts, and the shared ones as one dense block (None without)."""

    experts: ExpertWeights
    shared: DenseWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; both norms are gains [hidden]."""

    mixer_norm: Tensor
    mixer: KdaWeights | MlaWeights
    ffn_norm: Tensor
    ffn: DenseWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`embed` and `head` [vocab, hidden]; `norm` [hidden]."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> ModelWeights:
        """Copy on `device` in `dtype`; router, correction and decay parameters stay fp32."""
        return _convert(self, device, dtype)

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in _tensors(self))


_FP32 = {"router", "correction", "a_log", "dt_bias"}
_T = TypeVar("_T")


def _convert(node: _T, device: torch.device | str, dtype: torch.dtype) -> _T:
    changes: dict[str, object] = {}
    for field in fields(node):  # type: ignore[arg-type]
        value = getattr(node, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value.to(device, torch.float32 if field.name in _FP32 else dtype)
        elif isinstance(value, tuple):
            changes[field.name] = tuple(_convert(item, device, dtype) for item in value)
        elif value is not None:
            changes[field.name] = _convert(value, device, dtype)
    return replace(node, **changes)  # type: ignore[type-var]


def _tensors(node: object) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, tuple):
        return [t for item in node for t in _tensors(item)]
    if is_dataclass(node):
        return [t for f in fields(node) for t in _tensors(getattr(node, f.name))]
    return []


def random_weights(
    config: ModelConfig,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    drawn_on: torch.device | str = "cpu",
) -> ModelWeights:
    """Seeded weights: matrices uniform with variance 1 / fan-in, decay rates in the range of a
    trained model. Drawn on the CPU they are the same on every host for the same sizes and seed;
    `drawn_on` a GPU they are not, but billions take a second instead of minutes."""
    generator = torch.Generator(drawn_on).manual_seed(seed)

    def uniform(*shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        empty = torch.empty(*shape, device=generator.device)
        return empty.uniform_(low, high, generator=generator)

    def matrix(*shape: int) -> Tensor:
        return uniform(*shape) * math.sqrt(3 / shape[-1])

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    layers = tuple(
        _convert(_random_layer(config, layer, uniform, matrix), device, dtype)
        for layer in range(config.layers)
    )
    return ModelWeights(
        embed=cast(uniform(config.vocab, config.hidden) * math.sqrt(3)),
        layers=layers,
        norm=cast(1 + 0.1 * uniform(config.hidden)),
        head=cast(matrix(config.vocab, config.hidden)),
    )


def _random_layer(
    config: ModelConfig,
    layer: int,
    uniform: Callable[..., Tensor],
    matrix: Callable[..., Tensor],
) -> LayerWeights:
    hidden = config.hidden

    def gain(size: int) -> Tensor:
        return 1 + 0.1 * uniform(size)

    mixer: KdaWeights | MlaWeights
    if config.is_mla(layer):
        heads, rank = config.mla_heads, config.kv_lora_rank
        mixer = MlaWeights(
            project=matrix(heads * config.qk_dim + config.latent_dim, hidden),
            norm=gain(rank),
            up_key=matrix(heads, config.nope_dim, rank),
            up_value=matrix(heads, config.v_dim, rank),
            out=matrix(hidden, heads * config.v_dim),
        )
    else:
        heads, rank = config.kda_heads, config.low_rank
        step = (uniform(heads, config.d_k, low=math.log(1e-3), high=math.log(1e-1))).exp()
        mixer = KdaWeights(
            project=matrix(config.conv_channels + 2 * rank + heads, hidden),
            conv=uniform(config.conv_width, config.conv_channels),
            decay_up=matrix(heads * config.d_k, rank),
            gate_up=matrix(heads * config.d_v, rank),
            a_log=uniform(heads, low=1.0, high=16.0).log(),
            # Inverse of softplus, so that the decay at a zero projection is exp(-rate x step).
            dt_bias=step + torch.log(-torch.expm1(-step)),
            norm=gain(config.d_v),
            out=matrix(hidden, heads * config.d_v),
        )

    def dense(width: int) -> DenseWeights:
        return DenseWeights(matrix(2 * width, hidden), matrix(hidden, width))

    ffn: DenseWeights | MoeWeights
    if config.is_moe(layer):
        count, width = config.experts, config.expert_ffn
        ffn = MoeWeights(
            experts=ExpertWeights(
                router=matrix(count, hidden),
                correction=0.05 * uniform(count),
                gate_up=matrix(count, 2 * width, hidden),
                down=matrix(count, hidden, width),
            ),
            shared=dense(config.shared_experts * width) if config.shared_experts else None,
        )
    else:
        ffn = dense(config.dense_ffn)
    return LayerWeights(gain(hidden), mixer, gain(hidden), ffn)
