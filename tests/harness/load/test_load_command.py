"""`prfaas load` as a user runs it, against the stub in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.cli.main import main

FAST = ("--input-len", "20", "--output-len", "4", "--quiet")
#: What a busy machine may make of the client is not what these tests are about.
UNJUDGED = (0, 5)


def load(out: Path, *options: str) -> int:
    return main(["load", "--out", str(out), *options])


def only_run(out: Path) -> Path:
    (run,) = out.iterdir()
    return run


def summary(run: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return made


def phase(run: Path, at: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = summary(run)["configurations"][0]["phases"][at]
    return made


def test_a_run_leaves_a_whole_directory(
    tmp_path: Path, stub_url: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = stub_url("--ttft-ms", "5", "--itl-ms", "1")
    code = load(
        tmp_path, "--base-url", url, "--request-rate", "200", "--num-prompts", "100", *FAST,
        "--num-warmups", "7", "--goodput", "ttft:60000", "--save-result", "--processes", "2",
    )  # fmt: skip
    assert code in UNJUDGED
    run = only_run(tmp_path)
    assert (run / "complete").exists()
    figures = phase(run)
    assert figures["counts"]["offered"] == figures["counts"]["succeeded"] == 100
    assert figures["goodput"]["raw"] == 1.0
    assert figures["ttft"]["p90"]["raw"] >= 0.005
    requests = pq.read_table(run / "requests.parquet")
    phases = requests["phase"].to_pylist()
    assert (phases.count("load"), phases.count("warmup")) == (100, 7)
    assert requests["tokens_received"].to_pylist() == [4] * 107
    assert len(set(requests["id"].to_pylist())) == 107
    assert pq.read_metadata(run / "tokens.parquet").num_rows == 107
    assert pq.read_metadata(run / "client.parquet").num_rows == 107
    result = json.loads((run / "result.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (100, 0, 400)
    assert result["mean_itl_ms"] > 0
    printed = capsys.readouterr().out
    assert "100 offered = 100 succeeded + 0 failed + 0 unsent" in printed
    assert "ITL mean" in printed and "verdict" in printed and "wrote" in printed
    # Other commands read it.
    assert main(["results", "describe", str(run)]) == 0
    assert "INCOMPLETE" not in capsys.readouterr().out


def test_a_closed_loop_with_repeats_and_refusals(
    tmp_path: Path, stub_url: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = stub_url("--refuse-share", "0.25", "--tokens-per-chunk", "2")
    code = load(
        tmp_path, "--url", url, "--concurrency", "4", "--request-count", "40", "--repeats", "2",
        "--endpoint-type", "chat", "--ignore-eos", *FAST, "--save-result",
    )  # fmt: skip
    assert code in UNJUDGED
    run = only_run(tmp_path)
    whole, first, second = (phase(run, at) for at in range(3))
    assert (whole["name"], first["name"], second["name"]) == ("load", "load-1", "load-2")
    assert (whole["counts"]["offered"], whole["counts"]["succeeded"]) == (80, 60)
    mean = whole["achieved_rate"]
    assert mean["low"] < mean["raw"] < mean["high"]
    assert mean["raw"] == pytest.approx(
        (first["achieved_rate"]["raw"] + second["achieved_rate"]["raw"]) / 2
    )
    for name in ("load-1", "load-2"):
        result = json.loads((run / f"result-{name}.json").read_text())
        assert (result["num_prompts"], result["completed"]) == (40, 30)
    notes = " ".join(summary(run)["warnings"])
    assert "several tokens a chunk" in notes
    assert summary(run)["extra"]["failures"] == {"HTTP 503: overloaded": 20}
    printed = capsys.readouterr().out
    assert "chunk gap" in printed and "ITL" not in printed.split("note")[0]


def test_a_search_tries_rates_and_reports_them(
    tmp_path: Path,
    stub_url: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("harness.load.execute.client_limits", lambda *_: [])
    code = load(
        tmp_path, "--base-url", stub_url(), "--request-rate", "40", "--num-prompts", "30", *FAST,
        "--goodput", "ttft:600000", "--search", "--search-share", "0.7", "--search-max-trials", "3",
        "--save-result",
    )  # fmt: skip
    assert code == 0
    found = summary(only_run(tmp_path))
    trials = found["extra"]["search"]["trials"]
    # All meet a limit of ten minutes, so the rate doubles to the end.
    assert [each["rate"] for each in trials] == [40, 80, 160]
    assert [(each["met"], each["offered"]) for each in trials] == [(30, 30)] * 3
    assert found["configurations"][0]["slo_rate"]["raw"] == 160
    result = json.loads((only_run(tmp_path) / "result.json").read_text())
    assert (result["request_rate"], result["num_prompts"]) == (160, 30)
    assert found["latency_phase"] == "search-3"
    assert "160 req/s met it for 70% of the requests, - did not" in capsys.readouterr().out


def test_goodput_below_what_was_asked_is_exit_code_6(
    tmp_path: Path, stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.load.execute.client_limits", lambda *_: [])
    url = stub_url("--ttft-ms", "30")
    code = load(
        tmp_path, "--base-url", url, "--num-prompts", "5", *FAST,
        "--goodput", "ttft:1", "--min-goodput", "0.9",
    )  # fmt: skip
    assert code == 6
    assert "goodput 0.000 is below 0.9" in summary(only_run(tmp_path))["verdict"]


def test_a_limited_client_is_exit_code_5(
    tmp_path: Path, stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.load.execute.client_limits", lambda *_: ["it was blocked"])
    code = load(tmp_path, "--base-url", stub_url(), "--num-prompts", "5", *FAST)
    assert code == 5
    assert summary(only_run(tmp_path))["verdict"] == "client-limited: it was blocked"


def test_nobody_there_is_exit_code_3_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = load(
        tmp_path, "--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0", *FAST
    )
    assert code == 3
    assert list(tmp_path.iterdir()) == []
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_ctrl_c_drains_and_keeps_what_there_is(
    tmp_path: Path, stub_url: Callable[..., str]
) -> None:
    url = stub_url("--ttft-ms", "300")
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "load", "--out", str(tmp_path), "--base-url", url,
         "--request-rate", "20", "--num-prompts", "20000", "--input-len", "20",
         "--output-len", "4"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    # The first progress line says that requests are under way.
    assert "in flight" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    run = only_run(tmp_path)
    assert not (run / "complete").exists()
    counts = phase(run)["counts"]
    assert counts["offered"] == 20_000
    assert counts["succeeded"] + counts["failed"] + counts["unsent"] == 20_000
    assert counts["succeeded"] > 0 and counts["failed"] == 0
    assert "interrupted" in out


def under_way(out: Path, url: str, *options: str) -> subprocess.Popen[str]:
    """A load that has sent requests."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "load", "--out", str(out), "--base-url", url,
         "--max-concurrency", "4", "--duration", "600", *FAST[:2], *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert "in flight" in process.stderr.readline()
    return process


def test_a_stopped_closed_loop_ends_although_its_requests_do_not(
    tmp_path: Path, stub_url: Callable[..., str]
) -> None:
    """As by `timeout -s INT`, which signals twice within milliseconds."""
    process = under_way(tmp_path, stub_url("--ttft-ms", "1500"), "--output-len", "4")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    counts = phase(only_run(tmp_path))["counts"]
    assert counts["offered"] == counts["succeeded"] > 0
    assert "killed" not in out


def test_a_second_interrupt_kills_the_clients_and_keeps_what_there_is(
    tmp_path: Path, stub_url: Callable[..., str]
) -> None:
    url = stub_url("--ttft-ms", "10", "--itl-ms", "100000")
    process = under_way(tmp_path, url, "--output-len", "2")
    (client,) = client_pids(process)
    # Of two that a busy machine hands on at once the second is the first one's echo.
    while running(client):
        process.send_signal(signal.SIGINT)
        until = time.monotonic() + 1.0
        while running(client) and time.monotonic() < until:
            time.sleep(0.02)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the clients were killed: interrupted twice" in out
    run = only_run(tmp_path)
    assert summary(run)["verdict"] == "interrupted"
    assert not (run / "complete").exists() and not (run / "client-0").exists()
    assert pq.read_metadata(run / "requests.parquet").num_rows == 0


def test_clients_that_are_overdue_are_killed_and_make_the_run_incomplete(
    tmp_path: Path,
    stub_url: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("harness.load.clients.longest_s", lambda spec, phase: 2.0)
    monkeypatch.setattr("harness.load.clients._LAST_WORDS_S", 1.0)
    url = stub_url("--ttft-ms", "10", "--itl-ms", "100000")
    code = load(tmp_path, "--url", url, "--concurrency", "4", "--duration", "600", *FAST)
    assert code == 4
    run = only_run(tmp_path)
    assert not (run / "complete").exists()
    said = "the clients were killed: a phase of 600 s had not ended after 2 s"
    assert summary(run)["verdict"] == f"incomplete: {said}"
    assert said in capsys.readouterr().out


def test_a_killed_parent_takes_its_clients_along(
    tmp_path: Path, stub_url: Callable[..., str]
) -> None:
    url = stub_url()
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", "load", "--out", str(tmp_path), "--base-url", url,
         "--request-rate", "20", "--num-prompts", "100000", *FAST[:4]],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    process.stderr.readline()
    (client,) = client_pids(process)
    process.kill()
    process.wait()
    process.stderr.close()
    part = only_run(tmp_path) / "client-0" / "requests.parquet"
    until = time.monotonic() + 30.0
    # The client closes its files in order when its parent is gone: they are readable and marked.
    metadata: dict[bytes, bytes] = {}
    while time.monotonic() < until and b"prfaas.complete" not in metadata:
        time.sleep(0.2)
        try:
            metadata = pq.read_schema(part).metadata or {}
        except pa.ArrowException:
            continue
    assert metadata[b"prfaas.complete"] == b"false"
    assert pq.read_metadata(part).num_rows > 0
    while time.monotonic() < until and running(client):
        time.sleep(0.1)
    assert not running(client)


def client_pids(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def running(pid: int) -> bool:
    """Whether it exists and is more than an entry that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_keys_are_nowhere_in_the_run(
    tmp_path: Path, stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [
        "load", "--out", str(tmp_path), "--base-url", stub_url("--api-key", "s3cret"),
        "--num-prompts", "3", "--header", "X-Api-Key: hunter2", "--header=Cookie: hunter2",
        "--extra-body", '{"api_token": "hunter2"}', *FAST,
    ]  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    monkeypatch.setattr(sys, "argv", ["prfaas", *options])
    assert main(options) in UNJUDGED
    for path in only_run(tmp_path).rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert b"hunter2" not in data and b"s3cret" not in data, path
    assert phase(only_run(tmp_path))["counts"]["succeeded"] == 3


def test_dry_run_resolves_and_sends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = load(
        tmp_path, "--base-url", "http://127.0.0.1:9", "--request-rate", "10", "--num-prompts", "50",
        "--dry-run", "--header", "Authorization: Bearer hunter2", *FAST,
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert code == 0
    assert list(tmp_path.iterdir()) == []
    assert "would send 50 requests" in printed
    assert "tokens a request: 20.0 in, 4.0 out" in printed
    assert "hunter2" not in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--goodput", "ttft"), "NAME:MILLISECONDS"),
        (("--goodput", "speed:3"), "ttft, tpot, e2e"),
        (("--extra-body", "[1]"), "JSON object"),
        (("--header", "nothing"), "NAME: VALUE"),
        (("--search",), "--request-rate"),
        (("--search", "--request-rate", "1"), "--goodput"),
        (("--target", "vllm-pair"), "--prefill-url"),
        (("--policy", "naive"), "vllm-pair"),
        (
            (
                "--target",
                "vllm-pair",
                "--prefill-url",
                "http://p",
                "--decode-url",
                "http://d",
                "--compare",
            ),
            "--remote-prefill-url",
        ),
        (
            (
                *("--target", "sglang-pair", "--prefill-url", "http://p", "--decode-url"),
                *("http://d", "--bootstrap-port", "1", "--bootstrap-port", "2"),
            ),
            "found 2 for 1 prefill servers",
        ),
        (("--processes", "4", "--max-concurrency", "2"), "at least one"),
        (("--processes", "4", "--max-connections", "2"), "at least one"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-start-rps"),
        (("--trace", "t.jsonl", "--input-len", "5"), "lengths of its own"),
        (("--workload", "sessions", "--sessions", "closed"), "--request-rate"),
        (("--backend", "chat", "--prompt-vocab", "10"), "completions"),
        (("--set", "nothing"), "KEY=VALUE"),
        (("--workload", "lognormal", "--input-len", "5"), "--set"),
        (("--max-concurrency", "0"), "max_concurrency"),
        (("--duration", "5"), "--num-prompts or --max-concurrency"),
        (("--link-interface", "no-such-link"), "no-such-link"),
        (("--trace", "/no/such/file"), "/no/such/file"),
        (("--num-prompts", "0"), "--num-prompts 0: needs at least 1"),
        (("--seed", "-1"), "--seed -1: needs at least 0"),
        (("--endpoint", "v1/completions"), "begins with /"),
        (("--input-len", "0"), "--input-len 0: needs at least 1"),
        (("--output-len", "0"), "--output-len 0: needs at least 1"),
        (("--input-len", "999999999999"), "at most 2147483647"),
        (("--prompt-vocab", "0"), "--prompt-vocab 0: needs at least 2"),
        (("--temperature", "nan"), "--temperature nan"),
        (("--temperature", "-1"), "--temperature -1"),
        (("--min-goodput", "2"), "--min-goodput 2: needs a share of 0 to 1"),
        (("--min-goodput", "nan"), "0 to 1"),
        (
            (
                *("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "0"),
                *("--ramp-up-end-rps", "0"),
            ),
            "above 0",
        ),
    ],
)
def test_bad_input_is_one_line(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = list(options)
    if not {"--trace", "--target"} & set(options):
        arguments = ["--base-url", "http://127.0.0.1:9", *options]
    extra = () if "--link-interface" in options else ("--dry-run",)
    assert load(tmp_path, *arguments, *extra) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


PAIR = (
    *("--target", "vllm-pair", "--prefill-url", "http://p", "--remote-prefill-url", "http://r"),
    *("--decode-url", "http://d"),
)
RATE = ("--request-rate", "5")
RAMP = (*("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9"),)
SEARCH = ("--search", *RATE, "--goodput", "ttft:9")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefill-url", "http://p"), "--prefill-url: not of --target openai"),
        (("--decode-url", "http://d"), "--decode-url: not of --target openai"),
        (("--remote-prefill-url", "http://p"), "--remote-prefill-url: not of --target openai"),
        (("--target", "llm-d", "--decode-url", "http://d"), "not of --target llm-d"),
        (("--threshold-tokens", "9"), "--threshold-tokens: not of --target openai"),
        ((*PAIR, "--base-url", "http://b"), "--base-url: not of --target vllm-pair"),
        ((*PAIR, "--bootstrap-port", "9"), "--bootstrap-port: not of --target vllm-pair"),
        ((*PAIR, "--policy", "naive", "--threshold-tokens", "9"), "naive has no threshold"),
        ((*PAIR, "--policy", "naive", "--compare"), "a comparison runs all policies"),
        ((*PAIR, "--compare", *SEARCH), "--compare, --search"),
        ((*PAIR[:4], *PAIR[6:], "--policy", "naive"), "needs --remote-prefill-url"),
        ((*PAIR[:2], *PAIR[4:], "--policy", "homogeneous"), "needs --prefill-url"),
        (("--worker-model", "small"), "--worker-model: not of --target openai"),
        (("--target", "in-process", "--no-stream"), "--no-stream: not of --target in-process"),
        (("--target", "in-process", "--max-connections", "2"), "--max-connections: not of"),
        ((*SEARCH, "--repeats", "2"), "--search, --repeats"),
        ((*SEARCH, "--min-goodput", "0.5"), "--search, --min-goodput"),
        ((*SEARCH, "--search-max-trials", "0"), "--search-max-trials 0: needs at least 1"),
        ((*SEARCH, "--search-precision", "0"), "--search-precision 0: needs more than 0"),
        (("--search-share", "0.5"), "--search-share: has no effect without --search"),
        (("--ready-check-timeout-sec", "nan"), "needs a number of at least 0"),
        ((*RATE, *RAMP), "a ramp has rates of its own"),
        ((*RAMP, "--arrival", 'shape={kind="on_off"}'), "both shape the rate"),
        (("--ramp-up-end-rps", "5"), "has no effect without --ramp-up-strategy"),
        (("--think-time", "5"), "has no effect without --sessions closed"),
        ((*RATE, "--sessions", "closed"), "--workload sessions"),
        (("--trace-format", "burstgpt"), "has no effect without --trace"),
        (("--trace", "t.jsonl", "--workload", "drift"), "the requests are the trace's"),
        (("--burstiness", "0.5"), "--request-rate"),
        (("--request-rate", "inf", "--burstiness", "inf"), "--request-rate"),
        (("--trace", "t.jsonl", "--burstiness", "0.5"), "--request-rate"),
        (("--arrival", "exact_rate=true"), "--request-rate"),
        ((*RATE, "--burstiness", "2", "--arrival", "process=constant"), "give one of them"),
        (("--trace", "t.jsonl", *RATE, "--arrival", "process=trace"), "leave --request-rate out"),
        (("--no-stream", "--goodput", "tpot:9"), "has no TPOT"),
        (("--goodput", "ttft:9", "ttft:8"), "'ttft' is there twice"),
        (("--header", "A: 1", "--header", "a=2"), "'a' is there twice"),
        (("--extra-body", '{"max_tokens": 5}'), "'max_tokens' comes from --output-len"),
        (("--extra-body", '{"stream": false}'), "'stream' comes from --stream"),
        (("--insecure", "--ca-file", "x.pem"), "no certificate would be verified"),
        (("--result-filename", "x.json"), "without --save-result"),
        (("--save-result", "--result-filename", "a/x.json"), "needs the name of a file"),
        (("--save-result", "--result-filename", "summary.json"), "a file of every run"),
        (("--quiet", "--link-interface", "lo"), "--quiet"),
        (("--json", "--explain"), "--json"),
    ],
)
def test_a_flag_that_would_have_no_effect_is_refused(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(tmp_path, *options, "--dry-run") == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_ramp_over_a_trace_has_the_ramps_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1]}
    trace.write_text("".join(json.dumps(row | {"timestamp": k}) + "\n" for k in range(100)))
    ramp = (
        *("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9"),
        *("--ramp-up-duration", "20", "--trace", str(trace), "--dry-run"),
    )
    assert load(tmp_path / "out", *ramp) == 0
    # 100 requests at 5/s on average: at the end's 9/s they would take 11 s.
    span_s = capsys.readouterr().out.partition("requests, over ")[2].split()[0]
    assert float(span_s) > 15


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (PAIR, "to http://p, http://r, http://d /v1/completions"),
        (("--target", "in-process"), "to a worker in this process, of model tiny"),
    ],
)
def test_a_dry_run_says_where_requests_would_go(
    target: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(tmp_path, *target, "--dry-run") == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--base-url", "nowhere"), "URL 'nowhere'"),
        (("--base-url", "https://h", "--ca-file", "/no/such.pem"), "--ca-file /no/such.pem"),
        (("--proxy", "h:1"), "--proxy 'h:1'"),
    ],
)
def test_a_dry_run_finds_what_a_client_would_refuse(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(tmp_path, *options, "--dry-run") == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_compare_runs_the_four_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers in a process of their own, since the command has its own loop."""
    script = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from fakes import VllmDecode, VllmPrefill\n"
        "async def main():\n"
        "    far, near = VllmPrefill(), VllmPrefill()\n"
        "    near.kept = far.kept\n"
        "    async with far, near, VllmDecode(far) as decode:\n"
        "        print(far.url, near.url, decode.url, flush=True)\n"
        "        await asyncio.to_thread(sys.stdin.read)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as servers:
        assert servers.stdout is not None and servers.stdin is not None
        far, near, decode = servers.stdout.readline().split()
        code = load(
            tmp_path, "--target", "vllm-pair", "--remote-prefill-url", far, "--prefill-url", near,
            "--decode-url", decode, "--threshold-tokens", "100", "--compare", *FAST,
            "--num-prompts", "6", "--max-concurrency", "2", "--save-result", "--explain",
        )  # fmt: skip
        servers.stdin.close()
    assert code in UNJUDGED
    printed = capsys.readouterr().out
    assert "sample floors" in printed
    for name in ("homogeneous", "naive", "balanced", "prfaas"):
        assert name in printed
        (run,) = tmp_path.glob(f"load-{name}-*")
        assert json.loads((run / "result.json").read_text())["completed"] == 6
        assert phase(run)["counts"]["succeeded"] == 6
        sides = set(pq.read_table(run / "requests.parquet")["prefill_cluster"].to_pylist())
        wanted = {"homogeneous": {"pd"}, "naive": {"prfaas"}, "prfaas": {"pd"}}
        assert sides == wanted.get(name, sides)
