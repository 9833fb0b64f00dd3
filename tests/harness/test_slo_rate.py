"""The highest offered rate at which TTFT P90 and tokens/s hold, found in simulation."""

from __future__ import annotations

import asyncio

import pytest

from harness import clock
from harness.comparison import Comparison, compare
from harness.execution import execute, plan_run
from harness.experiment import MeasureSpec, SloSpec, load_experiment
from harness.fleets.modelled import open_modelled
from harness.slo_search import highest_rate
from results.recorder import Recorder
from results.summary import Latency, Measured, PhaseSummary

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


def experiment_of(ttft_s: float, tokens_per_s: float):
    settings = {**SHORT, "slo.ttft_s": ttft_s, "slo.tokens_per_s": tokens_per_s}
    experiment = load_experiment("paper", settings)
    kept = tuple(row for row in experiment.configurations if row.name == "homogeneous")
    return experiment.model_copy(update={"configurations": kept})


@pytest.fixture(scope="module")
def rate_at(tmp_path_factory):
    def search(ttft_s: float, tokens_per_s: float) -> float | None:
        experiment = experiment_of(ttft_s, tokens_per_s)
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


def latency(p90: float | None) -> Latency:
    return Latency(p90=Measured(paper=p90))


@pytest.mark.parametrize(
    ("holds_to", "most"), [(0.1, 0.1), (0.33, 0.33), (1.0, 1.0), (9.9, 1.05), (0.04, None)]
)
def test_the_search_is_a_bisection(holds_to, most):
    probed = []

    async def probe(phase):
        probed.append(phase)
        slow = 10.1 if phase.request_rate > holds_to else 9.9
        return PhaseSummary(phase.name, ttft=latency(slow), tpot=latency(0.025))

    measure = MeasureSpec(latency_warmup_s=5, latency_window_s=7000)
    found = asyncio.run(highest_rate(probe, SloSpec(), measure, 1.0))
    if most is None:
        assert (found, len(probed)) == (None, 1)
    else:
        assert most - 0.01 <= found <= most
        assert len(probed) <= 8
    for phase in probed:
        assert (phase.warmup_s, phase.window_s) == (5, max(7000, 2000 / phase.request_rate))


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "holds"),
    [
        (10.0, 0.02525, True),  # a hundredth of tolerance
        (10.0, 0.02526, False),
        (10.001, 0.025, False),
        (None, 0.025, False),
        (10.0, None, False),
    ],
)
def test_both_limits_must_hold_and_be_known(ttft_s, tpot_s, holds):
    async def probe(phase):
        return PhaseSummary(phase.name, ttft=latency(ttft_s), tpot=latency(tpot_s))

    slo = SloSpec(ttft_s=10, tokens_per_s=40, tolerance=0.01)
    found = asyncio.run(highest_rate(probe, slo, MeasureSpec(), 1.0))
    assert (found is not None) == holds


def test_a_search_that_is_cut_off_names_no_rate(tmp_path):
    experiment = experiment_of(20.0, 40)
    result = Comparison()

    def say(line: str) -> None:
        if "searching" in line:  # the first rate takes 2,000 / 0.1 s, and holds
            asyncio.get_running_loop().call_later(21_000, result.stop.set)

    recorder = Recorder(tmp_path, {})
    clock.run(compare(experiment, plan_run(experiment), open_modelled, recorder, result, say))
    recorder.close()
    assert result.interrupted
    (summary,) = result.configurations
    assert summary.slo_rate.paper is None
