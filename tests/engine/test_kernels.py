"""The CUDA path's kernels under Triton's interpreter (`make test-kernels`), in fp32, d_k != d_v.

The interpreter's bf16 arithmetic is wrong, its loads and stores are not: copies are tested in
both, arithmetic in fp32 only.
"""

# ruff: noqa: E402 -- the interpreter must be chosen, and fla readied for it, before the imports

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 (make test-kernels)", allow_module_level=True)
triton = pytest.importorskip("triton", reason="make test-kernels installs it")
pytest.importorskip("fla", reason="make test-kernels installs it")

import triton.language as tl
from triton.runtime import autotuner

# The interpreter is slow, and slower on a busy machine.
pytestmark = [pytest.mark.kernels, pytest.mark.timeout(600)]


class _LoopIndex(int):
    """fla casts its loop indices, which the interpreter makes plain ints."""

    def to(self, *_args: object, **_options: object) -> _LoopIndex:
        return self


def _interpreted_range(*bounds: object) -> Iterator[_LoopIndex]:
    plain = [int(b.handle.data.item()) if hasattr(b, "handle") else int(b) for b in bounds]
    return map(_LoopIndex, builtins.range(*plain))


def _ready_fla_for_the_interpreter() -> None:
    """Three things that only a compiler does: choose among configurations by timing them, give a
    loop index a type, and bind `gather` when the kernel runs instead of when it is imported."""
    construct = autotuner.Autotuner.__init__

    def first_configuration(self, fn, arg_names, configs, *args, **options):
        construct(self, fn, arg_names, list(configs)[:1], *args, **options)

    autotuner.Autotuner.__init__ = first_configuration
    from fla.ops.common import chunk_delta_h
    from fla.ops.kda import chunk_intra

    chunk_delta_h.range = _interpreted_range
    if hasattr(chunk_intra, "gather"):
        chunk_intra.gather = lambda *args, **options: tl.gather(*args, **options)


_ready_fla_for_the_interpreter()

from engine.cache.storage import CacheStorage
from engine.model.batch import ForwardBatch, Piece
from engine.model.config import shape
from engine.model.decode_graph import padded_decode
from engine.model.layout import CacheLayout
from engine.model.model import Model
from engine.model.weights import random_weights
from engine.ops import kda_fla, triton_mla_decode, triton_pack
from engine.ops.cuda_backend import CudaOperators, mla_prefill_fused
from engine.ops.kda_inputs import KdaInputs
from engine.ops.mla import mla_decode, mla_prefill
from engine.ops.torch_backend import TorchOperators, initial_states

H, K, V = 2, 16, 24
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def kda_inputs(rows: int) -> KdaInputs:
    return KdaInputs(
        q=normal(rows, H, K),
        k=normal(rows, H, K),
        v=normal(rows, H, V),
        decay=normal(rows, H, K),
        beta=normal(rows, H),
        a_log=normal(H),
        dt_bias=normal(H, K) - 2,
    )


def test_kda_prefill_with_checkpoints_in_a_varlen_batch():
    """fla's chunk kernels against the torch operator, which is held against the recurrence."""
    pieces = [
        Piece([0] * 70, 0, 1, range(70), checkpoints=((64, 5),)),
        Piece([0] * 3, 10, 2, range(13)),
        Piece([0] * 40, 64, 3, range(104), source_slot=6, checkpoints=((80, 7), (104, 8))),
    ]
    rows = ForwardBatch.build(pieces, 1).prefill
    expected_state = normal(10, H, V, K)
    actual_state = expected_state.clone()
    x = kda_inputs(113)
    expected = TorchOperators().kda_prefill(x, expected_state, rows)
    with torch.inference_mode():
        initial = initial_states(actual_state, rows)
        actual = kda_fla.kda_prefill(x, actual_state, initial, rows)
    assert (actual - expected).abs().max() < 1e-4
    assert (actual_state - expected_state).abs().max() < 1e-4


def test_kda_decode_on_slots():
    rows = ForwardBatch.build([Piece([0], 5, slot, range(6)) for slot in (4, 1, 6)], 1).decode
    expected_state = normal(8, H, V, K)
    actual_state = expected_state.clone()
    x = kda_inputs(3)
    expected = TorchOperators().kda_decode(x, expected_state, rows)
    actual = kda_fla.kda_decode(x, actual_state, rows)
    assert (actual - expected).abs().max() < 1e-5
    assert (actual_state - expected_state).abs().max() < 1e-5
    assert torch.equal(actual_state[[0, 2, 3, 5, 7]], expected_state[[0, 2, 3, 5, 7]])


@pytest.mark.parametrize("heads", [3, 20])
@pytest.mark.parametrize("split_tokens", [16, 256])
def test_mla_decode_of_a_ragged_batch(heads: int, split_tokens: int, monkeypatch):
    """Contexts of 1 to 150 tokens, NaN in every row that must not be seen."""
    monkeypatch.setattr(triton_mla_decode, "_SPLIT_TOKENS", split_tokens)
    rank, rope, nope, value, page = 24, 8, 12, 20, 16
    context = [150, 2, 16, 17, 33]
    pool = torch.full((64, page, rank + rope), torch.nan)
    pieces = []
    for i, n in enumerate(context):
        table = [1 + 12 * i + j for j in range(-(-n // page))][::-1]
        for j, p in enumerate(table):
            held = min(page, n - j * page)
            pool[p, :held] = normal(held, rank + rope)
        pieces.append(Piece([0], n - 1, 1 + i, table))
    rows = ForwardBatch.build(pieces, page).decode
    q = normal(len(context), heads, nope + rope)
    w_uk, w_uv = normal(heads, nope, rank), normal(heads, value, rank)
    expected = mla_decode(q, pool, w_uk, w_uv, rows)
    actual = triton_mla_decode.mla_decode(q, pool, w_uk, w_uv, rows)
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() < 1e-4


def test_fused_prefill_attention_after_a_context():
    rank, rope, nope, value, page = 24, 8, 12, 20, 16
    pool = normal(16, page, rank + rope)
    pieces = [Piece([0] * 30, 50, 1, [3, 1, 2, 6, 5]), Piece([0] * 20, 0, 2, [8, 9])]
    rows = ForwardBatch.build(pieces, page).prefill
    q, w_uk, w_uv = normal(50, 3, nope + rope), normal(3, nope, rank), normal(3, value, rank)
    expected = mla_prefill(q, pool, w_uk, w_uv, rows)
    assert (mla_prefill_fused(q, pool, w_uk, w_uv, rows) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_tokens", [1, 16, 37, 48])
def test_pack_kernels_move_every_bit(dtype: torch.dtype, n_tokens: int):
    width, page = 24, 16
    pool = normal(9, page, width).to(dtype)
    pool[5, 3] = torch.nan
    pages = torch.tensor([5, 2, 7][: -(-n_tokens // page)])
    packed = triton_pack.gather_rows(pool, pages, n_tokens)
    expected = pool[pages].flatten(0, 1)[:n_tokens]
    assert torch.equal(packed.view(torch.uint8), expected.contiguous().view(torch.uint8))
    target = normal(9, page, width).to(dtype)
    before = target.clone()
    triton_pack.scatter_rows(target, pages, packed)
    before.view(-1, width)[
        torch.cat([torch.arange(page) + p * page for p in pages.tolist()])[:n_tokens]
    ] = packed
    assert torch.equal(target.view(torch.uint8), before.view(torch.uint8))


def test_whole_model_on_the_cuda_operators():
    """Prefill in two chunks with a checkpoint, then decode, beside another sequence."""
    config = shape("tiny")
    weights = random_weights(config, 3)
    runs = []
    for operators in (TorchOperators(), CudaOperators()):
        model = Model(config, weights, operators)
        storage = CacheStorage(CacheLayout(config, 24, 8, 16))
        storage.poison(tuple(range(1, 8)), tuple(range(1, 24)))
        logits = []
        for pieces in (
            [Piece(range(40), 0, 1, [3, 2, 1], checkpoints=((32, 4),))],
            [Piece([7], 40, 1, [3, 2, 1]), Piece(range(30), 0, 2, [8, 9])],
            [Piece([8, 9], 41, 1, [3, 2, 1]), Piece([5], 30, 2, [8, 9])],
            [Piece([1, 2], 32, 3, [3, 2, 10], source_slot=4)],
        ):
            logits.append(model.forward(ForwardBatch.build(pieces, 16), storage))
        runs.append(torch.cat(logits))
    expected, actual = runs
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_stays_on_its_device(dtype: torch.dtype, monkeypatch):
    """On "meta", where no value can be read and no tensor of another device be mixed in: so a step
    can be captured as a graph. Kernels, which take pointers, are left out."""
    monkeypatch.setattr(kda_fla, "kda_decode", lambda inputs, *_: torch.empty_like(inputs.v))
    monkeypatch.setattr(triton_mla_decode, "mla_decode", mla_decode)
    config = shape("tiny")
    weights = random_weights(config, 0, "meta", dtype)
    name = str(dtype).removeprefix("torch.")
    storage = CacheStorage(CacheLayout(config, 24, 8, 16, name), "meta")
    pieces = [Piece([5], 30, 2, [8, 9]), Piece([6], 16, 3, [7, 6])]
    batch = padded_decode(ForwardBatch.build(pieces, 16, "meta"), 4, 5)
    logits = Model(config, weights, CudaOperators()).forward(batch, storage)
    assert logits.shape == (4, config.vocab) and logits.device.type == "meta"


def test_every_part_of_the_gpu_benchmark_runs():
    """Its times mean nothing here; its parts must all give figures."""
    from engine.bench.gpu import INTERPRETER, measure

    figures = measure(INTERPRETER, torch.device("cpu"), budget_s=1e6)
    for name, part in figures.items():
        if isinstance(part, dict):
            assert "error" not in part, (name, part)
            assert "skipped" not in part, name
    assert figures["mla_decode"]["2"]["ratio_to_torch"] > 0
    assert figures["pack"]["pages"]["pack"]["tb_per_s"] > 0
