"""The highest offered rate at which TTFT P90 and tokens/s hold, found in simulation."""

from __future__ import annotations

import pytest

from harness.execution import execute
from harness.experiment import load_experiment

SHORT = {
    "measure.capacity_warmup_s": 30,
    "measure.capacity_window_s": 60,
    "measure.latency_warmup_s": 60,
    "measure.latency_window_s": 60,
    "measure.load_fractions": [],
    "measure.unloaded": False,
    # 5 ms + 1 ms a sequence, so that a fuller batch is slower.
    "profiles.pd": "1t-h20-step5",
}


@pytest.fixture(scope="module")
def rate_at(tmp_path_factory):
    def search(ttft_s: float, tokens_per_s: float) -> float | None:
        settings = {**SHORT, "slo.ttft_s": ttft_s, "slo.tokens_per_s": tokens_per_s}
        experiment = load_experiment("paper", settings)
        kept = tuple(row for row in experiment.configurations if row.name == "homogeneous")
        experiment = experiment.model_copy(update={"configurations": kept})
        found = execute(experiment, tmp_path_factory.mktemp("run"), "test")
        return found.summary.configurations[0].slo_rate.paper

    return search


def test_either_half_of_the_slo_bounds_the_rate(rate_at):
    loose = rate_at(20.0, 40)
    assert loose == pytest.approx(0.9 * 2.03, rel=0.1)  # most of capacity
    assert rate_at(10.0, 40) < loose - 0.1
    # At 110 tokens/s a step may have 4 sequences, which three instances keep up at 1.30 req/s if
    # all batches always have 4. They have more at times, and most requests must not see that.
    assert 0.5 < rate_at(20.0, 110) < 3 * 4 / (0.009 * 1024)


def test_a_rate_that_never_holds_is_none(rate_at):
    # The P90 prompt alone computes for 9.7 s.
    assert rate_at(5.0, 40) is None
