"""Checkpoint directories written here by hand: what is wrong with one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.model.checkpoint import load_checkpoint
from engine.model.config import InputError

CONFIG = {
    "model_type": "kimi_linear",
    "hidden_act": "silu",
    "hidden_size": 24,
    "vocab_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "intermediate_size": 16,
    "moe_intermediate_size": 12,
    "num_experts": 3,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "moe_renormalize": True,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": None,
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    },
}


def tensors() -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32, 24),
        "lm_head.weight": (32, 24),
        "model.norm.weight": (24,),
    }
    for layer in range(4):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (24,)}
        shapes |= {f"{at}.post_attention_layernorm.weight": (24,)}
        mixer = f"{at}.self_attn"
        if layer == 3:
            shapes |= {
                f"{mixer}.q_proj.weight": (20, 24),
                f"{mixer}.kv_a_proj_with_mqa.weight": (12, 24),
                f"{mixer}.kv_a_layernorm.weight": (8,),
                f"{mixer}.kv_b_proj.weight": (22, 8),
                f"{mixer}.o_proj.weight": (24, 10),
            }
        else:
            shapes |= {f"{mixer}.{x}_proj.weight": (16, 24) for x in "qkv"}
            shapes |= {f"{mixer}.{x}_conv1d.weight": (16, 1, 4) for x in "qkv"}
            shapes |= {f"{mixer}.{x}_a_proj.weight": (8, 24) for x in "fg"}
            shapes |= {f"{mixer}.{x}_b_proj.weight": (16, 8) for x in "fg"}
            shapes |= {
                f"{mixer}.b_proj.weight": (2, 24),
                f"{mixer}.A_log": (1, 1, 2, 1),
                f"{mixer}.dt_bias": (16,),
                f"{mixer}.o_norm.weight": (8,),
                f"{mixer}.o_proj.weight": (24, 16),
            }
        block = f"{at}.mlp" if layer == 0 else f"{at}.block_sparse_moe.shared_experts"
        width = 16 if layer == 0 else 12
        shapes |= {f"{block}.{x}_proj.weight": (width, 24) for x in ("gate", "up")}
        shapes |= {f"{block}.down_proj.weight": (24, width)}
        if layer:
            moe = f"{at}.block_sparse_moe"
            shapes |= {f"{moe}.gate.weight": (3, 24), f"{moe}.gate.e_score_correction_bias": (3,)}
            for e in range(3):
                shapes |= {f"{moe}.experts.{e}.{w}.weight": (12, 24) for w in ("w1", "w3")}
                shapes |= {f"{moe}.experts.{e}.w2.weight": (24, 12)}
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write(directory: Path, held: dict[str, torch.Tensor], **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(held, directory / "model.safetensors")
    return directory


def test_projections_are_stacked_in_the_order_the_model_splits(tmp_path: Path):
    held = tensors()
    config, weights = load_checkpoint(write(tmp_path, held))
    assert (config.mla_every, config.experts, config.layers) == (4, 3, 4)
    mixer = weights.layers[1].mixer
    at = "model.layers.1.self_attn"
    names = ["q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj"]
    rows = torch.cat([held[f"{at}.{name}.weight"] for name in names])
    assert torch.equal(mixer.project, rows)
    assert torch.equal(mixer.conv[:, 16:32].t(), held[f"{at}.k_conv1d.weight"].squeeze(1))
    assert torch.equal(mixer.a_log, held[f"{at}.A_log"].flatten())
    latent = weights.layers[3].mixer
    up = held["model.layers.3.self_attn.kv_b_proj.weight"].view(2, 11, 8)
    assert torch.equal(latent.up_key, up[:, :6])
    assert torch.equal(latent.up_value, up[:, 6:])
    expert = held["model.layers.2.block_sparse_moe.experts.1.w3.weight"]
    assert torch.equal(weights.layers[2].ffn.experts.gate_up[1, 12:], expert)


def test_shards_are_read_through_their_index(tmp_path: Path):
    held = tensors()
    names = sorted(held)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: held[n] for n in names if files[n] == file}, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    _, weights = load_checkpoint(tmp_path)
    assert torch.equal(weights.head, held["lm_head.weight"])
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(InputError, match=r"part-1\.safetensors: cannot be read"):
        load_checkpoint(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "part-1.safetensors")
    with pytest.raises(InputError, match=r"part-1\.safetensors: tensor model\..* is missing"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", sorted(tensors())[::9])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str):
    held = tensors()
    del held[name]
    with pytest.raises(InputError, match=f"tensor {name} is missing"):
        load_checkpoint(write(tmp_path, held))


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path):
    held = tensors()
    held["model.layers.2.self_attn.v_proj.weight"] = torch.zeros(24, 16)
    with pytest.raises(
        InputError, match=r"layers\.2\.self_attn\.v_proj\.weight has shape \[24, 16\], must be \[16"
    ):
        load_checkpoint(write(tmp_path, held))


def test_a_tensor_too_many_is_named(tmp_path: Path):
    held = tensors() | {"model.layers.4.input_layernorm.weight": torch.zeros(24)}
    with pytest.raises(InputError, match=r"tensor model\.layers\.4\.input_layernorm\.weight bel"):
        load_checkpoint(write(tmp_path, held))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', supported is 'kimi_linear'"),
        ({"q_lora_rank": 64}, "q_lora_rank is 64, supported is None"),
        ({"num_expert_group": 4}, "num_expert_group is 4, supported is 1"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', must be a number"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, must be 2"),
        ({"linear_attn_config": None}, "linear_attn_config is missing"),
        (
            {"linear_attn_config": {**CONFIG["linear_attn_config"], "full_attn_layers": [2]}},
            r"full_attn_layers is \[2\], must be every n-th layer of 4 and the last",
        ),
    ],
)
def test_an_unsupported_setting_is_named(tmp_path: Path, changes: dict, message: str):
    with pytest.raises(InputError, match=rf"config\.json: .*{message}"):
        load_checkpoint(write(tmp_path, tensors(), **changes))


def test_a_directory_without_a_checkpoint_is_one_clear_line(tmp_path: Path):
    with pytest.raises(InputError, match=r"config\.json: cannot be read as JSON"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read as safetensors"):
        load_checkpoint(tmp_path)
