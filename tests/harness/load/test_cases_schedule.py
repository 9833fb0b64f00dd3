"""Measurement cases 11 to 17 on a virtual clock: the schedule, the load and its balance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scripted import FakeTarget, batch, make_request

from harness.clock import run
from harness.load.driver import Driver
from harness.load.flight import Flight
from harness.load.schedule import OpenSchedule, SessionSchedule
from harness.load.spec import LoadSpec, measured_phase, phase_requests, warmup_phase
from harness.replay import ReplayCounts
from results import metrics
from results.records import Status
from results.summarise import phase_summary
from workloads.request import Request
from workloads.spec import parse_arrivals, parse_workload
from workloads.traces.readers import open_trace


def drive(
    target: FakeTarget,
    requests: Iterator[Request],
    *,
    cap: int | None = None,
    closed: bool = False,
    stop_after_s: float | None = None,
    drain_s: float | None = None,
    timeout_s: float | None = None,
    until_s: float | None = None,
    schedule: OpenSchedule | None = None,
) -> tuple[list[Flight], ReplayCounts]:
    """Everything that `requests` became, on a virtual clock."""
    flights: list[Flight] = []

    async def main() -> ReplayCounts:
        import asyncio

        loop = asyncio.get_running_loop()
        driver = Driver(target, flights.append, max_concurrency=cap, timeout_s=timeout_s)
        if stop_after_s is not None:
            loop.call_later(stop_after_s, driver.stop)
        return await driver.run(
            schedule or OpenSchedule(requests),
            "load",
            loop.time(),
            closed=closed,
            drain_s=drain_s,
            until_s=until_s,
        )

    counts = run(main())
    assert counts.offered == counts.succeeded + counts.failed + counts.unsent == len(flights)
    return flights, counts


def at(*arrivals_s: float) -> Iterator[Request]:
    return (make_request(ident, time_s) for ident, time_s in enumerate(arrivals_s))


# 11. Hidden queue


def test_a_queue_behind_the_cap_is_in_the_latency() -> None:
    flights, _ = drive(FakeTarget(0.5), at(*(k / 10 for k in range(8))), cap=1)
    made = batch(*flights)
    assert metrics.mean(metrics.e2e_s(made.requests())) == pytest.approx(1.90)
    assert float(np.max(metrics.e2e_s(made.requests()))) == pytest.approx(3.30)
    assert (made.ended_s - made.sent_s).tolist() == pytest.approx([0.5] * 8)
    assert metrics.mean(metrics.lateness_s(made.requests())) == pytest.approx(1.40)
    # The wait is the cap's and not the client's own lateness.
    assert (made.sent_s - made.due_s).tolist() == pytest.approx([0.0] * 8)


def test_a_queue_in_the_server_is_in_the_latency_too() -> None:
    flights, _ = drive(FakeTarget(0.5, slots=1), at(*(k / 10 for k in range(8))))
    requests = batch(*flights).requests()
    assert metrics.mean(metrics.e2e_s(requests)) == pytest.approx(1.90)
    assert metrics.mean(metrics.lateness_s(requests)) == pytest.approx(0.0)


def test_in_a_closed_loop_the_schedule_is_when_a_place_comes_free() -> None:
    flights, _ = drive(FakeTarget(0.5), at(*[0.0] * 6), cap=2, closed=True)
    made = batch(*flights)
    assert made.scheduled_s.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.5, 1.0, 1.0])
    assert metrics.e2e_s(made.requests()).tolist() == pytest.approx([0.5] * 6)


# 12. Drift


def test_lateness_does_not_add_up() -> None:
    """The virtual loop cannot be busy, so sends pile up instead: bursts of ten at one instant, and
    each next burst is still on time.
    """
    arrivals = (k // 10 / 20 for k in range(10_000))
    flights, _ = drive(FakeTarget(0.001), at(*arrivals), cap=4)
    made = batch(*flights)
    late_s = made.sent_s - made.scheduled_s
    assert float(late_s.max()) == pytest.approx(0.002)
    assert metrics.admitted_rate(made.requests()) == pytest.approx(200, rel=0.005)


async def test_the_rate_holds_when_each_send_costs_time() -> None:
    """On the real clock: 400 requests at 200/s whose sends cost 0.4 ms each."""
    import asyncio
    import time

    loop = asyncio.get_running_loop()
    flights: list[Flight] = []

    class Busy(FakeTarget):
        def send(self, flight: Flight, done: object) -> None:
            until = time.monotonic() + 0.0004
            while time.monotonic() < until:
                pass
            super().send(flight, done)

    driver = Driver(Busy(0.001), flights.append)
    schedule = OpenSchedule(at(*(k / 200 for k in range(400))))
    await driver.run(schedule, "load", loop.time() + 0.01)
    made = batch(*sorted(flights, key=lambda each: each.request.id))
    # Each was sent at or after its own time, which never moved for the ones before it.
    assert (np.diff(made.scheduled_s) * 200).tolist() == pytest.approx([1.0] * 399)
    assert float((made.sent_s - made.scheduled_s).min()) >= 0.0


# 13. Shape

SHAPE = {"kind": "fixed", "input_tokens": 8, "output_tokens": 1}


def arrivals_of(count: int = 6000, rate: float = 100.0, **table: object) -> np.ndarray:
    spec = LoadSpec(
        workload=parse_workload(SHAPE),
        arrivals=parse_arrivals(table),
        request_rate=rate,
        num_requests=count,
    )
    phase = measured_phase(spec, "load", 0)
    return np.array([each.arrival_s for each in phase_requests(spec, phase)])


def test_constant_gaps_do_not_vary() -> None:
    gaps_s = np.diff(arrivals_of(process="constant"))
    assert float(gaps_s.std()) == pytest.approx(0.0, abs=1e-12)
    assert float(gaps_s.mean()) == pytest.approx(0.01)


def test_poisson_gaps_are_exponential() -> None:
    times_s = arrivals_of(process="poisson")
    gaps_s = np.diff(times_s)
    assert float(gaps_s.std() / gaps_s.mean()) == pytest.approx(1.0, abs=0.03)
    assert stats.kstest(gaps_s * 100, "expon").pvalue > 0.01
    # Neither pinned to whole seconds nor stretched to the exact rate.
    assert not np.isclose(times_s % 1.0, 0.0, atol=1e-9).any()
    assert (times_s[-1] - times_s[0]) * 100 / 5999 != pytest.approx(1.0, abs=1e-6)


def test_the_exact_rate_is_only_met_when_asked() -> None:
    times_s = arrivals_of(process="poisson", exact_rate=True)
    assert len(times_s[times_s < 60.0]) == 6000


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gamma_gaps_have_the_variation_asked_for(burstiness: float) -> None:
    gaps_s = np.diff(arrivals_of(process="gamma", burstiness=burstiness))
    assert float(gaps_s.std() / gaps_s.mean()) == pytest.approx(burstiness**-0.5, rel=0.06)


# 14. Warm-up


def test_warm_up_stays_under_the_cap_and_out_of_every_figure() -> None:
    spec = LoadSpec(workload=parse_workload(SHAPE), num_warmups=100, max_concurrency=32)
    phase = warmup_phase(spec)
    target = FakeTarget(0.1)
    flights, counts = drive(
        target, phase_requests(spec, phase), cap=phase.max_concurrency, closed=phase.closed
    )
    assert (counts.succeeded, target.most_at_once) == (100, 32)
    first = next(phase_requests(spec, measured_phase(spec, "load", 0)))
    assert first.id not in {each.request.id for each in flights}
    assert phase.name != "load"


def test_without_a_cap_warm_up_has_one_of_its_own() -> None:
    assert warmup_phase(LoadSpec(num_warmups=100)).max_concurrency == 32


# 15. Traces


def test_azure_stamps_keep_their_hundreds_of_nanoseconds(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.6805900,100,10\n2023-11-16 18:17:03.6879999,100,10\n"
    )
    first, second = open_trace(path)
    assert second.arrival_s - first.arrival_s == pytest.approx(0.0074099, abs=1e-9)


def mooncake(*rows: tuple[int, int, list[int]]) -> str:
    import json

    return "".join(
        json.dumps(
            {"timestamp": time, "input_length": length, "output_length": 4, "hash_ids": blocks}
        )
        + "\n"
        for time, length, blocks in rows
    )


def test_mooncake_stamps_are_milliseconds_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(mooncake((3000, 600, [1, 2]), (0, 512, [1]), (3000, 700, [1, 3])))
    rows = list(open_trace(path))
    assert [each.arrival_s for each in rows] == [0.0, 3.0, 3.0]
    assert [each.input_tokens for each in rows] == [512, 600, 700]


def test_equal_stamps_leave_together(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(mooncake(*((3000 * (k // 3), 512, [k]) for k in range(9))))
    spec = LoadSpec(
        workload=parse_workload({"kind": "trace", "path": str(path)}),
        arrivals=parse_arrivals({"process": "trace"}),
    )
    requests = phase_requests(spec, measured_phase(spec, "load", 0))
    flights, _ = drive(FakeTarget(0.1), requests)
    made = batch(*sorted(flights, key=lambda each: each.request.id))
    assert made.sent_s.tolist() == pytest.approx([0, 0, 0, 3, 3, 3, 6, 6, 6])


def test_more_blocks_than_tokens_are_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(mooncake((0, 512, [1]), (1000, 20, [1, 2])))
    with pytest.raises(ValueError, match=r"mooncake\.jsonl:2"):
        list(open_trace(path))


# 16. Balance


def test_what_was_not_sent_is_counted() -> None:
    flights, counts = drive(FakeTarget(0.3), at(*(k / 10 for k in range(100))), stop_after_s=4.05)
    assert (counts.offered, counts.succeeded, counts.failed, counts.unsent) == (100, 41, 0, 59)
    assert sum(each.status is Status.UNSENT for each in flights) == 59
    summary = phase_summary("load", batch(*flights).requests())
    assert (summary.counts.offered, summary.counts.unsent) == (100, 59)


def test_what_does_not_end_in_the_drain_fails() -> None:
    target = FakeTarget(lambda request: 100.0 if request.id == 3 else 0.1)
    flights, counts = drive(target, at(*(k / 10 for k in range(10))), drain_s=5.0)
    assert (counts.succeeded, counts.failed) == (9, 1)
    assert flights[-1].failure == "not finished 5 s after the last send"


def test_what_takes_too_long_times_out_and_frees_its_place() -> None:
    target = FakeTarget(lambda request: 100.0 if request.id == 0 else 0.1)
    flights, counts = drive(target, at(*[0.0] * 5), cap=1, timeout_s=2.0)
    assert (counts.succeeded, counts.failed) == (4, 1)
    assert flights[0].failure == "timed out after 2 s"


def test_failures_are_counted_among_what_was_offered() -> None:
    target = FakeTarget(0.1)
    target.fails = lambda request: "HTTP 503" if request.id % 2 else ""
    _, counts = drive(target, at(*(k / 10 for k in range(100))))
    assert (counts.offered, counts.succeeded, counts.failed) == (100, 50, 50)


def test_a_closed_loop_ends_at_its_time() -> None:
    _, counts = drive(FakeTarget(0.1), at(*[0.0] * 1000), cap=2, closed=True, until_s=0.95)
    assert (counts.succeeded, counts.unsent) == (20, 0)


# 17. Drain tail


def test_the_steady_window_stands_apart_from_the_drain() -> None:
    target = FakeTarget(lambda request: 100.0 if request.id == 10 else 1.0)
    flights, _ = drive(target, at(*map(float, range(11))))
    requests = batch(*flights).requests()
    assert metrics.steady_window(requests) is None
    whole = phase_summary("load", requests, window_s=metrics.steady_window(requests))
    assert whole.window is None
    assert whole.throughput.raw is None
    assert whole.achieved_rate.raw == pytest.approx(11 / 110)


def test_a_long_run_has_a_window_without_its_tail() -> None:
    target = FakeTarget(lambda request: 100.0 if request.id == 199 else 1.0)
    flights, _ = drive(target, at(*(k / 10 for k in range(200))))
    requests = batch(*flights).requests()
    window = metrics.steady_window(requests)
    assert window is not None
    assert window[1] == pytest.approx(19.9)
    whole = phase_summary("load", requests, window_s=window)
    assert whole.throughput.raw == pytest.approx(10.0, rel=0.01)
    assert whole.achieved_rate.raw == pytest.approx(200 / 119.9, rel=0.01)


# Sessions


def turns(*rows: tuple[str, float]) -> Iterator[Request]:
    return (
        Request(ident, time_s, 8, 4, session=session)
        for ident, (session, time_s) in enumerate(rows)
    )


def test_a_turn_waits_for_its_predecessor_and_then_thinks() -> None:
    rows = turns(("a", 0.0), ("a", 7.0), ("b", 8.0), ("a", 20.0))
    schedule = SessionSchedule(rows, response_s=5.0)
    flights, _ = drive(FakeTarget(10.0), iter(()), schedule=schedule)
    sent_s = {each.request.id: each.sent_s for each in flights}
    # a: 0 to 10, think 2, 12 to 22, think 8, at 30; b at its own 8.
    assert [sent_s[k] for k in range(4)] == pytest.approx([0.0, 12.0, 8.0, 30.0])


def test_a_given_think_time_is_used_and_quick_answers_bring_turns_forward() -> None:
    schedule = SessionSchedule(turns(("a", 0.0), ("a", 60.0)), 5.0, think_s=1.0)
    flights, _ = drive(FakeTarget(0.5), iter(()), schedule=schedule)
    assert [each.sent_s for each in flights] == pytest.approx([0.0, 1.5])


def test_turns_that_never_came_due_are_unsent() -> None:
    rows = turns(*(("a", float(k)) for k in range(5)))
    schedule = SessionSchedule(rows, 0.0)
    _, counts = drive(FakeTarget(10.0), iter(()), schedule=schedule, stop_after_s=12.0)
    assert (counts.offered, counts.succeeded, counts.unsent) == (5, 2, 3)


def test_requests_without_a_session_are_open() -> None:
    schedule = SessionSchedule(turns(("", 0.0), ("", 1.0)), 0.0)
    flights, _ = drive(FakeTarget(10.0), iter(()), schedule=schedule)
    assert [each.sent_s for each in flights] == pytest.approx([0.0, 1.0])
