"""`prfaas results` and `prfaas runs` on a small recorded run."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_recorder import META, record

from harness.cli.main import main
from results import rundir, summary
from results.recorder import Recorder
from results.rundir import Identity
from results.summary import ConfigurationSummary, RunSummary


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = rundir.create(tmp_path / "runs", Identity("bench", "simulate"), "seed = 1\n")
    recorder = Recorder(made.path, META)
    for i in range(20):
        recorder.request(record(i), "prfaas", "latency")
    recorder.request(record(20), "naive", "latency")
    recorder.close()
    run_summary = RunSummary("bench", "simulate", (ConfigurationSummary("prfaas", 4, 3, 5),))
    made.write_text("summary.json", summary.to_json(run_summary))
    made.close(complete=True)
    return made.path


def test_describe(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", "describe", str(run)]) == 0
    out = capsys.readouterr().out
    assert "requests.parquet" in out and "complete" in out and "seed: 7" in out
    assert main(["results", "describe", str(run), "--json"]) == 0
    found = {Path(each["path"]).stem: each for each in json.loads(capsys.readouterr().out)}
    assert found["requests"]["rows"] == 21
    assert found["requests"]["complete"] is True
    assert main(["results", "describe", str(run), "--schema"]) == 0
    assert "first token received - scheduled arrival" in capsys.readouterr().out


def test_a_torn_file_is_described_as_incomplete(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "requests.parquet"
    path.write_bytes(path.read_bytes() + b"half a row group")
    assert main(["results", "describe", str(path)]) == 0
    assert "16 bytes of an unfinished row group ignored" in capsys.readouterr().out


def test_query(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    sql = "select configuration, count(*) n, max(ttft_s) t from requests group by 1 order by 1"
    assert main(["results", "query", str(run), sql, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"configuration": "naive", "n": 1, "t": 2.0},
        {"configuration": "prfaas", "n": 20, "t": 2.0},
    ]
    assert main(["results", "query", str(run), "select nothing from requests"]) == 2
    assert "query: Binder Error" in capsys.readouterr().err
    assert main(["results", "query", str(run), "select max(ttft) from requests"]) == 2
    error = capsys.readouterr().err
    assert 'Candidate bindings: "ttft_s"' in error and error.count("\n") == 1
    assert main(["results", "query", str(run), " "]) == 2
    assert "query: empty" in capsys.readouterr().err
    assert (
        main(["results", "query", str(run), "select [1, 'inf'::double] a", "--format", "json"]) == 0
    )
    assert json.loads(capsys.readouterr().out) == [{"a": [1.0, None]}]
    absent = str(run.parent / "absent")
    assert main(["results", "query", absent, "select 1"]) == 2
    assert f"{absent}: no such directory" in capsys.readouterr().err
    assert main(["results", "query", str(run), "show tables", "--format", "csv"]) == 0
    assert "gaps" in capsys.readouterr().out.split()
    assert main(["results", "query", str(run), str(run), "select count(*) from requests"]) == 0
    assert capsys.readouterr().out.split()[-1] == "42"


@pytest.mark.parametrize("table", ["flows", "audit"])
def test_a_run_without_a_table_that_not_all_have_has_no_rows_of_it(
    run: Path, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb")
    plain = tmp_path / "plain"
    shutil.copytree(run, plain)
    (plain / f"{table}.parquet").unlink()
    for runs in ([plain, run], [run, plain]):
        words = ["results", "query", *map(str, runs), f"select count(*) from {table}"]
        assert main(words) == 0
        assert capsys.readouterr().out.split()[-1] == "0"
    assert main(["results", "query", str(plain), f"select count(*) from {table}"]) == 2
    assert f"Table with name {table} does not exist" in capsys.readouterr().err
    (plain / "requests.parquet").unlink()  # which every run has: not passed over
    assert main(["results", "query", str(run), str(plain), "select count(*) from requests"]) == 2
    assert "requests.parquet" in capsys.readouterr().err


def test_export_csv(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["results", "export", str(run), "--configuration", "prfaas"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 20
    assert (rows[0]["id"], rows[0]["ttft_s"], rows[0]["verified"]) == ("0", "2.0", "")
    assert float(rows[0]["tpot_s"]) == pytest.approx(0.025)


def test_export_with_the_keys_of_vllm(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["results", "export", str(run), "--format", "vllm", "--out", str(out)]
    assert main(arguments) == 2  # two configurations: one must be chosen
    assert main([*arguments, "--configuration", "prfaas", "--detailed"]) == 0
    found = json.loads(out.read_text())
    assert found["completed"] == 20
    assert found["num_prompts"] == 20
    assert found["total_output_tokens"] == 160
    assert found["total_input_tokens"] == sum(1000 + i for i in range(20))
    # First scheduled at 1 s, the last of 20 ends at 20 + 2 + 0.175 s.
    assert found["duration"] == pytest.approx(21.175)
    assert found["request_throughput"] == pytest.approx(20 / 21.175)
    assert found["output_throughput"] == pytest.approx(160 / 21.175)
    assert found["mean_ttft_ms"] == pytest.approx(2000.0)
    assert found["median_tpot_ms"] == pytest.approx(25.0)
    assert found["p99_ttft_ms"] is None  # 20 samples
    assert found["p90_itl_ms"] == pytest.approx(25.0)
    assert found["mean_e2el_ms"] == pytest.approx(2175.0)
    assert found["itls"][0] == pytest.approx([0.025] * 7)
    assert found["ttfts"][0] == pytest.approx(2.0)


def test_runs_list_diff_and_prune(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = run.parent
    other = rundir.create(root, Identity("bench", "simulate"), "seed = 2\n")
    other.write_text("summary.json", (run / "summary.json").read_text())
    assert main(["runs", "list", "--runs", str(root), "--json"]) == 0
    states = [each["complete"] for each in json.loads(capsys.readouterr().out)]
    assert sorted(states) == [False, True]
    assert main(["runs", "diff", str(run), str(other.path)]) == 0
    assert "seed" in capsys.readouterr().out
    assert main(["runs", "prune", "--runs", str(root)]) == 2
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    assert main(["runs", "prune", "--runs", str(root), "--incomplete"]) == 0
    assert other.path.exists()
    assert main(["runs", "prune", "--runs", str(root), "--incomplete", "--yes"]) == 0
    assert not other.path.exists()
    assert run.exists()
