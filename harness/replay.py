"""Open-loop replay: each request leaves at its scheduled time, whatever the system does.

The schedule is absolute on the loop's clock, so a late send never delays the next; how late each
one was is in its record (`sent_s - scheduled_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

from harness.stalls import Timeout
from results.records import RequestRecord, Status
from workloads.request import Request

#: A request, by the number under which it is in flight.
_Job = tuple[int, Request, RequestRecord]

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
    timeout: Timeout = asyncio.timeout,
    counts: ReplayCounts | None = None,
) -> ReplayCounts:
    """Send `requests` (in arrival order) at origin_s + arrival_s; return when all have ended.

    `stop` ends sending early: the rest is counted unsent. `drain_s` bounds the wait for
    requests in flight after the last send, by `timeout`; those still running are cancelled and
    fail. Each request is reported once through `on_record`. `counts`, which is returned, is filled
    in as it goes.
    """
    sender = _Sender(requests, serve, on_record, origin_s, counts or ReplayCounts())
    stopping = asyncio.ensure_future(stop.wait()) if stop is not None else None
    try:
        if stopping is not None:
            stopping.add_done_callback(sender.stop)
        sender.send_due()
        await sender.all_sent
        with contextlib.suppress(TimeoutError):
            async with contextlib.nullcontext() if drain_s is None else timeout(drain_s):
                await sender.none_in_flight()
    finally:
        if stopping is not None:
            stopping.cancel()
        await sender.cancel()
    return sender.counts


class _Sender:
    """Sends from a timer's callback: a task that sleeps until each arrival costs twice as much."""

    def __init__(
        self,
        requests: Iterable[Request],
        serve: Serve,
        on_record: Callable[[RequestRecord], None],
        origin_s: float,
        counts: ReplayCounts,
    ) -> None:
        self.counts = counts
        self._requests = iter(requests)
        self._serve = serve
        self._on_record = on_record
        self._origin_s = origin_s
        self._loop = asyncio.get_running_loop()
        #: Done when there is nothing left to send; fails with what the requests' iterator raises.
        self.all_sent: asyncio.Future[None] = self._loop.create_future()
        self._in_flight: dict[int, RequestRecord] = {}
        self._none_in_flight: asyncio.Future[None] | None = None
        #: Tasks that serve requests, and what those that have none wait for, the last to end first.
        self._servers: dict[asyncio.Task[None], None] = {}
        self._idle: list[asyncio.Future[_Job]] = []
        self._next: Request | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send_due(self) -> None:
        """Send all that is due, and set the timer for the next."""
        if self.all_sent.done():
            return  # the replay was cancelled at this moment
        loop, origin_s, counts = self._loop, self._origin_s, self.counts
        now_s = loop.time()
        try:
            request = self._next or next(self._requests, None)
            while request is not None:
                due_s = origin_s + request.arrival_s
                if due_s > now_s:
                    self._next = request
                    self._timer = loop.call_at(due_s, self.send_due)
                    return
                record = _record_of(request)
                sent_s = now_s - origin_s
                # Adding the origin to the arrival and taking it off again may round to less.
                record.sent_s = sent_s if sent_s > record.scheduled_s else record.scheduled_s
                counts.offered = number = counts.offered + 1
                self._in_flight[number] = record
                if self._idle:
                    self._idle.pop().set_result((number, request, record))
                else:
                    # One name for all: asyncio's own would be formatted for each.
                    server = self._server(number, request, record)
                    self._servers[loop.create_task(server, name="request")] = None
                request = next(self._requests, None)
        except MemoryError as error:
            self._give_up(error)
        except Exception as error:
            self.all_sent.set_exception(error)
        else:
            self.all_sent.set_result(None)

    def _give_up(self, error: MemoryError) -> None:
        """The replay fails, where the loop does not end at once."""
        self._loop.call_exception_handler({"message": "no memory left", "exception": error})
        for waited_for in (self.all_sent, self._none_in_flight):
            if waited_for is not None and not waited_for.done():
                waited_for.set_exception(error)
                return

    def stop(self, _: object = None) -> None:
        """Send no more: what is left is unsent."""
        if self.all_sent.done():
            return
        self._disarm()
        if self._next is not None:
            self._leave_unsent(self._next)
        try:
            for request in self._requests:
                self._leave_unsent(request)
        except Exception as error:
            self.all_sent.set_exception(error)
        else:
            self.all_sent.set_result(None)

    async def none_in_flight(self) -> None:
        """Returns when all have ended."""
        if self._in_flight:
            self._none_in_flight = self._loop.create_future()
            await self._none_in_flight

    async def cancel(self) -> None:
        """Send no more, and cancel what is in flight: it fails."""
        self._disarm()
        for task in self._servers:
            task.cancel()
        if self._servers:
            await asyncio.wait(self._servers)
        for number, record in list(self._in_flight.items()):
            # A task that is cancelled before it has begun with a request never does.
            record.status = Status.FAILED
            self._ended(number, record, "cancelled")

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _server(self, number: int, request: Request, record: RequestRecord) -> None:
        """Serves this request, and then others until all are sent: a task costs more to make than
        to wake."""
        loop, origin_s, serve = self._loop, self._origin_s, self._serve
        while True:
            failure = "no status"
            try:
                await serve(request, record, origin_s)
            except asyncio.CancelledError:
                failure = "cancelled"
                raise
            except MemoryError as error:
                # No failure of the request: the next ones would find none either.
                failure = "no memory"
                self._give_up(error)
                return
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            finally:
                self._ended(number, record, failure)
            if self.all_sent.done():
                return
            del request, record  # not to be kept in memory while idle
            next_job: asyncio.Future[_Job] = loop.create_future()
            self._idle.append(next_job)
            number, request, record = await next_job
            del next_job

    def _ended(self, number: int, record: RequestRecord, failure: str) -> None:
        del self._in_flight[number]
        if record.status is Status.SUCCEEDED:
            self.counts.succeeded += 1
        else:
            self.counts.failed += 1
            record.status = Status.FAILED
            record.failure = record.failure or failure
        self._on_record(record)
        waiter = self._none_in_flight
        if waiter is not None and not self._in_flight and not waiter.done():
            waiter.set_result(None)

    def _leave_unsent(self, request: Request) -> None:
        record = _record_of(request)
        record.status = Status.UNSENT
        self.counts.offered += 1
        self.counts.unsent += 1
        self._on_record(record)


def _record_of(request: Request) -> RequestRecord:
    return RequestRecord(
        request.id,
        request.arrival_s,
        request.input_tokens,
        request.output_tokens,
        request.session,
        request.tenant,
        request.slo_class,
    )
