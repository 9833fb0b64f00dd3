"""One completion over HTTP: from the first byte sent to the last event read."""

from __future__ import annotations

from collections.abc import Callable

from harness.load.answer import judge, read_event, read_whole, refusal_text
from harness.load.flight import Flight
from harness.load.sse import SseParser
from harness.targets.base import Done

_MAX_WHOLE_BYTES = 256 << 20


class Completion:
    """The exchange of a flight's answer, streamed or whole (the server's Content-Type says)."""

    __slots__ = ("_asked_s", "_body", "_done", "_flight", "_sse", "observe")

    def __init__(self, flight: Flight, done: Done, asked_s: float | None = None) -> None:
        """`asked_s`: when a connection was asked for, where not as the flight was sent. The wait
        for it is added to what the flight has waited already.
        """
        self._flight = flight
        self._asked_s = flight.sent_s if asked_s is None else asked_s
        self._done = done
        self._sse: SseParser | None = None
        self._body: list[bytes] | None = None
        #: Sees every event of the stream besides the flight; for fields of one kind of server.
        self.observe: Callable[[Flight, bytes], None] | None = None

    def started(self, now: float, fresh: bool, abort: Callable[[str], None]) -> None:
        flight = self._flight
        if flight.ended_s is not None:
            # Given up while it waited for a connection.
            abort("not wanted any more")
            return
        flight.attempts += 1
        if self._asked_s is not None:
            flight.pool_wait_s = (flight.pool_wait_s or 0.0) + now - self._asked_s
            flight.new_connection = fresh
            self._asked_s = None
        flight.cancel = abort

    def body(self, status: int, headers: dict[bytes, bytes], data: bytes, now: float) -> None:
        flight = self._flight
        flight.received_bytes += len(data)
        sse = self._sse
        if sse is None:
            if self._body is not None:
                self._keep(data)
                return
            flight.http_status = status
            flight.first_byte_s = now
            kind = headers.get(b"content-type", b"")
            if status != 200 or b"text/event-stream" not in kind:
                self._body = []
                self._keep(data)
                return
            sse = self._sse = SseParser()
        self._events(sse.feed(data), now)

    def ended(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        flight = self._flight
        flight.http_status = status
        if self._sse is not None:
            self._events(self._sse.finish(), now)
        elif status != 200:
            flight.fail(refusal_text(status, b"".join(self._body or ())))
        else:
            try:
                read_whole(flight, b"".join(self._body or ()), now)
            except (AttributeError, TypeError) as error:
                flight.fail(f"an answer of an unknown form: {error}")
        self._finish(now)

    def failed(self, reason: str, now: float) -> None:
        if self._flight.ended_s is None:
            self._flight.fail(reason)
        self._finish(now)

    def _keep(self, data: bytes) -> None:
        assert self._body is not None
        self._body.append(data)
        if self._flight.received_bytes > _MAX_WHOLE_BYTES and self._flight.cancel is not None:
            self._flight.cancel(f"an answer of more than {_MAX_WHOLE_BYTES >> 20} MiB")

    def _events(self, payloads: list[bytes], now: float) -> None:
        flight = self._flight
        try:
            for payload in payloads:
                read_event(flight, payload, now)
                if self.observe is not None:
                    self.observe(flight, payload)
        except (AttributeError, TypeError) as error:
            flight.fail(f"an event of an unknown form: {error}")

    def _finish(self, now: float) -> None:
        flight = self._flight
        if flight.ended_s is not None:
            return
        flight.cancel = None
        flight.ended_s = now
        judge(flight)
        self._done(flight)
