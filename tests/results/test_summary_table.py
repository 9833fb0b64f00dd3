"""Phase summaries in paper units, the JSON form, and the table's text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from results import metrics, summarise, summary, table
from results.records import RequestRecord, Status
from results.summary import (
    ConfigurationSummary,
    LinkSummary,
    Measured,
    PhaseSummary,
    RunSummary,
    Scale,
    SummaryError,
)


def records(count: int = 100) -> list[RequestRecord]:
    made = []
    for i in range(count):
        record = RequestRecord(i, 0.1 * i, 1000, 16)
        record.sent_s = record.scheduled_s
        record.status = Status.SUCCEEDED
        record.attempts = 1
        record.prefill_cluster = "prfaas" if i % 2 else "pd"
        record.prefill_started_s = record.scheduled_s + 0.01
        record.prefill_finished_s = record.scheduled_s + 0.03
        record.delivered_s = record.scheduled_s + 0.06
        record.first_token_s = record.scheduled_s + 0.10
        record.last_token_s = record.first_token_s + 15 * 0.016
        record.ended_s = record.last_token_s
        record.tokens_received = 16
        made.append(record)
    made[-1].status, made[-1].failure = Status.FAILED, "truncated: no finish reason"
    made[-2].status, made[-2].sent_s = Status.UNSENT, None
    made[-3].verified, made[-4].verified = True, False
    made[-5].tokens_received = 10
    return made


def phase(**settings: object) -> PhaseSummary:
    requests = metrics.from_records(records(), remote=["prfaas"])
    return summarise.phase_summary("latency", requests, **settings)  # type: ignore[arg-type]


def test_counts() -> None:
    assert phase().counts == summary.Counts(
        offered=100, succeeded=98, failed=1, unsent=1, short=1, truncated=1, retried=0,
        one_chunk=0, offloaded=49, verified=1, mismatched=1,
    )  # fmt: skip


def test_paper_units() -> None:
    # One run second is 40 modelled seconds, one token stands for 64.
    found = phase(
        scale=Scale(time=40.0, tokens=64.0, bytes=1000.0),
        predicted={"ttft_mean": 4.1, "tpot_mean": 0.010, "offered_rate": 0.25},
        slo=metrics.Slo(ttft_s=0.2),
        link=summarise.LinkUse(np.array([0.0, 20.0]), np.array([0.0, 20e6]), 0.016),
    )
    assert found.ttft.mean.raw == pytest.approx(0.10)
    assert found.ttft.mean.paper == pytest.approx(4.0)
    assert found.ttft.mean.error == pytest.approx(4.0 / 4.1 - 1)
    assert found.tpot.p50.raw == pytest.approx(0.016)
    assert found.tpot.p50.paper == pytest.approx(0.010)
    assert found.offered_rate.raw == pytest.approx(10.0)
    assert found.offered_rate.paper == pytest.approx(0.25)
    assert found.goodput.paper == pytest.approx(0.98)
    assert found.offloaded_share.paper == pytest.approx(49 / 98)
    assert found.ttft_split.queue_s == pytest.approx(0.4)
    assert found.ttft_split.decode_admission_s == pytest.approx(1.6)
    assert found.egress.mean_gbps.raw == pytest.approx(0.008)
    assert found.egress.mean_gbps.paper == pytest.approx(0.008 * 1000 / 40)
    assert found.egress.mean_share.paper == pytest.approx(0.5)
    assert found.ttft.p99.paper is None  # 98 samples: below the floor of 100
    assert found.ttft.p99.n == 98


def test_without_a_window_there_is_no_throughput() -> None:
    assert phase().throughput == summary.NONE
    assert phase(window_s=(1.0, 9.0)).throughput.raw == pytest.approx(10.0)


def run() -> RunSummary:
    measured = ConfigurationSummary(
        "prfaas", 4, 3, 5, 19_400.0,
        capacity=Measured(0.0796, 3.184, 3.187, low=3.1, high=3.27),
        capacity_ratio=Measured(1.57, 1.57, 1.5692),
        phases=(phase(scale=Scale(40.0, 64.0, 1.0), predicted={"ttft_mean": 4.1}),),
    )  # fmt: skip
    base = ConfigurationSummary("homogeneous", None, 9, 3, capacity=Measured(0.05, 2.0, 2.031))
    return RunSummary(
        "bench", "emulate", (base, measured), load_rate=1.6248, scale=Scale(40.0, 64.0, 1.0),
        link=LinkSummary("tbf", 0.1, 100.0, 0.004), warnings=("one answer was short",),
    )  # fmt: skip


def test_json_round_trip_and_newer_keys_are_left_out() -> None:
    text = summary.to_json(run())
    assert summary.from_json(text) == run()
    data = json.loads(text)
    data["configurations"][0]["invented_later"] = 1
    assert summary.from_json(json.dumps(data)) == run()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1}'])
def test_what_is_no_summary_is_said(text: str) -> None:
    with pytest.raises(SummaryError, match="not a run summary"):
        summary.from_json(text)


def test_a_newer_version_is_refused() -> None:
    with pytest.raises(SummaryError, match="newer"):
        summary.from_json('{"schema_version": 99, "configurations": []}')


def test_plain_table() -> None:
    text = table.plain(run())
    lines = text.splitlines()
    assert lines[0].split() == ["homogeneous", "prfaas"]

    def row(label: str) -> list[str]:
        line = next(each for each in lines if each.startswith(label))
        return line[len(label) :].split("  ")

    assert [cell.strip() for cell in row("instances prfaas/p/d") if cell] == ["-/9/3", "4/3/5"]
    assert [c.strip() for c in row("capacity, req/s") if c] == ["2.00 [2.03]", "3.18 [3.19]"]
    assert [c.strip() for c in row("TTFT mean, s at 1.62 req/s") if c] == ["-", "4.00 [4.10]"]
    assert [c.strip() for c in row("TTFT P99, s") if c] == ["-", "-"]  # too few
    assert [c.strip() for c in row("TPOT mean, ms") if c] == ["-", "10.1"]
    assert [c.strip() for c in row("verified") if c] == ["-", "1 of 2"]
    assert [c.strip() for c in row("offered") if c] == ["0", "100"]
    assert [c.strip() for c in row("  unsent") if c] == ["0", "1"]
    assert "warning: one answer was short" in lines
    assert any("link: tbf, 100 Gbps modelled, RTT 160 ms modelled" in line for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (3.187, "3.19"), (0.049612, "0.0496"), (49.6, "49.6"),
     (19400.4, "19,400"), (-2.5, "-2.50"), (0.9999, "1.00"), (99.96, "100")],
)  # fmt: skip
def test_numbers(value: float | None, text: str) -> None:
    assert table.number(value) == text


def test_a_run_without_summary_says_where_its_rows_are(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    with pytest.raises(SummaryError, match="it has recorded nothing"):
        summary.read(tmp_path)
    for name in ("client-0", "client-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "requests.parquet").touch()
    with pytest.raises(SummaryError, match=r"results query \S+/client-0 \S+/client-1 \.\.\.`"):
        summary.read(tmp_path)
