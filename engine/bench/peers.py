"""Comparisons that need another environment, each run by that environment's interpreter.

    .venv-kernels/bin/python -m engine.bench.peers fla
    .venv-oracle/bin/python -m engine.bench.peers transformers

Prints one JSON object of timings; `python -m engine.bench` starts both where it finds them. The two
sides of a comparison run in turns in the same process, on one thread, at equal weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.bench.cases import KDA_SHAPES, KdaShape, Sequences
from engine.bench.timing import Timing, in_turns, settle_allocator
from engine.model.checkpoint import load_checkpoint
from engine.model.model import Model
from engine.ops.kda_chunked import kda_chunked

PREFILL_TOKENS, DECODE_BATCH, DECODE_CONTEXT = 1024, 8, 256


def fla() -> dict[str, Timing]:
    """The chunked operator against fla's own torch chunk code, by name of the shape."""
    return {
        f"{name} {side}": timing
        for name, size in KDA_SHAPES.items()
        for side, timing in _fla(size).items()
    }


@torch.inference_mode()
def _fla(size: KdaShape) -> dict[str, Timing]:
    from fla.ops.kda.naive import naive_chunk_kda

    x, state = size.inputs(), size.state()
    q, *rest = (part.unsqueeze(0) for part in x)
    ours, _, _ = kda_chunked(*x, state, [size.tokens])
    theirs, _ = naive_chunk_kda(q, *rest, scale=1.0, output_final_state=True)
    assert (ours - theirs[0]).abs().max() < 1e-4
    return in_turns(
        {
            "kda_chunked": lambda: kda_chunked(*x, state, [size.tokens]),
            "fla_naive_chunk": lambda: naive_chunk_kda(
                q, *rest, scale=1.0, output_final_state=True
            ),
        },
        seconds=4.0,
    )


def transformers() -> dict[str, Timing]:
    """Whole model against transformers' torch path: 4 layers, hidden 128, 2 heads of 32."""
    import transformers as peer

    settings: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "pad_token_id": 0,
        "linear_attn_config": {
            "head_dim": 32,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
        },
    }
    torch.manual_seed(0)
    theirs = peer.KimiLinearForCausalLM(peer.KimiLinearConfig(**settings)).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(Path(directory))
        config, weights = load_checkpoint(directory)
    ours = Model(config, weights)

    prompt = Sequences(config, 1, PREFILL_TOKENS)
    piece = prompt.prompt(0, PREFILL_TOKENS)
    ids = torch.tensor([piece.tokens])
    batch = prompt.build([piece])

    decode = Sequences(config, DECODE_BATCH, 2 * DECODE_CONTEXT)
    held = [decode.prompt(i, DECODE_CONTEXT) for i in range(DECODE_BATCH)]
    ours.forward(decode.build(held), decode.storage)
    step = decode.build(decode.decode_step(DECODE_CONTEXT))
    with torch.inference_mode():
        logits = theirs(ids, logits_to_keep=1).logits[0]
        assert (ours.forward(batch, prompt.storage) - logits).abs().max() < 1e-4
        cache = theirs(torch.tensor([p.tokens for p in held]), use_cache=True).cache
        following = torch.full((DECODE_BATCH, 1), 7)
        # Each step of theirs appends to its cache; few steps keep the contexts comparable.
        return in_turns(
            {
                "prefill": lambda: ours.forward(batch, prompt.storage),
                "transformers_prefill": lambda: theirs(ids, logits_to_keep=1),
            }
        ) | in_turns(
            {
                "decode": lambda: ours.forward(step, decode.storage),
                "transformers_decode": lambda: theirs(following, cache=cache, use_cache=True),
            },
            seconds=0.5,
            least_runs=10,
            turn_s=0.02,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    settle_allocator()
    measured = {"fla": fla, "transformers": transformers}[sys.argv[1]]()
    print(json.dumps({name: asdict(timing) for name, timing in measured.items()}))
