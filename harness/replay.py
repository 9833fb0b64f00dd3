"""Open-loop replay: each request leaves at its scheduled time, whatever the system does.

The schedule is absolute on the loop's clock, so a late send never delays the next; how late each
one was is in its record (`sent_s - scheduled_s`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

from results.records import RequestRecord, Status
from workloads.request import Request

Serve = Callable[[Request, RequestRecord, float], Coroutine[None, None, None]]


@dataclass(slots=True)
class ReplayCounts:
    """offered = succeeded + failed + unsent, always, once `replay` has returned."""

    offered: int = 0
    succeeded: int = 0
    failed: int = 0
    unsent: int = 0


async def replay(
    requests: Iterable[Request],
    serve: Serve,
    on_record: Callable[[RequestRecord], None],
    *,
    origin_s: float,
    stop: asyncio.Event | None = None,
    drain_s: float | None = None,
) -> ReplayCounts:
    """Send `requests` (in arrival order) at origin_s + arrival_s; return when all have ended.

    `stop` ends sending early: the rest is counted unsent. `drain_s` bounds the wait for
    requests in flight after the last send; those still running are cancelled and fail. Each
    request is reported once through `on_record`.
    """
    loop = asyncio.get_running_loop()
    counts = ReplayCounts()
    in_flight: dict[asyncio.Task[None], RequestRecord] = {}

    def ended(task: asyncio.Task[None]) -> None:
        # Counted here and not in the task: a task cancelled before its first step never runs.
        record = in_flight.pop(task)
        if record.status is Status.SUCCEEDED:
            counts.succeeded += 1
        else:
            counts.failed += 1
            record.status = Status.FAILED
            record.failure = record.failure or _why(task)
        on_record(record)

    stopping = asyncio.ensure_future(stop.wait()) if stop is not None else None
    try:
        for request in requests:
            counts.offered += 1
            record = RequestRecord(
                request.id,
                request.arrival_s,
                request.input_tokens,
                request.output_tokens,
                request.session,
                request.tenant,
                request.slo_class,
            )
            due_s = origin_s + request.arrival_s
            delay_s = due_s - loop.time()
            if delay_s > 0:
                if stopping is None:
                    await _until(due_s)
                elif not stopping.done():
                    await asyncio.wait((stopping,), timeout=delay_s)
            if stopping is not None and stopping.done():
                record.status = Status.UNSENT
                counts.unsent += 1
                on_record(record)
                continue
            record.sent_s = loop.time() - origin_s
            task = loop.create_task(serve(request, record, origin_s))
            in_flight[task] = record
            task.add_done_callback(ended)
        if in_flight:
            await asyncio.wait(in_flight, timeout=drain_s)
    finally:
        if stopping is not None:
            stopping.cancel()
        for task in in_flight:
            task.cancel()
        if in_flight:
            await asyncio.wait(in_flight)
    # `ended` was added before the wait's own callback, so it has run for every task by now.
    return counts


async def _until(due_s: float) -> None:
    """Sleep until the loop's clock shows `due_s`: no rounding through a delay, and less work."""
    loop = asyncio.get_running_loop()
    due: asyncio.Future[None] = loop.create_future()
    timer = loop.call_at(due_s, _wake, due)
    try:
        await due
    except asyncio.CancelledError:
        timer.cancel()
        raise


def _wake(due: asyncio.Future[None]) -> None:
    if not due.done():
        due.set_result(None)


def _why(task: asyncio.Task[None]) -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return f"{type(error).__name__}: {error}" if error is not None else "no status"
