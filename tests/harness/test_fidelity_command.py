"""`prfaas fidelity --against` compares with an emulate run of the same experiment only."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.execution import execute, to_toml
from harness.experiment import load_experiment
from results import summary

SHORT = {
    "measure.capacity_warmup_s": 30,
    "measure.capacity_window_s": 60,
    "measure.latency_warmup_s": 0,
    "measure.latency_window_s": 60,
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    experiment = load_experiment("bench", {**SHORT, "mode": "simulate", "name": "short"})
    return execute(experiment, root, "prfaas run").directory


def emulated(simulated: Path, **settings: object) -> Path:
    """The same run, as if real processes had made it, by an experiment with these settings."""
    overrides = {key.replace("__", "."): value for key, value in settings.items()}
    run = simulated.parent / "emulated"
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text((simulated / "run.json").read_text())
    made = replace(summary.read(simulated), mode="emulate")
    (run / "summary.json").write_text(summary.to_json(made))
    experiment = load_experiment("bench", {**SHORT, "mode": "emulate", **overrides})
    (run / "experiment.toml").write_text(to_toml(experiment))
    return run


def fidelity(run: Path, out: Path) -> int:
    settings = [word for key, value in SHORT.items() for word in ("--set", f"{key}={value}")]
    return main(["fidelity", "bench", "--against", str(run), "--out", str(out), *settings])


def test_a_run_in_another_mode_is_refused(simulated, tmp_path, capsys):
    assert fidelity(simulated, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error == (
        f"prfaas fidelity: --against {simulated}: is a simulate run of 'short'; an emulate run of "
        "'bench' would do\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"link__rate_gbps": 10}, "link.rate_gbps 10.0, not 100.0"),
        ({"configurations__prfaas__n_decode": 4}, "configurations.prfaas.n_decode 4, not 5"),
        ({"configurations__naive__name": "old"}, "configurations.old"),
    ],
)
def test_a_run_with_other_settings_is_refused(settings, says, simulated, tmp_path, capsys):
    assert fidelity(emulated(simulated, **settings), tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "is an emulate run of 'bench' with other settings" in error and says in error
    assert "an emulate run of 'bench' would do, or the same --set" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_run_of_the_same_experiment_is_compared(simulated, tmp_path, capsys):
    # Other seeds and names, and how real processes are scaled, make no other experiment.
    run = emulated(simulated, seed=7, name="mine", emulate__time_scale=2.0)
    assert fidelity(run, tmp_path / "out") == 0
    assert "+0.0%" in capsys.readouterr().out


def test_runs_without_a_common_figure_are_not_alike(simulated, tmp_path, capsys):
    run = emulated(simulated)
    content = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(content | {"configurations": []}))
    assert fidelity(run, tmp_path / "out") == 4
    assert "no figure in common" in capsys.readouterr().err
