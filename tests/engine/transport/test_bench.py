"""The bench measures what it says: every contestant in every round, ratios round by round."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.transport.bench import Measure, Place, Plan, Result, run_bench
from engine.transport.pacing import UNPACED, host_congestion
from harness.cli import main


async def local(port: int) -> tuple[str, int]:
    return "127.0.0.1", port


LOOPBACK = Place("loopback", "loopback", "127.0.0.1", local)


def test_ratio_is_the_median_of_ratios_of_rounds() -> None:
    measures = {"raw": Measure([10.0, 20.0, 5.0]), "single": Measure([9.0, 10.0, 5.0])}
    result = Result(LOOPBACK, Plan(), measures, None)
    assert result.ratio("single", "raw") == 0.9
    assert result.ratio("single", "iperf3") is None


async def test_every_contestant_runs_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # without iperf3
    plan = Plan(size_bytes=4 << 20, layers=4, rounds=2)
    result = await run_bench(LOOPBACK, plan)
    assert set(result.measures) == {"raw", "single", "layers"}
    for measure in result.measures.values():
        assert len(measure.gbps) == 2
        assert min(measure.gbps) > 0
    overlap = result.overlap
    assert overlap is not None
    assert overlap.transfer_s == pytest.approx(0.6 * overlap.prefill_s)
    assert overlap.layer_wise_s >= overlap.prefill_s


async def test_iperf3_runs_under_the_host_s_control_and_under_that_of_data_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def iperf3(
        place: Place, seconds: float, connections: int, congestion: str = ""
    ) -> tuple[float, float]:
        asked.append(congestion)
        return 1.0, 1.0

    monkeypatch.setattr("engine.transport.bench.iperf3_gbps", iperf3)
    plan = Plan(size_bytes=4 << 20, layers=4, rounds=1, overlap=False)
    result = await run_bench(LOOPBACK, plan)
    assert result.congestion in {host_congestion(), *UNPACED}
    monkeypatch.setattr("engine.transport.bench.host_congestion", lambda: "another")
    asked.clear()
    result = await run_bench(LOOPBACK, plan)
    assert asked == ["", result.congestion]
    assert result.yardsticks == ["raw", "iperf3", f"iperf3 -C {result.congestion}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--at", "tbf"], "--at tbf needs --rate-gbps"),
        (["--mib", "1", "--layers", "300"], "does not divide into 300 layers"),
        (["--mib", "64", "--layers", "8192"], "--layers 8192: at most 4096"),
        (["--lanes", "100000"], "--lanes 100000: at most 256"),
        (["--chunk-kib", "5"], "--chunk-kib 5: a multiple of 4 up to 8192"),
        (["--chunk-kib", "16384"], "--chunk-kib 16384: a multiple of 4 up to 8192"),
        (["--mib", "99999999"], "--mib 99999999: both ends hold one cache"),
        (["--rate-gbps", "1"], "--rate-gbps and --rtt-ms are for --at netem"),
        (["--at", "veth", "--rtt-ms", "4"], "--rate-gbps and --rtt-ms are for --at netem"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["transport", "bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_certs_command(tmp_path: Any, capsys: Any) -> None:
    assert main(["certs", "--out", str(tmp_path / "c"), "--json", "a", "b"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["identities"]) == {"a", "b"}
    assert main(["certs", "--out", str(tmp_path / "c"), "../a"]) == 2
    assert "identity '../a'" in capsys.readouterr().err
