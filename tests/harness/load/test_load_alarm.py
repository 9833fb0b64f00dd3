"""Sends that are due: woken in time, and never behind the reading of answers."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from scripted import make_request

from harness import realtime
from harness.load.alarm import Alarm, Due, FineAlarm, alarm
from harness.load.driver import Driver
from harness.load.flight import Flight
from harness.load.monitor import core_wait_s
from harness.load.pool import Origin, Pool, _Connection
from harness.load.schedule import OpenSchedule, Turn
from results.records import Status


def test_the_real_loop_has_the_fine_alarm_and_others_their_own() -> None:
    async def kind() -> type[Alarm]:
        made = alarm(lambda: None)
        made.close()
        return type(made)

    assert realtime.run(kind()) is FineAlarm
    assert asyncio.run(kind()) is Alarm


@pytest.mark.parametrize("run", [realtime.run, asyncio.run])
def test_an_alarm_rings_once_when_it_was_last_set_to(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        rung: list[float] = []
        made = alarm(lambda: rung.append(loop.time()))
        begun_s = loop.time()
        made.set(begun_s + 0.01)
        made.set(begun_s + 0.06)
        await asyncio.sleep(0.2)
        assert len(rung) == 1
        assert rung[0] >= begun_s + 0.06 - 1e-6
        made.set(loop.time() - 1.0)
        await asyncio.sleep(0.05)
        assert len(rung) == 2
        made.set(loop.time() + 0.01)
        made.close()
        await asyncio.sleep(0.05)
        assert len(rung) == 2

    run(main())


class Reader:
    """A target whose every send is followed by a long batch of reads on the loop."""

    def __init__(self, due: Due, reads: int) -> None:
        self.due = due
        self.reads = reads
        self.order: list[str] = []

    def send(self, flight: Flight, done: Any) -> None:
        self.order.append(f"send {flight.request.id}")
        loop = asyncio.get_running_loop()
        if flight.request.id == 0:
            loop.call_soon(self._batch)
        loop.call_later(0.0, self._end, flight, done)

    def _batch(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(self.reads):
            time.sleep(0.01)
            self.order.append("read")
            if self.due.at_s <= loop.time():
                self.due.act()

    def _end(self, flight: Flight, done: Any) -> None:
        flight.status = Status.SUCCEEDED
        flight.ended_s = asyncio.get_running_loop().time()
        done(flight)


@pytest.mark.parametrize("run", [realtime.run, asyncio.run])
def test_a_due_send_goes_before_the_next_read(run: Any) -> None:
    async def main() -> tuple[list[str], list[Flight]]:
        due = Due()
        target = Reader(due, reads=30)
        flights: list[Flight] = []
        driver = Driver(target, flights.append, due=due)  # type: ignore[arg-type]
        requests = (make_request(k, 0.02 * k) for k in range(8))
        loop = asyncio.get_running_loop()
        await driver.run(OpenSchedule(requests), "load", loop.time())
        return target.order, flights

    order, flights = run(main())
    assert len(flights) == 8
    # All were due in the first 140 ms of a batch of at least 300.
    last_send = max(at for at, what in enumerate(order) if what.startswith("send"))
    assert order[last_send:].count("read") >= 5
    for each in flights:
        assert each.sent_s is not None and each.sent_s >= each.scheduled_s


class Held(OpenSchedule):
    """All but the first request are due only once `held` is false."""

    held = True

    def peek(self) -> Turn | None:
        turn = super().peek()
        if turn is not None and turn.request.id and self.held:
            return Turn(1e6, turn.request)
        return turn


def test_between_two_reads_one_request_is_sent() -> None:
    """However many are due, answers go on being read."""

    async def main() -> list[str]:
        due = Due()
        schedule = Held(make_request(k) for k in range(20))

        class Releasing(Reader):
            def _batch(self) -> None:
                schedule.held = False
                due.at_s = 0.0
                super()._batch()

        target = Releasing(due, reads=5)
        driver = Driver(target, lambda flight: None, due=due)  # type: ignore[arg-type]
        await driver.run(schedule, "load", asyncio.get_running_loop().time())
        return target.order

    order = realtime.run(main())
    begun = order.index("read")
    assert order[: begun + 9] == [
        *("send 0", "read", "send 1", "read", "send 2", "read", "send 3", "read", "send 4", "read"),
    ]
    assert len(order) == 25


async def test_a_connection_asks_what_is_due_after_each_read() -> None:
    due = Due()
    pool = Pool(Origin("host", 1), due=due)
    connection = _Connection(pool)
    acted: list[int] = []
    seen: list[bytes] = []

    class Exchange:
        def started(self, *_: object) -> None: ...

        def body(self, status: int, headers: object, data: bytes, now: float) -> None:
            seen.append(data)

    class Transport:
        sent = b""

        def get_extra_info(self, name: str) -> object:
            return "tls" if name == "sslcontext" else None

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.sent += data

    transport = Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.start(b"request", Exchange())  # type: ignore[arg-type]
    assert transport.sent == b"request"
    due.act = lambda: acted.append(len(seen))
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")
    assert acted == []
    due.at_s = 0.0
    connection.data_received(b"def")
    assert (seen, acted) == ([b"abc", b"def"], [2])


@pytest.mark.parametrize(("buffered", "straight"), [(0, b"second"), (7, b"")])
async def test_bytes_go_straight_to_the_socket_unless_others_wait(
    buffered: int, straight: bytes
) -> None:
    ours, theirs = socket.socketpair()

    class Transport:
        written = b""

        def get_extra_info(self, name: str) -> object:
            return ours if name == "socket" else None

        def get_write_buffer_size(self) -> int:
            return buffered

        def is_closing(self) -> bool:
            return False

        def write(self, data: bytes) -> None:
            self.written += data

    class Exchange:
        def started(self, *_: object) -> None: ...

    transport = Transport()
    connection = _Connection(Pool(Origin("host", 1)))
    connection.connection_made(transport)  # type: ignore[arg-type]
    with ours, theirs:
        theirs.setblocking(False)
        connection.start(b"second", Exchange())  # type: ignore[arg-type]
        try:
            arrived = theirs.recv(100)
        except BlockingIOError:
            arrived = b""
    assert (arrived, transport.written) == (straight, b"" if straight else b"second")


async def test_what_the_socket_does_not_take_the_transport_does() -> None:
    """As with a prompt of hundreds of thousands of tokens."""
    received: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        received.append(await reader.readexactly(len(message)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    message = b"".join(b"%d," % number for number in range(4_000_000))
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    class Exchange:
        def started(self, *_: object) -> None: ...

        def body(self, *_: object) -> None: ...

        def ended(self, status: int, headers: object, now: float) -> None:
            ended.set_result(status)

        def failed(self, reason: str, now: float) -> None:
            ended.set_exception(ConnectionError(reason))

    async with await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 26) as server:
        pool = Pool(Origin("127.0.0.1", server.sockets[0].getsockname()[1]))
        pool.submit(message, Exchange())
        assert await ended == 200
        pool.close()
    assert received == [message]


@pytest.mark.parametrize(
    ("said", "waited_s"), [("5 2500000000 7\n", 2.5), ("", 0.0), ("5 x 7", 0.0), (None, 0.0)]
)
def test_the_kernel_says_how_long_a_thread_waited_for_a_core(
    tmp_path: Path, said: str | None, waited_s: float
) -> None:
    path = tmp_path / "schedstat"
    if said is not None:
        path.write_text(said)
    assert core_wait_s(path) == waited_s
