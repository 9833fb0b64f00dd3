"""Metrics against literals; the cases are small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results import metrics
from results.live import LiveHistogram
from results.records import RequestRecord, Status


def served(
    ident: int,
    scheduled_s: float,
    first_s: float,
    last_s: float,
    tokens: int,
    *,
    asked: int | None = None,
    sent_s: float | None = None,
) -> RequestRecord:
    record = RequestRecord(ident, scheduled_s, 100, tokens if asked is None else asked)
    record.sent_s = scheduled_s if sent_s is None else sent_s
    record.status = Status.SUCCEEDED
    record.attempts = 1
    record.prefill_started_s = record.sent_s
    record.prefill_finished_s = record.delivered_s = record.admitted_s = first_s
    record.first_token_s, record.last_token_s = first_s, last_s
    record.tokens_received = tokens
    record.ended_s = last_s
    return record


def refused(ident: int, scheduled_s: float, ended_s: float) -> RequestRecord:
    record = RequestRecord(ident, scheduled_s, 100, 10)
    record.sent_s, record.ended_s = scheduled_s, ended_s
    record.status, record.failure = Status.FAILED, "HTTP 503"
    return record


def test_ttft_and_tpot_of_chunks_use_the_servers_token_count() -> None:
    # 4 tokens at 100 ms, 4 at 140, 2 at 180: TPOT = 80 / 9.
    columns = metrics.from_records([served(0, 0.0, 0.1, 0.18, 10)])
    assert metrics.ttft_s(columns)[0] == pytest.approx(0.1)
    assert metrics.tpot_s(columns)[0] == pytest.approx(0.080 / 9)


def test_answer_in_one_chunk_has_no_tpot_and_a_tpot_limit_does_not_apply() -> None:
    columns = metrics.from_records([served(0, 0.0, 0.2, 0.2, 64), served(1, 0.0, 0.2, 0.2, 1)])
    assert np.isnan(metrics.tpot_s(columns)).all()
    assert metrics.percentile(metrics.tpot_s(columns), 0.5) is None
    assert metrics.mean(metrics.tpot_s(columns)) is None
    limit = metrics.Slo(ttft_s=0.5, tpot_s=0.001)
    assert metrics.met_slo(columns, limit).tolist() == [True, True]
    assert metrics.met_slo(columns, metrics.Slo(ttft_s=0.1)).tolist() == [False, False]


def test_a_server_that_refuses_does_not_look_fast() -> None:
    records = [served(i, 0.0, 1.0, 1.0, 1) for i in range(50)]
    records += [refused(50 + i, 0.0, 0.001) for i in range(50)]
    columns = metrics.from_records(records)
    assert metrics.mean(metrics.ttft_s(columns)) == 1.0
    assert int((~np.isnan(metrics.ttft_s(columns))).sum()) == 50
    assert metrics.goodput(columns, metrics.Slo()) == 0.5


def test_hidden_queue_counts_from_the_schedule() -> None:
    # 10 requests/s at a server that takes 0.5 s, one at a time.
    ends = [0.5 * (i + 1) for i in range(8)]
    records = [served(i, 0.1 * i, ends[i], ends[i], 1) for i in range(8)]
    for i, record in enumerate(records):
        record.prefill_started_s = 0.5 * i
    columns = metrics.from_records(records)
    ttft = metrics.ttft_s(columns)
    assert ttft.mean() == pytest.approx(1.90)
    assert ttft.max() == pytest.approx(3.30)
    split = metrics.ttft_split_s(columns)
    assert split["queue"].mean() == pytest.approx(1.40)
    assert split["prefill"].mean() == pytest.approx(0.50)


def test_merged_percentiles_are_of_the_merged_samples() -> None:
    samples = np.array([0.001] * 990 + [1.0] * 10)
    assert metrics.percentile(samples, 0.99) == 0.001
    assert metrics.percentile(samples, 0.999) == 1.0


@pytest.mark.parametrize(
    ("q", "floor"), [(0.5, 2), (0.9, 10), (0.95, 20), (0.99, 100), (0.999, 1000)]
)
def test_percentile_floor(q: float, floor: int) -> None:
    assert metrics.sample_floor(q) == floor
    assert metrics.percentile(np.arange(floor - 1, dtype=float), q) is None
    assert metrics.percentile(np.arange(floor, dtype=float), q) is not None


def test_percentile_leaves_nulls_out() -> None:
    samples = np.array([np.nan, 3.0, 1.0, np.nan, 2.0])
    assert metrics.percentile(samples, 0.5) == 2.0


def test_rates() -> None:
    records = [served(i, i / 200, i / 200 + 0.01, i / 200 + 0.02, 5) for i in range(10_000)]
    records[-1].status = Status.UNSENT
    records[-1].sent_s = None
    columns = metrics.from_records(records)
    assert metrics.offered_rate(columns) == pytest.approx(200.0, rel=1e-9)
    assert metrics.admitted_rate(columns) == pytest.approx(9998 / 49.995)
    assert metrics.achieved_rate(columns) == pytest.approx(9999 / (49.995 + 0.02), rel=1e-6)


def test_offered_rate_of_one_request_is_null() -> None:
    assert metrics.offered_rate(metrics.from_records([served(0, 0, 1, 2, 3)])) is None


def test_drain_tail_gives_no_steady_window() -> None:
    # Ten requests of 1 s, then one of 100 s.
    records = [served(i, float(i), i + 1.0, i + 1.0, 1) for i in range(10)]
    records.append(served(10, 10.0, 110.0, 110.0, 1))
    assert metrics.steady_window(metrics.from_records(records)) is None


def test_steady_window_leaves_warm_up_and_drain_out() -> None:
    # Nothing for 50 s, ten slow completions, then 2 a second while 4 a second arrive.
    completions = [50.0 + 5.0 * i for i in range(10)]
    completions += [95.5 + 0.5 * i for i in range(390)]
    records = [served(i, 0.25 * i, end, end, 1) for i, end in enumerate(completions)]
    records += [served(1000 + i, 100 + 0.25 * i, 400.0 + i, 400.0 + i, 1) for i in range(600)]
    columns = metrics.from_records(records)
    window = metrics.steady_window(columns)
    assert window is not None
    start_s, end_s = window
    assert 90.0 <= start_s <= 105.0
    assert end_s == pytest.approx(249.75)
    rate = metrics.throughput(metrics.completions_s(columns), start_s, end_s)
    assert rate == pytest.approx(2.0, rel=1e-6)


def test_steady_window_refuses_a_rate_that_never_settles() -> None:
    ends = np.cumsum(np.linspace(1.0, 0.1, 300))
    records = [served(i, 0.5 * i, float(end), float(end), 1) for i, end in enumerate(ends)]
    assert metrics.steady_window(metrics.from_records(records)) is None


def test_throughput_of_a_window_without_completions_is_null() -> None:
    assert metrics.throughput(np.array([1.0, 2.0]), 5.0, 9.0) is None


@pytest.mark.parametrize("seed", range(20))
def test_steady_window_of_a_steady_poisson_run_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.exponential(0.5, 200))
    records = [served(i, float(e) - 0.1, float(e), float(e), 1) for i, e in enumerate(ends)]
    window = metrics.steady_window(metrics.from_records(records))
    assert window is not None
    assert window[0] <= ends[110]


def test_interval_of_repeats() -> None:
    assert metrics.interval([1.0]) is None
    # n = 5, t(0.975, 4) = 2.776445, standard deviation 1.581139.
    low, high = metrics.interval([1.0, 2.0, 3.0, 4.0, 5.0])  # type: ignore[misc]
    assert low == pytest.approx(3.0 - 2.776445 * 1.5811388 / 5**0.5, abs=1e-5)
    assert high == pytest.approx(3.0 + 2.776445 * 1.5811388 / 5**0.5, abs=1e-5)


def test_egress_mean_and_peak() -> None:
    # 1 MB/s for 10 s, then 9 MB in one second, then nothing for 9 s.
    times = np.array([0.0, 10.0, 11.0, 20.0])
    counter = np.array([0.0, 10e6, 19e6, 19e6])
    use = metrics.egress(times, counter, 0.0, 20.0, peak_window_s=1.0)
    assert use is not None
    assert use.mean_gbps == pytest.approx(19e6 * 8 / 20 / 1e9)
    assert use.peak_gbps == pytest.approx(9e6 * 8 / 1e9)
    wide = metrics.egress(times, counter, 0.0, 20.0, peak_window_s=2.0)
    assert wide is not None
    assert wide.peak_gbps == pytest.approx(10e6 * 8 / 2 / 1e9)
    assert metrics.egress(times, counter, 30.0, 40.0) is None


times = st.floats(0, 1e5, allow_nan=False)


@given(st.lists(st.tuples(times, times, times, times, times), min_size=1, max_size=30))
def test_ttft_split_adds_up(rows: list[tuple[float, ...]]) -> None:
    records = []
    for i, row in enumerate(rows):
        scheduled, started, finished, delivered, first = sorted(row)
        record = served(i, scheduled, first, first + 1.0, 2)
        record.prefill_started_s, record.prefill_finished_s = started, finished
        record.delivered_s = delivered
        records.append(record)
    columns = metrics.from_records(records)
    total = sum(metrics.ttft_split_s(columns).values())
    np.testing.assert_allclose(total, metrics.ttft_s(columns), atol=1e-6)


@given(st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=300))
def test_percentile_is_nearest_rank(values: list[float]) -> None:
    found = metrics.percentile(np.array(values), 0.9)
    if len(values) < 10:
        assert found is None
    else:
        assert found in values
        assert sum(v <= found for v in values) >= 0.9 * len(values) - 1e-9  # type: ignore[operator]


class TestLiveHistogram:
    def test_merges_and_never_averages(self) -> None:
        a, b = LiveHistogram(), LiveHistogram()
        a.record_many(np.full(990, 0.001))
        b.record_many(np.full(10, 1.0))
        a.merge(b)
        assert a.count == 1000
        assert a.percentile(0.99) == pytest.approx(0.001, rel=1e-3)
        assert a.percentile(0.999) == pytest.approx(1.0, rel=1e-3)

    def test_bulk_equals_one_by_one(self) -> None:
        samples = np.random.default_rng(1).lognormal(0, 2, 5_000)
        bulk, single = LiveHistogram(), LiveHistogram()
        bulk.record_many(samples)
        for sample in samples:
            single.record(float(sample))
        for q in (0.5, 0.9, 0.99, 0.999):
            assert bulk.percentile(q) == single.percentile(q)
            exact = float(np.sort(samples)[int(np.ceil(q * 5000)) - 1])
            assert bulk.percentile(q) == pytest.approx(exact, rel=1e-3)

    def test_below_the_floor_is_null_and_text_round_trips(self) -> None:
        histogram = LiveHistogram()
        histogram.record_many(np.array([0.1] * 99))
        assert histogram.percentile(0.99) is None
        again = LiveHistogram.decode(histogram.encode())
        assert again.count == 99
        assert again.percentile(0.9) == histogram.percentile(0.9)
