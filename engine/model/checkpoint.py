"""Read a Hugging Face Kimi Linear checkpoint directory (config.json and safetensors)."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import InputError, ModelConfig
from engine.model.weights import (
    DenseWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    ModelWeights,
    MoeWeights,
)
from engine.ops.moe import ExpertWeights

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_checkpoint(
    path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, ModelWeights]:
    """Shape and weights of the checkpoint in `path`.

    Raises InputError that names the file and the field or tensor where the directory is not a
    Kimi Linear checkpoint, a tensor is missing, has another shape, or belongs to no part of it.
    """
    directory = Path(path)
    config = read_config(directory / "config.json")
    source = _Tensors(directory)
    weights = ModelWeights(
        embed=source.take("model.embed_tokens.weight", config.vocab, config.hidden),
        layers=tuple(_layer(source, config, layer) for layer in range(config.layers)),
        norm=source.take("model.norm.weight", config.hidden),
        head=source.take("lm_head.weight", config.vocab, config.hidden),
    )
    source.refuse_rest()
    return config, weights.to(device, dtype)


# --- config.json ------------------------------------------------------------------------------

_FIXED: dict[str, tuple[object, ...]] = {
    "model_type": ("kimi_linear",),
    "hidden_act": ("silu",),
    "q_lora_rank": (None,),
    "attention_bias": (False, None),
    "tie_word_embeddings": (False, None),
    "num_expert_group": (1, None),
    "moe_router_activation_func": ("sigmoid", None),
    "mla_use_nope": (True, None),
}
"""Settings with one supported value (None where the key may be absent)."""


def read_config(path: Path) -> ModelConfig:
    """The shape that a `config.json` describes. Raises InputError that names the field."""
    fields = _read_json(path)

    def need(key: str, where: dict[str, Any] = fields, prefix: str = "") -> int:
        value = where.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{path}: {prefix}{key} is {value!r}, must be a number")
        return int(value)

    for key, allowed in _FIXED.items():
        if fields.get(key) not in allowed:
            raise InputError(f"{path}: {key} is {fields.get(key)!r}, supported is {allowed[0]!r}")
    linear = fields.get("linear_attn_config")
    if not isinstance(linear, dict):
        raise InputError(f"{path}: linear_attn_config is missing")
    heads = need("num_attention_heads")
    if fields.get("num_key_value_heads") not in (heads, None):
        raise InputError(
            f"{path}: num_key_value_heads is {fields['num_key_value_heads']}, must be {heads}"
        )
    layers = need("num_hidden_layers")
    head_dim = need("head_dim", linear, "linear_attn_config.")
    experts = fields.get("num_experts") or 0
    return ModelConfig(
        name=path.parent.name,
        hidden=need("hidden_size"),
        layers=layers,
        vocab=need("vocab_size"),
        kda_heads=need("num_heads", linear, "linear_attn_config."),
        d_k=head_dim,
        d_v=head_dim,
        conv_width=need("short_conv_kernel_size", linear, "linear_attn_config."),
        mla_heads=heads,
        kv_lora_rank=need("kv_lora_rank"),
        nope_dim=need("qk_nope_head_dim"),
        rope_dim=need("qk_rope_head_dim"),
        v_dim=need("v_head_dim"),
        mla_every=_mla_every(path, linear.get("full_attn_layers"), layers),
        dense_ffn=need("intermediate_size"),
        experts=experts,
        experts_per_token=need("num_experts_per_token") if experts else 0,
        expert_ffn=need("moe_intermediate_size") if experts else 0,
        shared_experts=(fields.get("num_shared_experts") or 0) if experts else 0,
        dense_layers=need("first_k_dense_replace") if experts else layers,
        routed_scale=float(fields.get("routed_scaling_factor", 1.0)),
        renormalize=bool(fields.get("moe_renormalize", True)),
        norm_eps=float(fields.get("rms_norm_eps", 1e-5)),
    )


def _mla_every(path: Path, listed: object, layers: int) -> int:
    """The n of "every n-th layer and the last" that gives the listed layers (from 1)."""
    for n in range(1, layers + 1):
        if listed == [i for i in range(1, layers + 1) if i % n == 0 or i == layers]:
            return n
    raise InputError(
        f"{path}: linear_attn_config.full_attn_layers is {listed}, must be every n-th layer of "
        f"{layers} and the last"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object")
    return value


# --- tensors ----------------------------------------------------------------------------------


class _Tensors:
    """Tensors of a checkpoint by name, from one file or from the shards that an index lists."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        index = directory / _INDEX
        if index.exists():
            self._file_of = dict(_read_json(index).get("weight_map", {}))
        else:
            with self._open(_SINGLE) as file:
                self._file_of = dict.fromkeys(file.keys(), _SINGLE)
        self._left = set(self._file_of)

    def _open(self, name: str) -> Any:
        path = self._directory / name
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: cannot be read as safetensors ({error})") from None

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name, checked to have `shape` up to dimensions of size one."""
        if name not in self._file_of:
            raise InputError(f"{self._directory}: tensor {name} is missing")
        with self._open(self._file_of[name]) as file:
            tensor: Tensor | None = None
            with suppress(SafetensorError):
                tensor = file.get_tensor(name)
        if tensor is None:
            raise InputError(f"{self._directory / self._file_of[name]}: tensor {name} is missing")
        if [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
            raise InputError(
                f"{self._directory}: tensor {name} has shape {list(tensor.shape)}, "
                f"must be {list(shape)}"
            )
        self._left.discard(name)
        return tensor.reshape(shape)

    def refuse_rest(self) -> None:
        if self._left:
            raise InputError(
                f"{self._directory}: tensor {min(self._left)} belongs to no part of the model that "
                "config.json describes"
            )


def _layer(source: _Tensors, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    mixer = _mla if config.is_mla(layer) else _kda
    return LayerWeights(
        mixer_norm=source.take(f"{prefix}.input_layernorm.weight", config.hidden),
        mixer=mixer(source, config, f"{prefix}.self_attn"),
        ffn_norm=source.take(f"{prefix}.post_attention_layernorm.weight", config.hidden),
        ffn=(
            _moe(source, config, f"{prefix}.block_sparse_moe")
            if config.is_moe(layer)
            else _dense(source, config.hidden, config.dense_ffn, _dense_prefix(source, prefix))
        ),
    )


def _dense_prefix(source: _Tensors, prefix: str) -> str:
    """Published checkpoints call a dense block `mlp`; transformers saves it under the name of the
    routed ones."""
    saved = f"{prefix}.block_sparse_moe"
    return saved if f"{saved}.gate_proj.weight" in source else f"{prefix}.mlp"


def _kda(source: _Tensors, config: ModelConfig, at: str) -> KdaWeights:
    hidden, heads, rank = config.hidden, config.kda_heads, config.low_rank
    keys, values = heads * config.d_k, heads * config.d_v
    rows = {
        "q_proj": keys,
        "k_proj": keys,
        "v_proj": values,
        "f_a_proj": rank,
        "g_a_proj": rank,
        "b_proj": heads,
    }
    streams = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
    taps = config.conv_width
    return KdaWeights(
        project=torch.cat([source.take(f"{at}.{n}.weight", r, hidden) for n, r in rows.items()]),
        conv=torch.cat([source.take(f"{at}.{n}.weight", c, taps) for n, c in streams.items()])
        .t()
        .contiguous(),
        decay_up=source.take(f"{at}.f_b_proj.weight", keys, rank),
        gate_up=source.take(f"{at}.g_b_proj.weight", values, rank),
        a_log=source.take(f"{at}.A_log", heads),
        dt_bias=source.take(f"{at}.dt_bias", keys).view(heads, config.d_k),
        norm=source.take(f"{at}.o_norm.weight", config.d_v),
        out=source.take(f"{at}.o_proj.weight", hidden, values),
    )


def _mla(source: _Tensors, config: ModelConfig, at: str) -> MlaWeights:
    hidden, heads, rank = config.hidden, config.mla_heads, config.kv_lora_rank
    up = source.take(f"{at}.kv_b_proj.weight", heads * (config.nope_dim + config.v_dim), rank)
    up_key, up_value = up.view(heads, -1, rank).split([config.nope_dim, config.v_dim], 1)
    return MlaWeights(
        project=torch.cat(
            [
                source.take(f"{at}.q_proj.weight", heads * config.qk_dim, hidden),
                source.take(f"{at}.kv_a_proj_with_mqa.weight", config.latent_dim, hidden),
            ]
        ),
        norm=source.take(f"{at}.kv_a_layernorm.weight", rank),
        up_key=up_key.contiguous(),
        up_value=up_value.contiguous(),
        out=source.take(f"{at}.o_proj.weight", hidden, heads * config.v_dim),
    )


def _dense(source: _Tensors, hidden: int, width: int, at: str) -> DenseWeights:
    gate = source.take(f"{at}.gate_proj.weight", width, hidden)
    up = source.take(f"{at}.up_proj.weight", width, hidden)
    return DenseWeights(
        gate_up=torch.cat([gate, up]), down=source.take(f"{at}.down_proj.weight", hidden, width)
    )


def _moe(source: _Tensors, config: ModelConfig, at: str) -> MoeWeights:
    hidden, width, count = config.hidden, config.expert_ffn, config.experts
    gate_up, down = [], []
    for expert in range(count):
        name = f"{at}.experts.{expert}"
        gate = source.take(f"{name}.w1.weight", width, hidden)
        up = source.take(f"{name}.w3.weight", width, hidden)
        gate_up.append(torch.cat([gate, up]))
        down.append(source.take(f"{name}.w2.weight", hidden, width))
    shared = None
    if config.shared_experts:
        shared = _dense(source, hidden, config.shared_experts * width, f"{at}.shared_experts")
    return MoeWeights(
        experts=ExpertWeights(
            router=source.take(f"{at}.gate.weight", count, hidden),
            correction=source.take(f"{at}.gate.e_score_correction_bias", count),
            gate_up=torch.stack(gate_up),
            down=torch.stack(down),
        ),
        shared=shared,
    )
