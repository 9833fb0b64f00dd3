"""`prfaas profile`: figures of a tiny engine, and a file that the harness reads."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from engine import profiler
from engine.measuring import Repeats
from harness.cli import main
from harness.profiles import load_profile


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(profiler, "REPEATS", Repeats(warm_ups=0, runs=1, seconds=0.0))


def test_measures_and_writes_a_profile(tmp_path, capsys):
    path = tmp_path / "tiny.toml"
    arguments = [
        "--lengths",
        "16,64",
        "--batches",
        "1,4",
        "--contexts",
        "20",
        "--page-tokens",
        "16",
    ]
    code = main(["profile", "--model", "tiny", *arguments, "--json", "--out", str(path)])
    assert code == 0
    figures = json.loads(capsys.readouterr().out)
    assert [point["tokens"] for point in figures["prefill"]] == [16, 64]
    assert [point["batch"] for point in figures["decode"]] == [1, 4]
    assert all(point["mfu"] > 0 for point in figures["prefill"])
    assert all(point["roofline"] > 0 for point in figures["decode"])
    profile = load_profile(str(path))
    # Three KDA layers of the tiny shape, fp32: 2 heads x 24 x 16 states, 3 x 112 inputs each.
    assert profile.fixed_bytes == 3 * (2 * 24 * 16 + 3 * 2 * (16 + 16 + 24)) * 4
    assert profile.per_token_bytes == (16 + 8) * 4
    assert profile.prefill_s(64) >= profile.prefill_s(16) > 0
    assert profile.decode_step_s(4, 80) > 0
    assert profile.provenance["prefill"].origin == "measured"
    assert profile.provenance["prefill"].commit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "64"], "needs two lengths or more"),
        (["--batches", "1,x"], "--batches 1,x: whole numbers >= 1"),
        (["--model", "huge"], "model shape 'huge' is unknown"),
        (["--threads", "0"], "--threads 0: must be at least 1"),
        (["--page-tokens", "0"], "--page-tokens 0: must be at least 1"),
        (["--out", "no-such-folder/x.toml"], "there is no folder no-such-folder"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
