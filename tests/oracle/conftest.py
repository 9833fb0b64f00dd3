"""The oracle: transformers' own Kimi Linear in torch, in an environment without fla."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def make_oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Returns a function (layers, mla_every) -> (directory, transformers model in fp32)."""
    transformers = pytest.importorskip("transformers", reason="make test-oracle installs it")
    torch = pytest.importorskip("torch")
    made: dict = {}

    def make(layers: int, mla_every: int, **changes: object) -> tuple[Path, object]:
        key = (layers, mla_every, tuple(sorted(changes.items())))
        if key not in made:
            numbers = range(1, layers + 1)
            full = [i for i in numbers if i % mla_every == 0 or i == layers]
            config = transformers.KimiLinearConfig(
                **{
                    "vocab_size": 96,
                    "hidden_size": 48,
                    "intermediate_size": 64,
                    "moe_intermediate_size": 16,
                    "num_hidden_layers": layers,
                    "num_attention_heads": 3,
                    "num_key_value_heads": 3,
                    "kv_lora_rank": 24,
                    "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16,
                    "v_head_dim": 12,
                    "num_local_experts": 8,
                    "num_experts_per_tok": 2,
                    "linear_attn_config": {
                        "head_dim": 16,
                        "num_heads": 2,
                        "short_conv_kernel_size": 4,
                        "full_attn_layers": full,
                        "kda_layers": [i for i in numbers if i not in full],
                    },
                    "first_k_dense_replace": 1,
                    "pad_token_id": 0,
                    # Large enough that every part of the model shows in the logits (about 3), and
                    # small enough that the oracle's log(1 + exp(x)), exact to 1e-4 for the decays
                    # of a fresh model, is not amplified beyond the tolerance.
                    "initializer_range": 0.1,
                    **changes,
                }
            )
            torch.manual_seed(7)
            model = transformers.KimiLinearForCausalLM(config).eval()
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    if "norm" in name:
                        tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
                    if "correction_bias" in name:
                        tensor.copy_(0.1 * torch.randn_like(tensor))
            directory = tmp_path_factory.mktemp(f"kimi-{layers}-{mla_every}")
            model.save_pretrained(directory)
            made[key] = directory, model
        return made[key]

    return make
