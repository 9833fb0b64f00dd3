"""What a way of running an experiment does not know is said; what nothing knows is refused."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cli.main import main
from harness.errors import BadInput
from harness.experiment import load_experiment, presets
from harness.passed_over import PASSED_OVER, passed_over

SET: dict[str, Any] = {
    "arrivals.shape": {"kind": "on-off"},
    "link.schedule": [{"at_s": 1.0, "rate_gbps": 5.0}],
    "link.sine": {"period_s": 60.0, "amplitude": 0.5, "until_s": 60.0},
    "link.jitter_ms": 1.0,
    "link.reverse.jitter_ms": 1.0,
    "link.reverse": {"rate_gbps": 10.0},
    "link.loss": {"model": "independent", "probability": 0.01},
    "link.queue_ms": 10.0,
    "link.queue_bytes": 100_000,
    "cache.blocks": 100,
    "cache.states": 100,
    "cache.prompt_end": False,
    "cache.junction": False,
    "configurations.queue": {"discipline": "shortest-first"},
}


@pytest.mark.parametrize("way", PASSED_OVER)
def test_each_field_that_a_way_does_not_know_is_named_once_it_is_set(way):
    assert not passed_over(load_experiment("paper"), way)
    for _, fields in PASSED_OVER[way]:
        for field in fields:
            key = field.replace("configurations.", "configurations.prfaas.")
            (line, *_) = passed_over(load_experiment("paper", {key: SET[field]}), way)
            assert field in line


def test_plans_and_planned_sweeps_say_what_they_pass_over(tmp_path, capsys):
    queued = ["--set", "configurations.prfaas.queue.discipline=shortest-first"]
    assert main(["plan", "bench", *queued]) == 0
    assert "prfaas plan: plan passes over configurations.queue" in capsys.readouterr().err
    sweep = ["sweep", "paper", "--mode", "plan", "--axis", "link.jitter_ms=0,1"]
    assert main([*sweep, "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert "prfaas sweep: plan passes over link.jitter_ms" in capsys.readouterr().err


def test_a_sweep_over_what_only_emulate_has_is_refused(tmp_path, capsys):
    axis = ["--axis", "emulate.time_scale=1,2"]
    assert main(["sweep", "bench", *axis, "--out", str(tmp_path)]) == 2
    assert "axis emulate.time_scale: says nothing to a sweep" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(presets()))
def test_arrivals_that_no_phase_can_offer_are_refused_before_anything_starts(name):
    with pytest.raises(BadInput, match="but a phase offers a rate"):
        load_experiment(name, {"arrivals": {"process": "trace"}})
    with pytest.raises(BadInput, match=r"arrivals\.exact_rate: "):
        ramp = {"process": "poisson", "exact_rate": True, "shape": {"kind": "linear"}}
        load_experiment(name, {"arrivals": ramp})
