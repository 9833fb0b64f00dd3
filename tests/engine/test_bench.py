"""The benchmark's parts give the right figures about the right things; no time is judged."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.bench.__main__ import as_text, measure
from engine.bench.cases import KdaShape, Sequences, kda_inputs, per_token_loop
from engine.bench.stages import stage_seconds
from engine.bench.timing import Timing, in_turns
from engine.model.config import InputError, shape
from engine.model.weights import random_weights
from engine.ops.kda_reference import kda_recurrence


def test_alternatives_run_in_turns_after_a_warm_up():
    order: list[str] = []
    cases = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    timings = in_turns(cases, seconds=0.0, least_runs=3, turn_s=0.0)
    assert order == ["a", "b"] * 4
    assert timings["a"].runs == 3


def test_a_turn_repeats_a_short_case(monkeypatch: pytest.MonkeyPatch):
    ticks = itertools.count(0.0, 0.02)
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    timing = in_turns({"a": lambda: None}, seconds=0.0, least_runs=2, turn_s=0.05)["a"]
    assert timing.runs == 6 and timing.best_s == pytest.approx(0.02)


def test_best_and_median_are_those_of_the_clock(monkeypatch: pytest.MonkeyPatch):
    ticks = itertools.accumulate([0, 1, 5, 1, 2, 1, 9, 1])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    timing = in_turns({"a": lambda: None}, seconds=0.0, least_runs=3, turn_s=0.0)["a"]
    assert (timing.best_s, timing.median_s) == (2, 5)
    assert Timing(2.0, 2.0, 1).ratio_to(Timing(8.0, 8.0, 1)) == 4.0


def test_the_loop_that_is_compared_with_is_the_recurrence():
    x, state = kda_inputs(20, 2, 16, 24), torch.randn(2, 24, 16)
    expected, expected_state = kda_recurrence(*x, state)
    actual, actual_state = per_token_loop(*x, state)
    assert (actual - expected).abs().max() < 1e-5
    assert (actual_state - expected_state).abs().max() < 1e-5


def test_products_of_the_chunked_form_are_counted():
    """One head, one chunk of 32, K = V = 16, by hand."""
    with_state = 3 * 2 * 32 * 16 * 16
    triangles = 4 * 2 * 32 * 32 // 2 * 16
    assert KdaShape(32, 1, 16).chunked_flops() == with_state + triangles


def test_stages_add_up_to_the_whole():
    config = shape("tiny")
    sequences = Sequences(config, 2, 40)
    pieces = [sequences.prompt(i, 40) for i in range(2)]
    stages = stage_seconds(config, random_weights(config, 0), sequences, pieces, repeats=1)
    assert set(stages) == {
        "conv_prefill", "kda_prefill", "mla_prefill", "experts", "rest", "total",
    }  # fmt: skip
    assert sum(s for n, s in stages.items() if n != "total") == pytest.approx(stages["total"])


def test_report_names_what_is_missing_and_what_was_measured():
    figures = measure("tiny", 70, seconds=0.0, kda_shapes={"two heads": KdaShape(40, 2, 16)})
    text = as_text(figures | {"peers": {"fla": None, "transformers": None}})
    assert "model tiny" in text
    assert "40 tokens, 2 heads of 16 (two heads)" in text
    assert figures["kda"]["two heads"]["ratio_to_loop"] > 0
    assert "fla naive chunk: not installed (make test-kernels)" in text
    assert figures["model"]["decode_step_ms_by_batch"].keys() == {"1", "8", "32"}
    with pytest.raises(InputError, match="shape 'nope' is unknown"):
        measure("nope", 70, seconds=0.0)
