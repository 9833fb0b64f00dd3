"""Differences between two summaries, as literals."""

import pytest

from results.fidelity import differences
from results.summary import ConfigurationSummary, Latency, Measured, PhaseSummary, RunSummary


def summary(capacity: float, mean_s: float, p90_s: float) -> RunSummary:
    ttft = Latency(mean=Measured(paper=mean_s), p90=Measured(paper=p90_s))
    configuration = ConfigurationSummary(
        "prfaas", capacity=Measured(paper=capacity), phases=(PhaseSummary("latency", ttft=ttft),)
    )
    return RunSummary("x", "emulate", (configuration,))


def test_each_figure_is_held_against_its_limit() -> None:
    rows = differences(summary(3.30, 2.5, 4.4), summary(3.20, 2.4, 4.0))
    found = {row.figure: (round(row.relative, 4), row.kept) for row in rows}
    assert found == {
        "capacity, req/s": (0.0312, False),
        "TTFT mean, s": (0.0417, True),
        "TTFT P90, s": (0.1, False),
    }


def test_a_figure_that_one_run_lacks_is_left_out() -> None:
    other = RunSummary("x", "simulate", (ConfigurationSummary("prfaas"),))
    assert differences(summary(3.3, 2.5, 4.4), other) == []


@pytest.mark.parametrize("relative", [0.0299, -0.0299])
def test_the_limit_holds_on_both_sides(relative: float) -> None:
    rows = differences(summary(1 + relative, 1.0, 1.0), summary(1.0, 1.0, 1.0))
    assert all(row.kept for row in rows)
