"""A phase's figures from records, as literals."""

import numpy as np
import pytest

from harness.experiment import load_experiment
from harness.measure import PhaseData, phase_requests, summarise_phase
from harness.phases import Phase
from harness.sampling import EgressSamples
from harness.scale import UNSCALED, Scale
from results.records import RequestRecord, Status

PREDICTED = {"throughput": 1.0, "egress_mean_share": 0.1}


def record(i: int, at_s: float, first_s: float, last_s: float, tokens: int) -> RequestRecord:
    return RequestRecord(
        i,
        at_s,
        1000,
        tokens,
        sent_s=at_s,
        status=Status.SUCCEEDED,
        attempts=1,
        prefill_cluster="prfaas" if i % 2 else "pd",
        prefill_started_s=at_s + 0.5,
        prefill_finished_s=first_s - 0.2,
        delivered_s=first_s - 0.1,
        admitted_s=first_s,
        first_token_s=first_s,
        last_token_s=last_s,
        ended_s=last_s,
        tokens_received=tokens,
    )


def data_of(records: list[RequestRecord]) -> PhaseData:
    return PhaseData(
        Phase("latency", 1.0, 10.0, 100.0),
        records,
        EgressSamples([0.0, 55.0, 110.0], [0, 55 * 10**9, 110 * 10**9]),
    )


def test_figures_are_of_the_window_and_counts_of_all() -> None:
    records = [record(i, float(i), i + 2.0, i + 2.0 + 0.025 * 9, 10) for i in range(110)]
    records.append(RequestRecord(110, 109.5, 1000, 10, status=Status.FAILED, failure="x"))
    summary = summarise_phase(
        data_of(records), load_experiment("paper"), UNSCALED, 100e9, PREDICTED
    )
    assert (summary.counts.offered, summary.counts.succeeded, summary.counts.failed) == (
        111,
        110,
        1,
    )
    assert summary.ttft.mean.paper == pytest.approx(2.0)
    assert summary.ttft.mean.n == 100
    assert summary.tpot.p90.paper == pytest.approx(0.025)
    assert summary.throughput.paper == pytest.approx(1.0)
    assert summary.goodput.raw == pytest.approx(100 / 101)
    assert summary.egress.mean_gbps.paper == pytest.approx(8.0)
    assert summary.egress.mean_share.paper == pytest.approx(0.08)
    assert summary.egress.mean_share.predicted == pytest.approx(0.10)
    assert summary.offloaded_share.raw == 0.5
    split = summary.ttft_split
    assert (split.queue_s, split.prefill_s) == (pytest.approx(0.5), pytest.approx(1.3))
    assert (split.transfer_s, split.decode_admission_s) == (pytest.approx(0.1), pytest.approx(0.1))


def test_paper_units_follow_the_scale() -> None:
    scale = Scale(time_scale=10.0, token_scale=64, byte_scale=1000.0)
    # 16 engine tokens, 0.16 s apart, stand for 1,024 tokens at 25 ms.
    records = [record(i, i / 10, i / 10 + 0.3, i / 10 + 0.3 + 0.16 * 15, 16) for i in range(110)]
    data = PhaseData(
        Phase("latency", 1.0, 0.0, 110.0),
        records,
        EgressSamples([0.0, 11.0], [0, 11 * 125_000_000]),
    )
    summary = summarise_phase(data, load_experiment("paper"), scale, 2e9, PREDICTED)
    assert summary.ttft.p50.raw == pytest.approx(0.3)
    assert summary.ttft.p50.paper == pytest.approx(3.0)
    assert summary.tpot.mean.paper == pytest.approx(0.025)
    assert summary.throughput.paper == pytest.approx(1.0)
    assert summary.goodput.raw == 1.0
    # 1 Gbit/s of a 2 Gbit/s link stands for 100 of 200.
    assert summary.egress.mean_gbps.paper == pytest.approx(100.0)
    assert summary.egress.mean_share.paper == pytest.approx(0.5)


def test_configurations_at_one_rate_meet_the_same_requests() -> None:
    experiment = load_experiment("bench")
    phase = Phase("latency", 1.6, 60.0, 60.0)
    once = list(phase_requests(experiment, phase, UNSCALED))
    again = list(phase_requests(experiment, phase, Scale(time_scale=8.0)))
    assert [r.input_tokens for r in once] == [r.input_tokens for r in again]
    assert np.allclose([r.arrival_s / 8 for r in once], [r.arrival_s for r in again])
