"""The rate of each flow over time, as `measure.flow_rates` writes it."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from harness.errors import BadInput
from harness.execution import execute
from harness.experiment import load_experiment
from harness.links.shape import GOODPUT_SHARE
from results import reader

SHORT = {
    "measure.capacity_warmup_s": 30,
    "measure.capacity_window_s": 60,
    "measure.latency_warmup_s": 0,
    "measure.latency_window_s": 120,
    "measure.load_fractions": [],
    "measure.unloaded": False,
    "measure.slo_search": False,
    # Scarce enough that flows share it.
    "link.rate_gbps": 8.0,
}


def run_of(tmp_path, **settings):
    experiment = load_experiment("paper", {**SHORT, **settings})
    kept = tuple(row for row in experiment.configurations if row.name == "prfaas")
    experiment = experiment.model_copy(update={"configurations": kept})
    return execute(experiment, tmp_path, "test").directory


def test_each_flow_integrates_to_its_cache_and_all_share_the_link(tmp_path):
    run = run_of(tmp_path, **{"measure.flow_rates": True, "measure.slo_search": True})
    series = defaultdict(list)
    changes = defaultdict(list)
    for row in reader.read(run, "flows").to_pylist():
        assert row["link"] == "prfaas->pd" and row["attempt"] == 1
        series[row["phase"], row["id"]].append((row["time_us"], row["rate_bps"]))
    sent = {
        (row["phase"], row["id"]): row
        for row in reader.read(run, "requests").to_pylist()
        if row["wire_bytes"]
    }
    assert {phase for phase, _ in series} == {"capacity", "latency"}  # of the search nothing
    assert sent.keys() == series.keys() and len(sent) > 100
    for key, steps in series.items():
        assert steps == sorted(steps) and steps[-1][1] == 0.0
        bits = sum(rate * (after - at) / 1e6 for (at, rate), (after, _) in pairwise(steps))
        # Times are whole microseconds.
        assert bits / 8 == pytest.approx(sent[key]["wire_bytes"], abs=20_000)
        assert steps[0][0] > sent[key]["prefill_started_us"]
        assert sent[key]["delivered_us"] - steps[-1][0] == pytest.approx(250, abs=1)  # the delay
        before = 0.0
        for at, rate in steps:
            changes[key[0]].append((at, rate - before))
            before = rate
    assert any(len(steps) > 3 for steps in series.values())
    for steps in changes.values():
        total = 0.0
        for (at, change), (after, _) in pairwise(sorted(steps)):
            total += change
            # Rounded to microseconds, what ends and what begins may overlap by two.
            assert after - at <= 2 or total <= 8e9 * GOODPUT_SHARE * (1 + 1e-9)


def test_no_file_unless_asked_for(tmp_path):
    run = run_of(tmp_path)
    assert (run / "links.parquet").exists() and not (run / "flows.parquet").exists()


def test_rates_of_flows_are_those_of_a_modelled_link():
    with pytest.raises(BadInput, match=r"measure\.flow_rates.*simulate"):
        load_experiment("bench", {"measure.flow_rates": True})
