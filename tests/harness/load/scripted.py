"""A scripted answer on a fake clock, and a target on a virtual one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from harness.load.flight import Flight
from harness.load.tables import Batch
from harness.targets.completion import Completion
from results.records import Status
from workloads.request import Request

SSE = {b"content-type": b"text/event-stream"}
JSON = {b"content-type": b"application/json"}


def make_request(ident: int = 0, arrival_s: float = 0.0, output_tokens: int = 16) -> Request:
    return Request(ident, arrival_s, 8, output_tokens)


def chat(content: str | None = None, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    if content is not None:
        delta["content"] = content
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def text(content: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish, **more}]}


def usage(tokens: int, prompt: int = 8) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}}


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def play(
    script: Sequence[tuple[float, Any]],
    *,
    asked: int = 16,
    status: int = 200,
    headers: dict[bytes, bytes] = SSE,
    ends: str = "whole",
) -> Flight:
    """A flight of which `script` tells (ms after the scheduled send, event or bytes). `ends`:
    whole, or the reason for which the connection was lost.
    """
    flight = Flight(make_request(output_tokens=asked), "load", 100.0, 100.0)
    flight.sent_s = flight.due_s = 100.0
    done: list[Flight] = []
    exchange = Completion(flight, done.append)
    exchange.started(100.0, True, lambda reason: None)
    now = 100.0
    for at_ms, what in script:
        now = 100.0 + at_ms / 1e3
        data = what if isinstance(what, bytes) else event(what)
        exchange.body(status, headers, data, now)
    if ends == "whole":
        exchange.ended(status, headers, now)
    else:
        exchange.failed(ends, now)
    assert done == [flight]
    return flight


def batch(*flights: Flight) -> Batch:
    return Batch(flights)


class FakeTarget:
    """Serves each request in `service_s` of the loop's clock, `slots` at a time; others queue."""

    def __init__(
        self, service_s: Callable[[Request], float] | float, slots: int | None = None
    ) -> None:
        self.service_s = service_s if callable(service_s) else (lambda request: service_s)
        self.slots = slots
        self.at_once = self.most_at_once = 0
        self.flights: list[Flight] = []
        self.fails: Callable[[Request], str] = lambda request: ""
        self._queue: list[tuple[Flight, Any]] = []

    def send(self, flight: Flight, done: Any) -> None:
        self.flights.append(flight)
        flight.attempts = 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self.slots is not None and self.at_once > self.slots:
            self._queue.append((flight, done))
        else:
            self._begin(flight, done)

    def _begin(self, flight: Flight, done: Any) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.service_s(flight.request), self._end, flight, done)

        def cancel(reason: str) -> None:
            timer.cancel()
            flight.fail(reason)
            self._finish(flight, done)

        flight.cancel = cancel

    def _end(self, flight: Flight, done: Any) -> None:
        now = asyncio.get_running_loop().time()
        failure = self.fails(flight.request)
        if failure:
            flight.fail(failure)
        else:
            flight.chunk_s.append(now)
            flight.finish_reason = "length"
            flight.status = Status.SUCCEEDED
        self._finish(flight, done)

    def _finish(self, flight: Flight, done: Any) -> None:
        self.at_once -= 1
        flight.ended_s = asyncio.get_running_loop().time()
        flight.cancel = None
        done(flight)
        if self._queue:
            self._begin(*self._queue.pop(0))

    async def probe(self) -> str:
        return "fake"

    async def close(self) -> None:
        return None
