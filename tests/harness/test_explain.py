"""A request's story says where it went, why, and where its time went."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import explain
from harness.cli.main import main
from harness.execution import execute
from harness.experiment import load_experiment
from harness.phases import CAPACITY
from results import reader


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment = load_experiment(
        "convergence",
        {"measure.capacity_warmup_s": 300, "measure.capacity_window_s": 900,
         "measure.latency_window_s": 60},
    )  # fmt: skip
    kept = tuple(row for row in experiment.configurations if row.name in ("planned", "split-6-2"))
    experiment = experiment.model_copy(update={"configurations": kept})
    return execute(experiment, tmp_path_factory.mktemp("runs"), "test").directory


def test_the_story_adds_up(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = reader.read(run, "requests").to_pylist()
    row = next(row for row in rows if row["wire_bytes"] and row["configuration"] == "planned")
    assert main(["explain", str(run), "--request", str(row["id"])]) == 0
    told = capsys.readouterr().out
    assert "request 0 of planned" in told or f"request {row['id']} of planned" in told
    assert f"prefill began at {row['prefill_instance']}" in told
    assert "above threshold" in told and "MiB crossed the link" in told
    assert told.count("predicted TTFT by pd") == told.count("predicted TTFT by prfaas")
    for line in re.findall(r"TTFT ([\d.]+) s = (.*)", told):
        parts = [float(part) for part in re.findall(r"[\d.]+(?= \+|$)", line[1])]
        assert len(parts) == 4
        assert sum(parts) == pytest.approx(float(line[0]), abs=0.003)
    assert "of split-6-2" not in "\n".join(explain.stories(run, row["id"], "planned"))


def test_scheduling_tells_roles_and_when_the_target_was_reached(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", str(run), "--scheduling", "split-6-2", "--target", "3.187"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "-> decode" in told and "serves decode" in told
    assert re.search(r"97 % of 3.187 req/s after \d+ s; from then on 3\.\d+ req/s", told)
    when_s, rate = explain.reached_after_s(run, "split-6-2", CAPACITY, 3.187)
    assert when_s is not None and when_s < 500 and rate > 0.97 * 3.187
    assert explain.reached_after_s(run, "planned", CAPACITY, 9.0)[0] is None
    assert explain.scheduling(run, "planned") == []


def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["explain", "nowhere", "--request", "1"], "nowhere: no such run directory"),
        (["explain", str(run), "--request", "999" + "9" * 9], "no request 999"),
        (["explain", str(run), "--scheduling", "x"], "no configuration 'x' (there are: planned"),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
