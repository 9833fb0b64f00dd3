"""`python -m engine.bench.gpu`: kernels and model on CUDA, against this card's ceilings.

Every figure is achieved work or traffic by the formulas of `engine.model.config`, as a share of a
large matrix product and a large copy timed in the same run. A part that fails is reported with its
error and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from engine.bench.cases import PAGE_TOKENS, Sequences
from engine.measuring import Ceilings, Repeats, measure_ceilings, seconds_per_call
from engine.model.batch import Piece
from engine.model.config import ModelConfig, shape
from engine.model.decode_graph import DecodeGraph
from engine.model.model import Model
from engine.model.weights import random_weights
from engine.ops.kda_inputs import KdaInputs
from engine.ops.pack import pack, unpack


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. `kernel` gives heads and dimensions of the single operators, `model` the
    whole passes."""

    kernel: ModelConfig
    model: ModelConfig
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    product_width: int
    copy_bytes: int
    repeats: Repeats = field(default_factory=Repeats)


CARD = Sizes(
    # One KDA and one MLA layer of the 1T model; the feed-forward is not used.
    kernel=replace(shape("paper-1t"), layers=2, mla_every=2, experts=0, dense_ffn=128, vocab=64),
    # The 48B model's layers, few enough and with few enough experts to draw in seconds.
    model=replace(shape("kimi-linear-48b"), layers=8, experts=32, vocab=32_768),
    prompts=(1024, 8192, 16_384),
    batches=(1, 8, 32, 64),
    context=8192,
    product_width=8192,
    copy_bytes=2 * 2**30,
)
"""Fits a card of 80 GB; under 8 minutes, most of it compiling kernels."""

INTERPRETER = Sizes(
    kernel=replace(shape("tiny"), layers=2, mla_every=2, experts=0),
    model=shape("tiny"),
    prompts=(20,),
    batches=(2,),
    context=20,
    product_width=64,
    copy_bytes=2**16,
    repeats=Repeats(warm_ups=0, runs=1, seconds=0.0),
)
"""Small enough for Triton's interpreter: shows that every part runs, its times mean nothing."""


class Bench:
    """Measures part by part. `device` may be the CPU under Triton's interpreter."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        # Imported late: both need triton and fla-core (extra `gpu`).
        from engine.ops.cuda_backend import CudaOperators

        self._operators = CudaOperators()
        self._sizes = sizes
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._cache_dtype = "bfloat16" if device.type == "cuda" else "float32"
        self._ceilings = Ceilings(0.0, 0.0)

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {
            "ceilings": self.ceilings,
            "kda_prefill": self.kda_prefill,
            "kda_decode": self.kda_decode,
            "mla_prefill": self.mla_prefill,
            "mla_decode": self.mla_decode,
            "pack": self.pack,
            "model_prefill": self.model_prefill,
            "model_decode": self.model_decode,
        }

    def ceilings(self) -> dict[str, Any]:
        s = self._sizes
        self._ceilings = measure_ceilings(
            self._device, self._dtype, s.product_width, s.copy_bytes, s.repeats
        )
        return {
            "tflops": self._ceilings.flops_per_s / 1e12,
            "tb_per_s": self._ceilings.bytes_per_s / 1e12,
        }

    # --- operators ----------------------------------------------------------------------------

    def kda_prefill(self) -> dict[str, Any]:
        """Our slot-based operator, and fla's chunk kernel called directly on the same inputs."""
        from fla.ops.kda import chunk_kda

        c, out = self._sizes.kernel, {}
        for tokens in self._sizes.prompts:
            x = self._kda_inputs(tokens)
            sequences = self._sequences(c, 1, tokens)
            rows = sequences.build([sequences.prompt(0, tokens)]).prefill
            assert rows is not None
            state = sequences.storage.state[0]
            direct = [t.unsqueeze(0).contiguous() for t in (x.q, x.k, x.v, x.decay, x.beta)]
            fla = partial(
                chunk_kda,
                *direct,
                A_log=x.a_log,
                dt_bias=x.dt_bias.reshape(-1),
                initial_state=state[1:2].clone(),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                state_v_first=True,
            )
            ours_s = self._time(partial(self._operators.kda_prefill, x, state, rows))
            fla_s = self._time(torch.inference_mode()(fla))
            flops = 7 * c.kda_heads * c.d_k * c.d_v * tokens
            out[str(tokens)] = {
                **self._work(ours_s, flops=flops),
                "fla_direct_ms": fla_s * 1e3,
                "ratio_to_fla": fla_s / ours_s,
            }
        return out

    def kda_decode(self) -> dict[str, Any]:
        """Reads and writes every row's state once: put against the memory ceiling."""
        c, out = self._sizes.kernel, {}
        for batch in self._sizes.batches:
            sequences = self._sequences(c, batch, PAGE_TOKENS)
            rows = sequences.build(sequences.decode_step(1)).decode
            assert rows is not None
            x, state = self._kda_inputs(batch), sequences.storage.state[0]
            took = self._time(partial(self._operators.kda_decode, x, state, rows))
            out[str(batch)] = self._work(took, moved=2 * batch * c.kda_state_bytes())
        return out

    def mla_prefill(self) -> dict[str, Any]:
        c, out = self._sizes.kernel, {}
        layer = c.mla_layers[0]
        for tokens in self._sizes.prompts:
            sequences = self._sequences(c, 1, tokens)
            rows = sequences.build([sequences.prompt(0, tokens)]).prefill
            assert rows is not None
            q, w_uk, w_uv = self._mla_inputs(tokens)
            latents = sequences.storage.latents[layer]
            took = self._time(partial(self._operators.mla_prefill, q, latents, w_uk, w_uv, rows))
            pairs = tokens * (tokens + 1) / 2
            expand = 2 * c.mla_heads * c.kv_lora_rank * (c.nope_dim + c.v_dim) * tokens
            flops = 2 * c.mla_heads * (c.qk_dim + c.v_dim) * pairs + expand
            out[str(tokens)] = self._work(took, flops=flops)
        return out

    def mla_decode(self) -> dict[str, Any]:
        """Own Triton kernel against the same attention in torch; traffic is one read of the
        latents."""
        from engine.ops.mla import mla_decode as torch_mla_decode

        c, context, out = self._sizes.kernel, self._sizes.context, {}
        layer = c.mla_layers[0]
        for batch in self._sizes.batches:
            sequences = self._sequences(c, batch, context + 1)
            sequences.storage.latents[layer].normal_()
            rows = sequences.build(sequences.decode_step(context)).decode
            assert rows is not None
            q, w_uk, w_uv = self._mla_inputs(batch)
            call = (q, sequences.storage.latents[layer], w_uk, w_uv, rows)
            took = self._time(partial(self._operators.mla_decode, *call))
            torch_s = self._time(partial(torch_mla_decode, *call))
            row_bytes = c.latent_dim * q.element_size()
            absorb = 2 * c.mla_heads * c.kv_lora_rank * (c.nope_dim + c.v_dim)
            pairs = 2 * c.mla_heads * (c.latent_dim + c.kv_lora_rank) * (context + 1)
            out[str(batch)] = {
                **self._work(
                    took,
                    flops=batch * (pairs + absorb),
                    moved=batch * (context + 1) * row_bytes,
                ),
                "ratio_to_torch": torch_s / took,
            }
        return out

    def pack(self) -> dict[str, Any]:
        """One request, layer by layer, into wire buffers and back, its pages in reverse order."""
        c, tokens = self._sizes.kernel, self._sizes.context
        sequences = self._sequences(c, 1, tokens)
        storage, table = sequences.storage, sequences.pages(0)[::-1]
        out = {}
        for layer, name in ((c.mla_layers[0], "pages"), (c.kda_layers[0], "state")):
            wire = pack(storage, layer, table, 1, tokens)
            pack_s = self._time(partial(pack, storage, layer, table, 1, tokens))
            unpack_s = self._time(partial(unpack, storage, layer, table, 1, tokens, wire))
            moved = 2 * wire.numel()
            out[name] = {
                "pack": self._work(pack_s, moved=moved),
                "unpack": self._work(unpack_s, moved=moved),
            }
        return out

    # --- model --------------------------------------------------------------------------------

    def model_prefill(self) -> dict[str, Any]:
        c, out = self._sizes.model, {}
        model = self._model
        for tokens in self._sizes.prompts:
            sequences = self._sequences(c, 1, tokens)
            batch = sequences.build([sequences.prompt(0, tokens)])
            took = self._time(partial(model.forward, batch, sequences.storage))
            out[str(tokens)] = {
                "tokens_per_s": tokens / took,
                **self._work(took, flops=c.prefill_flops(tokens)),
            }
        return out

    def model_decode(self) -> dict[str, Any]:
        """A step with everything launched one by one, and replayed as a graph (CUDA only)."""
        c, context, out = self._sizes.model, self._sizes.context, {}
        model = self._model
        for size in self._sizes.batches:
            sequences = self._sequences(c, size, context + 1)
            pieces = sequences.decode_step(context)
            took = self._time(partial(_eager_step, model, sequences, pieces))
            figures = self._work(took, moved=c.decode_bytes(size, context, self._cache_dtype))
            if self._device.type == "cuda":
                graph = DecodeGraph(
                    model, sequences.storage, len(sequences.pages(0)), sizes=(size,)
                )
                expected = model.forward(sequences.build(pieces), self._clone(sequences))
                difference = (graph.forward(pieces) - expected).abs().max().item()
                graph_s = self._time(partial(graph.forward, pieces))
                figures |= {
                    "graph": self._work(
                        graph_s, moved=c.decode_bytes(size, context, self._cache_dtype)
                    ),
                    "graph_speedup": took / graph_s,
                    "graph_logit_difference": difference,
                }
            out[str(size)] = figures
        return out

    # --- helpers ------------------------------------------------------------------------------

    @cached_property
    def _model(self) -> Model:
        weights = random_weights(
            self._sizes.model, 0, self._device, self._dtype, drawn_on=self._device
        )
        return Model(self._sizes.model, weights, self._operators)

    def _sequences(self, config: ModelConfig, batch: int, tokens: int) -> Sequences:
        return Sequences(config, batch, tokens, self._device, self._cache_dtype)

    def _clone(self, sequences: Sequences) -> Any:
        from engine.cache.storage import CacheStorage

        storage = sequences.storage
        return CacheStorage(storage.layout, storage.device, storage.buffer.clone())

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device, dtype=self._dtype)

    def _kda_inputs(self, rows: int) -> KdaInputs:
        c = self._sizes.kernel
        return KdaInputs(
            q=self._normal(rows, c.kda_heads, c.d_k),
            k=self._normal(rows, c.kda_heads, c.d_k),
            v=self._normal(rows, c.kda_heads, c.d_v),
            decay=self._normal(rows, c.kda_heads, c.d_k),
            beta=self._normal(rows, c.kda_heads),
            a_log=torch.zeros(c.kda_heads, device=self._device),
            dt_bias=torch.full((c.kda_heads, c.d_k), -3.0, device=self._device),
        )

    def _mla_inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self._sizes.kernel
        return (
            self._normal(rows, c.mla_heads, c.qk_dim),
            self._normal(c.mla_heads, c.nope_dim, c.kv_lora_rank) * c.kv_lora_rank**-0.5,
            self._normal(c.mla_heads, c.v_dim, c.kv_lora_rank) * c.kv_lora_rank**-0.5,
        )

    def _time(self, call: Callable[[], object]) -> float:
        return seconds_per_call(call, self._device, self._sizes.repeats)

    def _work(self, took: float, flops: float = 0.0, moved: float = 0.0) -> dict[str, Any]:
        """Milliseconds, achieved rates, and their shares of the ceilings."""
        figures: dict[str, Any] = {"ms": took * 1e3}
        if flops:
            figures["tflops"] = flops / took / 1e12
            if self._ceilings.flops_per_s:
                figures["of_peak_flops"] = flops / took / self._ceilings.flops_per_s
        if moved:
            figures["tb_per_s"] = moved / took / 1e12
            if self._ceilings.bytes_per_s:
                figures["of_peak_bandwidth"] = moved / took / self._ceilings.bytes_per_s
        return figures


def _eager_step(model: Model, sequences: Sequences, pieces: list[Piece]) -> torch.Tensor:
    return model.forward(sequences.build(pieces), sequences.storage)


def measure(sizes: Sizes, device: torch.device, budget_s: float) -> dict[str, Any]:
    """All parts. A part that raises, or that would start after `budget_s`, is reported as such."""
    begin = time.perf_counter()
    bench = Bench(sizes, device)
    figures: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    for name, part in bench.parts().items():
        started = time.perf_counter()
        if started - begin > budget_s:
            figures[name] = {"skipped": f"the budget of {budget_s:.0f} s was used up"}
            continue
        try:
            figures[name] = part()
        except Exception as error:  # One kernel that fails must not hide the others' figures.
            figures[name] = {"error": f"{type(error).__name__}: {error}"}
        figures[name]["took_s"] = round(time.perf_counter() - started, 1)
        print(f"{name}: {json.dumps(figures[name])}", file=sys.stderr, flush=True)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to stdout")
    parser.add_argument("--budget-s", type=float, default=400.0, help="start no part after this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "engine.bench.gpu: no CUDA device; `make test-kernels` runs the same code in Triton's "
            "interpreter",
            file=sys.stderr,
        )
        return 3
    figures = measure(CARD, torch.device("cuda"), options.budget_s)
    text = json.dumps(figures, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)
    return 1 if any("error" in part for part in figures.values() if isinstance(part, dict)) else 0


if __name__ == "__main__":
    sys.exit(main())
