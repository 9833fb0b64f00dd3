"""Client processes that do not end by themselves, and what is kept of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from scripted import FakeTarget, make_request

from harness.errors import ExitCode
from harness.load import clients as module
from harness.load.clients import ClientFailed, Clients, longest_s
from harness.load.driver import Driver
from harness.load.merge import merge
from harness.load.recording import ClientRecorder
from harness.load.schedule import OpenSchedule
from harness.load.selfcheck import ClientHealth
from harness.load.spec import LoadSpec, PhaseSpec, measured_phase, warmup_phase
from harness.replay import ReplayCounts
from harness.targets.base import TargetSpec
from workloads.spec import FixedWorkload

META = {"commit": "c", "seed": "0", "clock": "monotonic", "mode": "live"}


def closed(**more: object) -> LoadSpec:
    made = {"max_concurrency": 2, "duration_s": 600.0, "drain_s": 5.0, **more}
    return LoadSpec.model_validate(made)


async def test_a_stop_ends_a_closed_loop_of_endless_requests() -> None:
    driver = Driver(FakeTarget(0.001), lambda flight: None, max_concurrency=4)
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, driver.stop)
    requests = (make_request(k) for k in itertools.count())
    async with asyncio.timeout(60):
        counts = await driver.run(
            OpenSchedule(requests), "load", loop.time(), closed=True, until_s=600.0
        )
    assert counts.offered == counts.succeeded > 0


async def test_a_stopped_loop_of_so_many_requests_counts_the_rest() -> None:
    driver = Driver(FakeTarget(0.001), lambda flight: None, max_concurrency=4)
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, driver.stop)
    requests = (make_request(k) for k in range(100_000))
    counts = await driver.run(OpenSchedule(requests), "load", loop.time(), closed=True)
    assert counts.offered == 100_000
    assert counts.succeeded + counts.unsent == 100_000 and counts.unsent > 0


@pytest.mark.parametrize(
    ("spec", "limit_s"),
    [
        (closed(), 600 + 5 + 600),
        (closed(duration_s=3.0), 3 + 5 + 60),
        (closed(duration_s=None, num_requests=10), None),
        # Open: the cap may put off what was due within the duration.
        (closed(request_rate=4.0), None),
        (closed(request_rate=4.0, max_concurrency=None), 600 + 5 + 600),
        (closed(request_rate=4.0, max_concurrency=None, sessions="closed"), None),
    ],
)
def test_how_long_a_phase_can_take(spec: LoadSpec, limit_s: float | None) -> None:
    assert longest_s(spec, measured_phase(spec, "load", 0)) == limit_s


def test_each_client_has_a_place_in_the_warm_up() -> None:
    spec = LoadSpec(processes=40, num_warmups=80, request_rate=1.0)
    phase = warmup_phase(spec)
    shared = spec.model_copy(update={"max_concurrency": phase.max_concurrency})
    assert [shared.cap(index) for index in range(40)] == [1] * 40


def test_a_limit_of_connections_is_shared_by_the_clients() -> None:
    spec = LoadSpec(processes=3, target=TargetSpec(max_connections=8))
    assert [spec.target_of(index).max_connections for index in range(3)] == [3, 3, 2]
    assert LoadSpec(processes=3).target_of(0) == TargetSpec()


async def started(tmp_path: Path, url: str) -> Clients:
    spec = closed(
        target=TargetSpec(base_urls=(url,)),
        workload=FixedWorkload(input_tokens=20, output_tokens=2),
    )
    clients = Clients(spec, lambda k: tmp_path / f"client-{k}", META)
    await clients.start(10.0)
    return clients


async def test_a_client_that_does_not_end_is_killed(
    tmp_path: Path, stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LAST_WORDS_S", 0.1)
    clients = await started(tmp_path, stub_url())
    (process,) = clients._processes

    def stopped(spec: LoadSpec, phase: PhaseSpec) -> float:
        """Once the phase was begun, before its time runs."""
        os.kill(process.pid, signal.SIGSTOP)
        return 1.0

    monkeypatch.setattr(module, "longest_s", stopped)
    try:
        async with asyncio.timeout(60):
            done = await clients.phase(measured_phase(clients._spec, "load", 0))
        assert "600 s had not ended after 1 s" in clients.killed
        assert done.clients == []
        with pytest.raises(ClientFailed, match="killed") as raised:
            await clients.close(complete=True)
        assert raised.value.exit_code is ExitCode.INTERRUPTED
    finally:
        await clients.abandon()
    merge([tmp_path / "client-0"], tmp_path, META, complete=False)
    assert pq.read_metadata(tmp_path / "requests.parquet").num_rows >= 0


async def test_a_client_that_never_gets_ready_for_a_phase_is_killed(
    tmp_path: Path, stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = await started(tmp_path, stub_url())
    (process,) = clients._processes
    os.kill(process.pid, signal.SIGSTOP)
    # It stands still whatever the bound is.
    monkeypatch.setattr(module, "_PREPARE_S", 0.1)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(ClientFailed, match="was not prepared within") as raised:
                await clients.phase(measured_phase(clients._spec, "load", 0))
        assert raised.value.exit_code is ExitCode.INCOMPLETE
        assert str(process.pid) in clients.killed
        assert await process.wait() == -signal.SIGKILL
    finally:
        await clients.abandon()


async def test_progress_goes_on_when_a_client_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(succeeded: int) -> dict[str, object]:
        return {
            **module._NOTHING,
            "counts": asdict(ReplayCounts(offered=succeeded, succeeded=succeeded)),
            "in_flight": 0,
            "received_bytes": 10 * succeeded,
        }

    ended = asdict(ClientHealth(1.0, 0.1, 0.0, 0.0))
    heard = {
        0: iter([{"done": said(1) | {"health": ended, "max_rss_bytes": 1}}]),
        1: iter(
            [
                *({"progress": said(count)} for count in (2, 3)),
                {"done": said(4) | {"health": ended, "max_rss_bytes": 1}},
            ]
        ),
    }

    async def hear(self: Clients, process: int, *wanted: str) -> dict[str, object]:
        if "prepared" in wanted:
            return {"prepared": True}
        # The first client ends before the second says anything.
        await asyncio.sleep(0)
        return next(heard[process])

    monkeypatch.setattr(Clients, "_hear", hear)
    monkeypatch.setattr(Clients, "_tell", lambda self, process, **message: None)
    clients = Clients(closed(processes=2), lambda k: tmp_path, META)
    clients._processes = [0, 1]  # type: ignore[list-item]
    shown: list[tuple[int, int]] = []
    done = await clients.phase(
        measured_phase(clients._spec, "load", 0),
        lambda progress: shown.append((progress.counts.succeeded, progress.received_bytes)),
    )
    assert shown == [(3, 30), (4, 40)]
    assert done.counts.succeeded == 5


async def test_an_ended_phase_leaves_no_deadline(
    tmp_path: Path, stub_url: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "longest_s", lambda spec, phase: 600.0)
    clients = await started(tmp_path, stub_url())
    try:
        phase = measured_phase(clients._spec, "load", 0).model_copy(update={"duration_s": 0.2})
        await clients.phase(phase)
        assert clients._timer is None
        await clients.close(complete=True)
    finally:
        await clients.abandon()
    assert clients.killed == ""


def test_torn_and_missing_files_of_a_client_are_merged_as_far_as_they_go(tmp_path: Path) -> None:
    whole, torn, none = (tmp_path / f"client-{k}" for k in range(3))
    for part in (whole, torn, none):
        part.mkdir()
    for part in (whole, torn):
        recorder = ClientRecorder(part, "load", META)
        recorder.close(complete=True)
    with (torn / "requests.parquet").open("ab") as file:
        file.write(b"a row group that was cut off")
    merge([whole, torn, none], tmp_path, META, complete=False)
    assert pq.read_metadata(tmp_path / "requests.parquet").num_rows == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "client.parquet", "requests.parquet", "tokens.parquet",
    ]  # fmt: skip


def test_a_client_leaves_signals_to_its_living_parent() -> None:
    """`timeout` sends SIGTERM to the whole group."""
    with subprocess.Popen(
        [sys.executable, "-m", "harness.load.client"], stdin=subprocess.PIPE
    ) as process:
        stat = Path(f"/proc/{process.pid}/status")
        ready = 1 << (signal.SIGTERM - 1)
        while not int(stat.read_text().partition("SigCgt:")[2].split()[0], 16) & ready:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
