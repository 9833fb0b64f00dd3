"""Measurement cases 18 to 23: the client itself."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scripted import batch, chat, event, make_request, play, text

from harness.load.driver import Driver
from harness.load.flight import Flight
from harness.load.monitor import LoopMonitor
from harness.load.recording import ClientRecorder, Tally
from harness.load.schedule import OpenSchedule
from harness.load.selfcheck import ClientHealth, client_limits
from harness.load.spec import LoadSpec, measured_phase, phase_requests, schedule_of, share
from harness.load.words import prompt_text
from harness.targets.base import TargetSpec
from harness.targets.openai import OpenAiTarget
from results.metrics import Slo
from results.records import Status
from workloads.spec import parse_workload

# 18. Busy client


async def test_a_client_that_blocks_is_found_out() -> None:
    monitor = LoopMonitor()
    for _ in range(2):
        await asyncio.sleep(0.3)
        time.sleep(0.2)  # noqa: ASYNC251 (the fault itself)
        await asyncio.sleep(0.02)
    health = monitor.stop()
    assert health.blocked_s >= 0.36
    assert health.longest_block_s >= 0.18
    assert any("blocked" in each for each in client_limits([health], 0.001, 0.0001))


GOOD = ClientHealth(duration_s=100.0, cpu_s=40.0, blocked_s=0.5, longest_block_s=0.05)


def test_a_good_client_is_no_limit() -> None:
    assert client_limits([GOOD, GOOD], 0.0015, 0.0002) == []
    assert client_limits([GOOD], None, None) == []


@pytest.mark.parametrize(
    ("health", "lateness_s", "pool_wait_s", "said"),
    [
        (GOOD, 0.020, 0.0, "20.0 ms late"),
        (ClientHealth(100.0, 40.0, 20.0, 0.2), 0.001, 0.0, "blocked 20% of the time"),
        (ClientHealth(100.0, 40.0, 2.0, 2.0), 0.001, 0.0, "stood still for 2.00 s"),
        (ClientHealth(100.0, 95.0, 0.5, 0.05), 0.001, 0.0, "95% of a core"),
        (ClientHealth(100.0, 40.0, 0.5, 0.05, True), 0.001, 0.5, "500.0 ms for a connection"),
    ],
)
def test_each_limit_is_named(
    health: ClientHealth, lateness_s: float, pool_wait_s: float, said: str
) -> None:
    found = client_limits([GOOD, health], lateness_s, pool_wait_s)
    assert len(found) == 1
    assert said in found[0]


def test_opening_connections_is_not_a_limit() -> None:
    assert client_limits([GOOD], 0.001, 0.5) == []


# 19. Connection limit


async def run_load(
    url: str, count: int, tokens: int, **settings: object
) -> tuple[list[Flight], OpenAiTarget]:
    """`count` requests at once through a target on this loop."""
    flights: list[Flight] = []
    target = OpenAiTarget(TargetSpec(base_urls=(url,), **settings))
    loop = asyncio.get_running_loop()
    driver = Driver(target, flights.append)
    requests = (make_request(k, 0.0, tokens) for k in range(count))
    await driver.run(OpenSchedule(requests), "load", loop.time(), drain_s=60.0)
    await target.close()
    return flights, target


async def test_long_streams_never_wait_for_a_socket(stub_url: Callable[..., str]) -> None:
    url = stub_url("--itl-ms", "100")
    # Long enough for a busy machine to open all before the first ends.
    flights, _target = await run_load(url, 150, 30)
    assert {each.status for each in flights} == {Status.SUCCEEDED}
    made = batch(*flights)
    # All were under way together: the last was sent before the first ended.
    assert float(made.sent_s.max()) < float(made.ended_s.min())
    assert not np.isnan(made.pool_wait_s).any()
    assert all(each.new_connection for each in flights)


async def test_a_limit_that_was_asked_for_is_recorded_as_waiting(
    stub_url: Callable[..., str],
) -> None:
    url = stub_url("--itl-ms", "50")
    flights, _target = await run_load(url, 20, 5, max_connections=5)
    assert {each.status for each in flights} == {Status.SUCCEEDED}
    waits_s = sorted(each.pool_wait_s or 0.0 for each in flights)
    # Four rounds of at least 4 x 50 ms.
    assert waits_s[-1] >= 0.55
    assert sum(each.new_connection for each in flights) == 5


# 20. Clock step


async def test_the_wall_clock_is_never_asked(
    stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = stub_url("--ttft-ms", "20", "--itl-ms", "5")
    steps = iter(range(10**9))
    # The wall clock jumps back an hour at every look.
    monkeypatch.setattr(time, "time", lambda: 2e9 - 3600.0 * next(steps))
    flights, _ = await run_load(url, 20, 4)
    for each in flights:
        assert each.status is Status.SUCCEEDED
        assert each.sent_s is not None and each.ended_s is not None
        assert 0.02 < each.ended_s - each.sent_s < 60.0
        assert (np.diff(each.chunk_s) >= 0).all()


def test_without_a_first_token_there_is_null(tmp_path: Path) -> None:
    recorder = ClientRecorder(tmp_path, "load", {})
    recorder.add(play([], ends="connection lost"))
    recorder.close(True)
    row = pq.read_table(tmp_path / "requests.parquet").to_pylist()[0]
    assert row["first_token_us"] is None
    assert row["last_token_us"] is None
    assert row["status"] == "failed"


# 21. Percentiles are merged, never averaged


def answers(count: int, ms: float) -> list[Flight]:
    return [play([(ms, text("a", "stop"))]) for _ in range(count)]


def test_histograms_of_clients_are_added_up() -> None:
    fast, slow = Tally(), Tally()
    fast.add(batch(*answers(990, 1.0)), Slo())
    slow.add(batch(*answers(10, 1000.0)), Slo())
    whole = Tally()
    for part in (fast, slow):
        whole.merge(Tally.decode(part.encode()))
    ttft = whole.histograms["ttft"]
    assert ttft.count == 1000
    assert ttft.percentile(0.99) == pytest.approx(0.001, rel=0.002)
    assert ttft.percentile(0.999) == pytest.approx(1.0, rel=0.002)


def test_what_met_the_slo_is_added_up() -> None:
    parts = [Tally(), Tally()]
    parts[0].add(batch(*answers(7, 100.0), *answers(3, 900.0)), Slo(ttft_s=0.5))
    parts[1].add(batch(*answers(5, 100.0)), Slo(ttft_s=0.5))
    parts[0].merge(Tally.decode(parts[1].encode()))
    assert parts[0].met_slo == 12


# 22. Memory


def recorded(directory: Path, flights: int, chunks: int) -> None:
    """Record so many flights of so many chunks each."""
    recorder = ClientRecorder(directory, "load", {})
    made = play([(k, text("a")) for k in range(chunks)] + [(chunks, text("b", "stop"))])
    for ident in range(flights):
        flight = Flight(make_request(ident), "load", 100.0, 100.0, 0, 100.0, 100.0)
        flight.chunk_s = made.chunk_s[:]
        flight.ended_s, flight.status = made.ended_s, made.status
        recorder.add(flight)
    recorder.close(True)


def test_rows_stream_to_parquet_and_memory_stays(tmp_path: Path) -> None:
    def peak_bytes() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    recorded(tmp_path / "a", 10_000, 100)
    before = peak_bytes()
    recorded(tmp_path / "b", 40_000, 100)
    # 4 million more chunks are 32 MB of times alone, and several times that as objects.
    assert peak_bytes() - before < 200 << 20
    file = pq.ParquetFile(tmp_path / "b" / "tokens.parquet")
    assert file.metadata.num_rows == 40_000
    assert file.metadata.num_row_groups > 1


async def test_requests_are_drawn_as_they_are_sent() -> None:
    """No request is made before its turn: the generator is never ahead of the sends by two."""
    drawn = 0

    def requests() -> object:
        nonlocal drawn
        for k in range(5000):
            drawn += 1
            yield make_request(k)

    class Target:
        def send(self, flight: Flight, done: Callable[[Flight], None]) -> None:
            assert drawn <= flight.request.id + 2
            flight.status = Status.SUCCEEDED
            flight.ended_s = asyncio.get_running_loop().time()
            done(flight)

    driver = Driver(Target(), lambda flight: None, max_concurrency=4)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    counts = await driver.run(OpenSchedule(requests()), "load", loop.time(), closed=True)  # type: ignore[arg-type]
    assert counts.succeeded == 5000
    assert len(asyncio.all_tasks()) == 1


# 23. Equal prompts

FIXED = {"kind": "fixed", "input_tokens": 64, "output_tokens": 4}


def test_four_workers_of_one_seed_send_distinct_prompts() -> None:
    spec = LoadSpec(workload=parse_workload(FIXED), num_requests=400, processes=4, seed=7)
    phase = measured_phase(spec, "load", 0)
    prompts = [
        prompt_text(request, phase.seed)
        for index in range(4)
        for request in share(phase_requests(spec, phase), index, 4)
    ]
    assert len(prompts) == 400
    assert len(set(prompts)) == 400


def test_repeats_do_not_find_each_others_prompts() -> None:
    spec = LoadSpec(workload=parse_workload(FIXED), num_requests=100, repeats=3)
    phases = [measured_phase(spec, f"load-{k}", k) for k in range(3)]
    prompts = {
        prompt_text(request, phase.seed)
        for phase in phases
        for request in phase_requests(spec, phase)
    }
    assert len(prompts) == 300


@pytest.mark.parametrize("processes", [1, 2, 4, 7])
def test_processes_share_one_schedule(processes: int) -> None:
    spec = LoadSpec(
        workload=parse_workload(FIXED), num_requests=100, request_rate=50.0, processes=processes
    )
    phase = measured_phase(spec, "load", 0)
    whole = [(each.id, each.arrival_s) for each in phase_requests(spec, phase)]
    parts = []
    for index in range(processes):
        schedule = schedule_of(spec, phase, index)
        while (turn := schedule.peek()) is not None:
            parts.append((turn.request.id, turn.due_s))
            schedule.pop()
    assert sorted(parts) == whole


def test_sessions_stay_with_one_process() -> None:
    workload = parse_workload({"kind": "sessions"})
    spec = LoadSpec(workload=workload, request_rate=2.0, num_requests=300, processes=3)
    phase = measured_phase(spec, "load", 0)
    owners: dict[str, set[int]] = {}
    for index in range(3):
        for request in share(phase_requests(spec, phase), index, 3):
            owners.setdefault(request.session, set()).add(index)
    assert len(owners) > 10
    assert all(len(each) == 1 for each in owners.values())


def test_a_cap_is_split_without_loss() -> None:
    spec = LoadSpec(max_concurrency=10, processes=4)
    assert [spec.cap(index) for index in range(4)] == [3, 3, 2, 2]


def test_prompts_repeat_where_blocks_do() -> None:
    from workloads.request import Request

    first = prompt_text(Request(1, 0.0, 20, 1, (5, 6), 8), 3)
    second = prompt_text(Request(2, 0.0, 20, 1, (5, 7), 8), 3)
    words = [each.split() for each in (first, second)]
    assert [len(each) for each in words] == [20, 20]
    assert words[0][:8] == words[1][:8]
    assert words[0][8:] != words[1][8:]
    assert b'"' not in first and b"\\" not in first


def test_events_are_what_servers_send() -> None:
    assert event(chat("a")) == (
        b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n'
    )
