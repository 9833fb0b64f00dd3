"""The ladder is a list of configurations, one part a rung, and its table reads a run's summary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.ablation import LADDER, ladder_experiment
from harness.cli.main import main
from harness.control import check_control
from harness.errors import BadInput
from harness.experiment import load_experiment
from harness.policies.catalog import make_policy

SHORT = [
    "--set", "measure.capacity_warmup_s=60", "--set", "measure.capacity_window_s=400",
    "--set", "measure.latency_warmup_s=60", "--set", "measure.latency_window_s=400",
]  # fmt: skip


def test_every_rung_is_a_valid_configuration_of_the_same_devices() -> None:
    ladder = ladder_experiment(load_experiment("paper"))
    assert [row.name for row in ladder.configurations] == [rung.name for rung in LADDER]
    assert {row.n_prfaas + row.n_prefill + row.n_decode for row in ladder.configurations} == {12}
    for row in ladder.configurations:
        make_policy(row.policy, 1.0, row.parameters)


def test_each_rung_of_prfaas_turns_on_more() -> None:
    rows = {row.name: row for row in ladder_experiment(load_experiment("paper")).configurations}
    off = rows["threshold"].parameters
    assert off == {
        "short_term": False, "long_term": False, "copies": False, "affine": False, "band": 1.0,
    }  # fmt: skip
    assert rows["roles"].parameters == {}
    assert set(rows["queues"].parameters) == {"long_term"}


def test_a_rung_has_what_the_experiment_gives_its_policy() -> None:
    given = load_experiment(
        "routing",
        {
            "configurations.prfaas.parameters.watch_interval_s": 2.0,
            "configurations.priced.queue.discipline": "shortest-first",
        },
    )
    rows = {row.name: row for row in ladder_experiment(given).configurations}
    assert rows["threshold"].parameters["watch_interval_s"] == 2.0
    assert rows["priced"].queue.discipline == "shortest-first"
    assert rows["balanced"].threshold_tokens is None
    given = load_experiment(
        "paper",
        {
            "configurations.prfaas.threshold_tokens": 60_000,
            "configurations.prfaas.queue.discipline": "shortest-first",
            "configurations.naive.n_prfaas": 3,
            "configurations.naive.n_decode": 9,
        },
    )
    rows = {row.name: row for row in ladder_experiment(given).configurations}
    assert rows["roles"].threshold_tokens == rows["priced"].threshold_tokens == 60_000
    assert rows["roles"].queue.discipline == "shortest-first"
    assert rows["balanced"].queue.discipline == "fifo"
    assert (rows["naive"].n_prfaas, rows["naive"].n_decode) == (3, 9)
    check_control(ladder_experiment(given))


def test_what_the_ladder_does_not_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "paper", "--set", "measure.unloaded=true"]) == 2
    assert "--set measure.unloaded: the ladder has no such phases" in capsys.readouterr().err


def test_bad_rungs_and_experiments_are_refused() -> None:
    with pytest.raises(BadInput, match="--rung best: there are homogeneous, naive"):
        ladder_experiment(load_experiment("paper"), ["best"])
    only = load_experiment("paper").configurations[:1]
    bare = load_experiment("paper").model_copy(update={"configurations": only})
    with pytest.raises(BadInput, match="no configuration has both n_prfaas and n_prefill"):
        ladder_experiment(bare)


def test_the_command_prints_what_each_rung_adds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = ["--rung", "naive", "--rung", "balanced", "--rung", "priced"]
    arguments = ["ablate", "paper", *rungs, *SHORT, "--rate", "2.0", "--out", str(tmp_path)]
    assert main([*arguments, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)
    naive, balanced, priced = steps
    assert naive["capacity_gain"] is None
    assert balanced["capacity"] > 1.15 * naive["capacity"]
    assert balanced["capacity_gain"] == pytest.approx(balanced["capacity"] / naive["capacity"] - 1)
    assert priced["ttft_p90_s"] < balanced["ttft_p90_s"]
    assert priced["ttft_p90_gain"] < 0.0
