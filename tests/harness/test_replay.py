"""The open-loop schedule and its balance: offered = succeeded + failed + unsent, always.

In virtual time, so that nothing but the schedule decides when a request leaves.
"""

import asyncio
import contextlib

import pytest

from harness.clock import run as virtual
from harness.replay import ReplayCounts, replay
from results.records import RequestRecord, Status
from workloads.request import Request


def requests(n: int, gap_s: float = 0.01) -> list[Request]:
    return [Request(i, i * gap_s, 100, 10) for i in range(n)]


async def serve_ok(request: Request, record: RequestRecord, origin_s: float) -> None:
    record.status = Status.SUCCEEDED


def run(serve, n=5, **options):
    """Counts and records of `n` requests."""
    records: list[RequestRecord] = []

    async def main() -> ReplayCounts:
        return await replay(requests(n), serve, records.append, origin_s=0.0, **options)

    return virtual(main()), records


def test_every_request_is_reported_once() -> None:
    counts, records = run(serve_ok)
    assert (counts.offered, counts.succeeded, counts.failed, counts.unsent) == (5, 5, 0, 0)
    assert sorted(record.id for record in records) == [0, 1, 2, 3, 4]


def test_sent_at_its_schedule() -> None:
    _, records = run(serve_ok)
    assert [record.sent_s for record in records] == [i * 0.01 for i in range(5)]


@pytest.mark.parametrize("origin_s", [0.1, 0.3, 1234.567])
def test_never_sent_before_its_schedule_by_the_rounding_of_its_origin(origin_s) -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        await asyncio.sleep(origin_s)
        await replay(requests(1000), serve_ok, records.append, origin_s=origin_s)

    virtual(main())
    assert all(record.sent_s >= record.scheduled_s for record in records)


def test_a_slow_server_does_not_delay_the_schedule() -> None:
    async def slow(request: Request, record: RequestRecord, origin_s: float) -> None:
        await asyncio.sleep(0.2)
        record.status = Status.SUCCEEDED

    _, records = run(slow, n=5)
    assert [record.sent_s for record in records] == [i * 0.01 for i in range(5)]


def test_stop_leaves_the_rest_unsent_and_counted() -> None:
    stop = asyncio.Event()

    async def stopping(request: Request, record: RequestRecord, origin_s: float) -> None:
        record.status = Status.SUCCEEDED
        if request.id == 1:
            stop.set()

    counts, records = run(stopping, n=6, stop=stop)
    assert (counts.offered, counts.succeeded, counts.unsent) == (6, 2, 4)
    assert sum(record.status is Status.UNSENT for record in records) == 4
    assert all(record.sent_s is None for record in records if record.status is Status.UNSENT)


def test_the_drain_is_bounded_and_late_requests_fail_visibly() -> None:
    async def never(request: Request, record: RequestRecord, origin_s: float) -> None:
        await asyncio.Event().wait()

    counts, records = run(never, n=3, drain_s=0.05)
    assert (counts.offered, counts.failed) == (3, 3)
    assert {record.failure for record in records} == {"cancelled"}


def test_an_unexpected_error_is_a_failed_request_not_a_lost_one() -> None:
    async def broken(request: Request, record: RequestRecord, origin_s: float) -> None:
        raise RuntimeError("bug in the target")

    counts, records = run(broken, n=2)
    assert counts.failed == 2
    assert records[0].failure == "RuntimeError: bug in the target"


def test_cancelling_the_replay_reports_what_was_in_flight() -> None:
    records: list[RequestRecord] = []

    async def never(request: Request, record: RequestRecord, origin_s: float) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.ensure_future(replay(requests(3, 0.0), never, records.append, origin_s=0.0))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    virtual(main())
    assert [record.status for record in records] == [Status.FAILED] * 3


def test_a_replay_without_memory_fails_and_not_its_requests_one_after_the_other() -> None:
    served: list[int] = []

    async def none_left(request: Request, record: RequestRecord, origin_s: float) -> None:
        served.append(request.id)
        raise MemoryError

    with pytest.raises(MemoryError):
        run(none_left, n=5)
    assert served == [0]


def test_nor_is_there_an_end_of_requests_when_their_making_finds_no_memory() -> None:
    def none_left():
        yield from requests(1, 0.0)
        raise MemoryError

    with pytest.raises(MemoryError):
        virtual(replay(none_left(), serve_ok, lambda record: None, origin_s=0.0))


def test_a_task_serves_on_after_a_request_that_failed() -> None:
    tasks: list[asyncio.Task | None] = []

    async def every_other_breaks(request: Request, record: RequestRecord, origin_s: float) -> None:
        tasks.append(asyncio.current_task())
        await asyncio.sleep(0)
        if request.id % 2:
            raise RuntimeError(f"bug {request.id}")
        record.status = Status.SUCCEEDED

    counts, records = run(every_other_breaks, 6)
    assert len(set(tasks)) == 1 and len(tasks) == 6
    assert (counts.succeeded, counts.failed) == (3, 3)
    failures = [record.failure for record in records if record.failure]
    assert failures == [f"RuntimeError: bug {i}" for i in (1, 3, 5)]


def test_a_request_that_ends_although_it_was_cancelled_does_not_hold_the_replay() -> None:
    async def stubborn(request: Request, record: RequestRecord, origin_s: float) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        record.status = Status.SUCCEEDED

    counts, _ = run(stubborn, n=2, drain_s=0.01)
    assert counts.succeeded == 2
