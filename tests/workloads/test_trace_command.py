"""`prfaas trace` end to end: files in, files and figures out, errors as one line and code 2."""

import json

import pytest

from harness.cli.main import main
from workloads.request import Request
from workloads.traces.readers import open_trace
from workloads.traces.writers import save


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    save(path, [Request(n, 3.0 * (n // 2), 600, 7, (0, n + 1), 512) for n in range(60)])
    return str(path)


def test_describe(trace, capsys):
    assert main(["trace", "describe", trace]) == 0
    printed = capsys.readouterr().out
    assert "60 over 87.0 s" in printed and "are multiples of 3 s" in printed
    assert main(["trace", "describe", trace, "--json", "--threshold", "80"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["quantum_s"]) == (60, 3.0)
    assert found["above_threshold"] == pytest.approx(1)
    assert found["hit_share"] == pytest.approx(59 * 512 / 36_000)


def test_convert_slice_and_scale_chain(trace, tmp_path, capsys):
    a, b, c = (str(tmp_path / name) for name in ("a.parquet", "b.jsonl.gz", "c.parquet"))
    assert main(["trace", "convert", trace, a, "--dequantise", "3"]) == 0
    assert len({r.arrival_s for r in open_trace(a)}) == 60
    assert main(["trace", "slice", a, b, "--start", "9", "--end", "30", "--count", "5"]) == 0
    assert [r.block_ids[1] for r in open_trace(b)] == [7, 8, 9, 10, 11]
    assert main(["trace", "scale", a, c, "--slow-down", "2", "--token-scale", "64"]) == 0
    scaled = list(open_trace(c))
    assert (scaled[0].input_tokens, scaled[0].block_tokens) == (10, 8)
    capsys.readouterr()
    assert main(["trace", "describe", c, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert len(notes) == 3 and "spread at random over the 3 s" in notes[0]


def test_synthesize(tmp_path, capsys):
    out = str(tmp_path / "s.parquet")
    words = ["trace", "synthesize", out, "--kind", "sessions", "--rate", "2", "--count", "300"]
    words += ["--set", "mean_turns=8", "--set", "first_message.mu=9.2"]
    words += ["--arrival", "process=gamma", "--arrival", "burstiness=0.2", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 300
    assert len(list(open_trace(out))) == 300


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["describe", "none.jsonl"], "none.jsonl: cannot be read"),
        (["synthesize", "x.parquet", "--rate", "1"], "needs --count or --duration"),
        (["synthesize", "x.parquet", "--rate", "1", "--count", "1", "--set", "a"], "KEY=VALUE"),
        (["synthesize", "x.parquet", "--rate", "1", "--count", "1", "--set", "a=1"], "unknown key"),
        (["synthesize", "x.csv", "--rate", "1", "--count", "1"], "needs a name that ends in"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["trace", "--help"])
    assert "prfaas trace synthesize day.parquet --kind drift" in capsys.readouterr().out
