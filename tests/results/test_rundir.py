"""Run directories: atomic, marked, listed, pruned and compared."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from results import rundir
from results.rundir import Identity, RunDirError

NOON = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


def make(root: Path, name: str = "bench", at: datetime = NOON, complete: bool = True) -> Path:
    run = rundir.create(root, Identity(name, mode="simulate", seed=1), "seed = 1\n", at)
    run.close(complete)
    return run.path


def test_created_with_identity_and_experiment(tmp_path: Path) -> None:
    path = make(tmp_path / "runs")
    assert path.name == "bench-20260501T120000Z"
    assert (path / "experiment.toml").read_text() == "seed = 1\n"
    assert json.loads((path / "run.json").read_text())["created_utc"] == "20260501T120000Z"
    assert rundir.RunDir(path).complete
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [path.name]


def test_two_runs_of_one_second_do_not_meet(tmp_path: Path) -> None:
    assert [make(tmp_path).name, make(tmp_path).name] == [
        "bench-20260501T120000Z",
        "bench-20260501T120000Z-2",
    ]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunDirError, match="run name"):
        make(tmp_path, name)


def test_log_and_files(tmp_path: Path) -> None:
    run = rundir.RunDir(make(tmp_path, complete=False))
    assert not run.complete
    run.log("phase started", 1.5, phase="latency")
    run.log("done")
    run.write_text("summary.json", "{}")
    run.close(complete=True)
    lines = (run.path / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"event": "phase started", "time_s": 1.5, "phase": "latency"}
    assert json.loads(lines[1]) == {"event": "done"}
    assert run.complete
    assert not list(run.path.glob(".*"))


def test_listed_oldest_first_and_others_left_out(tmp_path: Path) -> None:
    second = make(tmp_path, "a", NOON + timedelta(hours=1), complete=False)
    first = make(tmp_path, "b", NOON)
    (tmp_path / "not-a-run").mkdir()
    found = rundir.list_runs(tmp_path)
    assert [info.path for info in found] == [first, second]
    assert [info.complete for info in found] == [True, False]
    assert rundir.list_runs(tmp_path / "absent") == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x", "created_utc": 5}'])
def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, text: str) -> None:
    good = rundir.create(tmp_path, Identity("bench"), "")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text(text)
    damaged, found = rundir.list_runs(tmp_path)
    assert found.path == good.path
    assert (damaged.identity.name, damaged.identity.mode) == ("damaged", "unreadable")
    assert rundir.choose_for_pruning([damaged, found], keep=1) == []
    assert rundir.choose_for_pruning([damaged], incomplete=True) == [damaged]


def test_pruning_rules(tmp_path: Path) -> None:
    paths = [make(tmp_path, "a", NOON + timedelta(days=d)) for d in range(4)]
    torn = make(tmp_path, "b", NOON + timedelta(days=9), complete=False)
    runs = rundir.list_runs(tmp_path)

    def names(**rules: object) -> list[Path]:
        return [info.path for info in rundir.choose_for_pruning(runs, **rules)]  # type: ignore[arg-type]

    assert names() == []
    assert names(keep=1) == paths[:3]
    assert names(before=NOON + timedelta(days=1)) == paths[:1]
    assert names(incomplete=True) == [torn]
    assert names(keep=3, incomplete=True) == [paths[0], torn]


def test_only_runs_are_removed(tmp_path: Path) -> None:
    make(tmp_path)
    info = rundir.list_runs(tmp_path)[0]
    (info.path / "run.json").rename(tmp_path / "elsewhere")
    with pytest.raises(RunDirError, match="nothing removed"):
        rundir.remove(info)
    (tmp_path / "elsewhere").rename(info.path / "run.json")
    rundir.remove(info)
    assert not info.path.exists()


def test_diff_of_experiments() -> None:
    left = {"seed": 1, "link": {"rate": 10}, "configuration": [{"name": "prfaas", "t": 5}]}
    right = {"seed": 1, "link": {"rate": 20}, "configuration": [{"name": "prfaas", "t": 6}], "x": 1}
    assert rundir.diff(left, right) == [
        ("link.rate", 10, 20),
        ("configuration[prfaas].t", 5, 6),
        ("x", None, 1),
    ]


def test_identity_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="not a run directory"):
        rundir.RunDir(tmp_path).identity()
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(RunDirError, match="not readable"):
        rundir.RunDir(tmp_path).identity()
