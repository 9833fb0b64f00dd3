"""`python -m engine.bench`: how fast the engine is on this CPU, against what it replaces."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.bench.cases import KDA_SHAPES, KdaShape, Sequences, per_token_loop
from engine.bench.stages import stage_seconds
from engine.bench.timing import Timing, in_turns, settle_allocator
from engine.measuring import measure_ceilings
from engine.model.config import InputError, shape
from engine.model.model import Model
from engine.model.weights import random_weights
from engine.ops.kda_chunked import kda_chunked

_EXAMPLES = """
examples:
  python -m engine.bench                      # own figures, and peers where .venv-* are installed
  python -m engine.bench --shape bench        # the shape of the paced benchmark
  python -m engine.bench --json > bench.json
"""

_DECODE_BATCHES = (1, 8, 32)
_CONTEXT = 430


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="small", help="model shape of the stage figures")
    parser.add_argument("--tokens", type=int, default=2048, help="prompt length, tokens")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--fla-python",
        type=Path,
        default=Path(".venv-kernels/bin/python"),
        help="interpreter with fla-core (make test-kernels creates the default)",
    )
    parser.add_argument(
        "--transformers-python",
        type=Path,
        default=Path(".venv-oracle/bin/python"),
        help="interpreter with transformers (make test-oracle creates the default)",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settle_allocator()
    try:
        figures = measure(options.shape, options.tokens)
    except InputError as error:
        print(f"engine.bench: {error}", file=sys.stderr)
        return error.exit_code
    figures["peers"] = {
        "fla": _peer(options.fla_python, "fla"),
        "transformers": _peer(options.transformers_python, "transformers"),
    }
    print(json.dumps(figures, indent=2) if options.json else as_text(figures))
    return 0


def measure(
    name: str,
    tokens: int,
    seconds: float = 2.0,
    kda_shapes: Mapping[str, KdaShape] = KDA_SHAPES,
) -> dict[str, Any]:
    """Figures of this environment: the KDA operator, and the model `name` by stage. Each figure is
    the best of the runs that fit into about `seconds`."""
    ceiling = measure_ceilings(torch.device("cpu"), torch.float32, 1024, 1 << 24).flops_per_s
    kda = {label: _kda(size, ceiling, seconds) for label, size in kda_shapes.items()}
    config = shape(name)
    weights = random_weights(config, seed=0)
    model = Model(config, weights)
    prompt = Sequences(config, 1, tokens)
    pieces = [prompt.prompt(0, tokens)]
    batch = prompt.build(pieces)
    prefill = in_turns({"prefill": lambda: model.forward(batch, prompt.storage)}, seconds)[
        "prefill"
    ]
    decode: dict[str, float] = {}
    for size in _DECODE_BATCHES:
        sequences = Sequences(config, size, _CONTEXT + 1)
        held = [sequences.prompt(i, _CONTEXT) for i in range(size)]
        model.forward(sequences.build(held), sequences.storage)
        step = sequences.build(sequences.decode_step(_CONTEXT))
        timing = in_turns({"step": partial(model.forward, step, sequences.storage)}, seconds / 4)[
            "step"
        ]
        decode[str(size)] = timing.best_s * 1e3
        if size == 8:
            decode_stages = stage_seconds(
                config, weights, sequences, sequences.decode_step(_CONTEXT), 20
            )
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "product_gflops": ceiling / 1e9,
        "kda": kda,
        "model": {
            "shape": name,
            "prefill_tokens": tokens,
            "prefill_tokens_per_s": tokens / prefill.best_s,
            "prefill_gflops": config.prefill_flops(tokens) / prefill.best_s / 1e9,
            "prefill_stages_ms": _ms(stage_seconds(config, weights, prompt, pieces)),
            "decode_context": _CONTEXT,
            "decode_step_ms_by_batch": decode,
            "decode_8_stages_ms": _ms(decode_stages),
        },
    }


@torch.inference_mode()
def _kda(size: KdaShape, ceiling: float, seconds: float) -> dict[str, Any]:
    """The operator and a loop over tokens. `ceiling` in FLOP/s."""
    x, state = size.inputs(), size.state()
    timings = in_turns(
        {
            "chunked": lambda: kda_chunked(*x, state, [size.tokens]),
            "loop": lambda: per_token_loop(*x, state[0]),
        },
        seconds,
    )
    chunked, loop = timings["chunked"], timings["loop"]
    flops_per_s = size.chunked_flops() / chunked.best_s
    return {
        **asdict(size),
        "chunked_tokens_per_s": size.tokens / chunked.best_s,
        "chunked_gflops": flops_per_s / 1e9,
        "of_product": flops_per_s / ceiling,
        "loop_tokens_per_s": size.tokens / loop.best_s,
        "ratio_to_loop": chunked.ratio_to(loop),
    }


def _peer(python: Path, name: str) -> dict[str, Any] | None:
    """Timings of `engine.bench.peers` under another interpreter; None where it is not installed."""
    if not python.exists():
        return None
    done = subprocess.run(
        [str(python), "-m", "engine.bench.peers", name],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"engine.bench: {python} {name} failed: {last}", file=sys.stderr)
        return None
    timings = {k: Timing(**v) for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
    pairs = {
        "fla": {
            label: (f"{label} kda_chunked", f"{label} fla_naive_chunk") for label in KDA_SHAPES
        },
        "transformers": {
            "prefill_ratio": ("prefill", "transformers_prefill"),
            "decode_8_ratio": ("decode", "transformers_decode"),
        },
    }[name]
    return {
        **{key: timings[ours].ratio_to(timings[theirs]) for key, (ours, theirs) in pairs.items()},
        "by_medians": {
            key: timings[ours].median_ratio_to(timings[theirs])
            for key, (ours, theirs) in pairs.items()
        },
        "best_ms": {key: timing.best_s * 1e3 for key, timing in timings.items()},
    }


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value * 1e3 for name, value in seconds.items()}


def as_text(figures: dict[str, Any]) -> str:
    """The report that a person reads."""
    kda, model, peers = figures["kda"], figures["model"], figures["peers"]
    lines = [
        f"torch {figures['torch']}, {figures['threads']} thread(s); best of several runs; "
        f"a product of 1024 x 1024 matrices: {figures['product_gflops']:.0f} GFLOP/s",
    ]
    for label, size in kda.items():
        lines += [
            "",
            f"KDA operator, {size['tokens']} tokens, {size['heads']} heads of {size['dim']} "
            f"({label})",
            f"  chunked          {size['chunked_tokens_per_s']:>12,.0f} tokens/s, "
            f"{size['chunked_gflops']:.0f} GFLOP/s in its products ({size['of_product']:.0%})",
            f"  per-token loop   {size['loop_tokens_per_s']:>12,.0f} tokens/s"
            f"   ratio {size['ratio_to_loop']:.1f} (target 4)",
        ]
        if peers["fla"]:
            best, median = peers["fla"][label], peers["fla"]["by_medians"][label]
            lines.append(
                f"  fla naive chunk                           ratio {best:.1f}, "
                f"by medians {median:.1f} (target 20)"
            )
    if not peers["fla"]:
        lines.append("  fla naive chunk: not installed (make test-kernels)")
    lines += [
        "",
        f"model {model['shape']}",
        f"  prefill {model['prefill_tokens']} tokens {model['prefill_tokens_per_s']:>12,.0f} "
        f"tokens/s, {model['prefill_gflops']:.1f} GFLOP/s",
        f"    {_stages(model['prefill_stages_ms'])}",
        f"  decode at {model['decode_context']} tokens of context, ms by batch: "
        + ", ".join(f"{b}: {ms:.2f}" for b, ms in model["decode_step_ms_by_batch"].items()),
        f"    batch 8: {_stages(model['decode_8_stages_ms'])}",
        "",
    ]
    if peers["transformers"]:
        p = peers["transformers"]
        lines += [
            "against transformers' torch path, equal weights",
            f"  prefill           ratio {p['prefill_ratio']:.1f} (target 3)",
            f"  decode, batch 8   ratio {p['decode_8_ratio']:.1f} (target 2)",
        ]
    else:
        lines.append("against transformers: not installed (make test-oracle)")
    return "\n".join(lines)


def _stages(stages: dict[str, float]) -> str:
    total = stages["total"]
    parts = sorted(((ms, n) for n, ms in stages.items() if n != "total"), reverse=True)
    return ", ".join(f"{n} {ms:.2f} ms ({ms / total:.0%})" for ms, n in parts)


if __name__ == "__main__":
    sys.exit(main())
