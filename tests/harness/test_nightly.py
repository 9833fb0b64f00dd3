"""`prfaas nightly` on small git repositories whose speed is a number in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.bench.__main__ import measure
from engine.bench.cases import KDA_SHAPES, KdaShape
from harness.cli.main import main
from harness.errors import BadInput
from harness.nightly.judge import Mark, levels
from harness.nightly.run import CANDIDATE, PartFailed, PartResult, SampleLog, take_sample
from harness.nightly.suite import PartSpec, load_suite, pick
from results import history, summary
from results.history import Row
from results.summary import RunSummary

SUITE = """
baseline = "HEAD~1"
[[part]]
name = "speed"
command = ["{python}", "work.py"]
figures.rate = { path = "rates", unit = "req/s", better = "higher" }
figures.ms = { path = "latency.0.ms", unit = "ms" }
pairs = 4
confirm_pairs = 4
[[part]]
name = "exact"
command = ["{python}", "work.py", "exact"]
figures.ttft = { path = "ttft", unit = "s" }
exact = true
pairs = 1
confirm_pairs = 0
"""

#: Samples vary a little, from one call to the next, by a counter beside the repository.
WORK = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent
factor = float((here / "factor").read_text())
counter = pathlib.Path({counter!r})
n = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(n + 1))
if sys.argv[1:] == ["exact"]:
    if factor > 9:
        sys.exit("no such workload")
    print(json.dumps({{"ttft": 2.0}}))
else:
    wobble = 1 + 0.002 * (n * 7 % 5 - 2)
    print(json.dumps({{"rates": [99 / factor, 100 / factor * wobble, 101 / factor],
                      "latency": [{{"ms": 5 * factor * wobble}}]}}))
"""


def git(directory: Path, *arguments: str) -> None:
    environment = os.environ | {
        f"GIT_{who}_{what}": "t@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    subprocess.run(["git", "-C", str(directory), *arguments], check=True, env=environment,
                   capture_output=True)  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    where = tmp_path / "repository"
    where.mkdir()
    git(where, "init", "-q", "-b", "main")
    (where / "work.py").write_text(WORK.format(counter=str(tmp_path / "counter")))
    set_factor(where, 1.0)
    (tmp_path / "suite.toml").write_text(SUITE)
    return where


def set_factor(repository: Path, factor: float) -> None:
    (repository / "factor").write_text(str(factor))
    (repository / "note").write_text((repository / "factor").read_text() + os.urandom(4).hex())
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", f"factor {factor}")


def nightly(repository: Path, *more: str) -> int:
    root = repository.parent
    return main(
        ["nightly", "--suite", str(root / "suite.toml"), "--repository", str(repository),
         "--out", str(root / "nightly"), *more]
    )  # fmt: skip


def last_night(repository: Path) -> Path:
    return max(p.parent for p in (repository.parent / "nightly").glob("*/samples.jsonl"))


def test_nothing_changed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_factor(repository, 1.0)
    assert nightly(repository) == 0
    out = capsys.readouterr().out
    assert "no regression in 3 figures" in out
    assert "(HEAD~1), in turn on" in out and "This is the first night of this history" in out
    assert "exact: 1 figures exactly as in the baseline." in out
    night = last_night(repository)
    assert (night / "complete").exists()
    assert not (night / "baseline").exists()
    rows = history.read(repository.parent / "nightly" / "history")
    assert [(row.part, row.metric, row.outcome) for row in rows] == [
        ("exact", "ttft", "ok"), ("speed", "rate", "ok"), ("speed", "ms", "ok"),
    ]  # fmt: skip
    assert rows[1].base == pytest.approx(100.0, rel=0.01)


def test_a_baseline_has_modules_in_c_where_the_candidate_has(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fresh checkout has none, which would pass for slower code."""
    builds = repository.parent / "builds"
    setup = f"import os, sys; open({str(builds)!r}, 'a').write(os.getcwd() + sys.argv[2])"
    (repository / "setup.py").write_text(setup)
    set_factor(repository, 1.0)
    set_factor(repository, 1.0)
    monkeypatch.setattr("harness.nightly.run.native", lambda: "none")
    other = ("--out", str(repository.parent / "other"))
    assert nightly(repository, "--only", "exact", *other) == 0
    assert not builds.exists()
    monkeypatch.setattr("harness.nightly.run.native", lambda: "clock")
    assert nightly(repository, "--only", "exact") == 0
    assert builds.read_text() == str(last_night(repository) / "baseline") + "build_ext"
    (repository / "setup.py").write_text("import sys; sys.exit('no headers')")
    set_factor(repository, 1.0)
    assert (
        nightly(repository, "--only", "exact", "--baseline", "HEAD", "--out", str(builds) + "-2")
        == 2
    )
    assert "could not be built: no headers; PRFAAS_PURE_PYTHON=1" in capsys.readouterr().err


def test_a_slowdown_is_found_told_and_gives_exit_code_7(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = repository.parent / "step.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    set_factor(repository, 1.08)
    assert nightly(repository) == 7
    assert "**regression**: speed ms is worse by +8." in capsys.readouterr().out
    assert "2 regressed" in summary.read_text()
    night = last_night(repository)
    samples = [json.loads(line) for line in (night / "samples.jsonl").read_text().splitlines()]
    assert len([s for s in samples if s["part"] == "speed"]) == 16  # confirmed with more pairs
    assert [s["side"] for s in samples[:4]] == ["base", "candidate", "candidate", "base"]
    suites = ElementTree.fromstring((night / "junit.xml").read_text())
    assert [(s.get("name"), s.get("failures")) for s in suites] == [("speed", "2"), ("exact", "0")]
    page = (night / "report.html").read_text()
    assert "speed ms is worse by +8." in page and "<script" not in page


def test_a_failed_part_is_named_and_the_rest_goes_on(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_factor(repository, 1.0)
    set_factor(repository, 10.0)
    assert nightly(repository, "--only", "exact") == 4
    assert "**exact failed**: candidate, pair 1: exit code 1: no such workload" in (
        capsys.readouterr().out
    )
    night = last_night(repository)
    assert not (night / "complete").exists()
    suites = ElementTree.fromstring((night / "junit.xml").read_text())
    assert suites[0].get("errors") == "1"


def test_a_night_that_was_cut_off_is_resumed(repository: Path) -> None:
    set_factor(repository, 1.0)
    assert nightly(repository) == 0
    night = last_night(repository)
    lines = (night / "samples.jsonl").read_text().splitlines(keepends=True)
    (night / "samples.jsonl").write_text("".join(lines[:3]) + lines[3][:10])
    (night / "complete").unlink()
    counter = repository.parent / "counter"
    counter.write_text("0")
    assert nightly(repository, "--resume") == 0
    assert int(counter.read_text()) == 7  # of ten samples three were there
    assert nightly(repository, "--resume") == 2  # nothing left to resume
    assert nightly(repository, "--judge-only") == 0


def test_a_night_is_not_resumed_on_another_commit(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_factor(repository, 1.0)
    set_factor(repository, 10.0)
    assert nightly(repository, "--only", "exact") == 4
    set_factor(repository, 1.0)
    assert nightly(repository, "--resume") == 2
    assert "check that out again, or start a new night" in capsys.readouterr().err


def test_a_run_that_is_not_to_be_trusted_fails_with_its_verdict(tmp_path: Path) -> None:
    text = summary.to_json(RunSummary("bench", "emulate", (), verdict="pacing overruns"))
    (tmp_path / "summary.json").write_text(text)
    code = "import sys; print(open('summary.json').read()); sys.exit(5)"
    part = PartSpec(name="run", command=[sys.executable, "-c", code], reads="summary")
    with pytest.raises(PartFailed, match="exit code 5: pacing overruns"):
        take_sample(part, tmp_path)


def test_list_and_bad_arguments(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nightly(repository, "--list") == 0
    assert "speed: 4 pairs of {python} work.py" in capsys.readouterr().out
    assert nightly(repository, "--only", "none") == 2
    assert "the suite has speed, exact" in capsys.readouterr().err
    assert nightly(repository, "--baseline", "no-such-tag") == 2
    assert "has no commit 'no-such-tag' to compare with" in capsys.readouterr().err


def test_the_shipped_suite_is_valid_and_its_commands_exist() -> None:
    suite = load_suite()
    assert {part.name for part in suite.part} >= {
        "paper", "simulate-speed", "emulate", "engine", "transport", "load",
    }  # fmt: skip
    from harness.cli.main import COMMANDS

    for part in suite.part:
        if part.command[:3] == ["{python}", "-m", "harness"]:
            assert part.command[3] in COMMANDS


def test_the_engine_part_finds_its_figures_in_what_the_benchmark_measures() -> None:
    (part,) = [each for each in load_suite().part if each.name == "engine"]
    shapes = {label: KdaShape(8, 1, 8) for label in KDA_SHAPES}
    measured = measure("tiny", 16, seconds=0.0, kda_shapes=shapes)
    for figure in part.figures.values():
        assert pick(measured, figure.path) > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("part = 1", "part"),
        ("[[part]]\nname = 'a'\ncommand = ['x']", "figures are given exactly when"),
        ("[[part]]\nname = 'A b'\ncommand = ['x']\nreads = 'none'", "part.0.name"),
        ("[[part]]\nname = 'a'\ncommand = ['x']\nreads = 'none'", "must be timed"),
        ("oops = 1", "part: Field required"),
        ("part = [", "Invalid value"),
    ],
)
def test_bad_suites_are_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=r"suite\.toml") as caught:
        load_suite(path)
    assert says in str(caught.value)


def test_paths_into_json() -> None:
    data = {"a": [{"b": 1.5}, [3, 1, 2]], "t": True}
    assert pick(data, "a.0.b") == 1.5
    assert pick(data, "a.1") == 2.0
    for path in ("a.2", "x", "t", "a.0"):
        with pytest.raises(KeyError):
            pick(data, path)


def test_cpu_seconds_of_a_command_are_a_figure(tmp_path: Path) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    part = PartSpec(name="spin", command=[sys.executable, "-c", spin], reads="none", timed=True)
    assert 0.29 <= take_sample(part, tmp_path)["cpu_s"] < 3.0


def test_samples_read_back_and_figures_that_not_all_samples_have_are_left_out(
    tmp_path: Path,
) -> None:
    suite = load_suite()
    log = SampleLog(tmp_path / "samples.jsonl")
    log.add("engine", "base", {"a": 1.0, "b": 1.0})
    log.add("engine", CANDIDATE, {"a": 2.0})
    found: PartResult = log.load(suite)["engine"]
    assert found.pairs == 1
    assert found.metrics() == ["a"]


def row(night: int, worse: float = 0.0, **changes: object) -> Row:
    fields = {
        "night": f"2026050{night}T020000Z", "part": "p", "metric": "m", "unit": "s",
        "better": "lower", "base": 1.0, "candidate": 1.0 + worse, "worse": worse, "p": 0.5,
        "pairs": 8, "outcome": "ok", "base_commit": "b", "candidate_commit": "c", "host": "h",
    }  # fmt: skip
    return Row(**(fields | changes))  # type: ignore[arg-type]


def test_levels_start_anew_where_they_must() -> None:
    nights = [row(1), row(2, 0.05), row(3, 0.05, base_commit="b2"), row(4, base_commit="b2")]
    values, known = levels(nights, [])
    assert values == pytest.approx([1.0, 1.05, 1.05, 1.0])
    assert known == {2}
    assert levels(nights, [Mark("20260503T000000Z", "new torch")])[1] == {2}
    assert levels(nights, [Mark("20260504T000000Z", "new torch", part="other")])[1] == {2}
    assert levels(nights, [Mark("20260504T000000Z", "new torch", metric="m")])[1] == {2, 3}
    alone = [row(1, pairs=1), row(2, 0.1, pairs=1), row(3, pairs=1, host="h2")]
    assert levels(alone, []) == ([1.0, 1.1, 1.0], {2})


def test_history_of_an_older_version_reads_with_nulls(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    history.append(tmp_path, [row(2)])
    old = tmp_path / "part=p" / "night=20260501T020000Z"
    old.mkdir(parents=True)
    pq.write_table(pa.table({"metric": ["m"], "candidate": [3.0]}), old / "data.parquet")
    rows = history.read(tmp_path)
    assert [(r.night, r.candidate, r.base, r.host) for r in rows] == [
        ("20260501T020000Z", 3.0, None, None),
        ("20260502T020000Z", 1.0, 1.0, "h"),
    ]
    duckdb = pytest.importorskip("duckdb")
    glob = tmp_path / "*" / "*" / "data.parquet"
    found = duckdb.sql(
        f"select part, count(*) from read_parquet('{glob}', hive_partitioning=true, "
        "union_by_name=true) group by part"
    ).fetchall()
    assert found == [("p", 2)]


def test_a_night_written_again_replaces_itself(tmp_path: Path) -> None:
    history.append(tmp_path, [row(1), row(1, metric="n")])
    history.append(tmp_path, [row(1, 0.5)])
    assert [r.worse for r in history.read(tmp_path)] == [0.5]
