"""Connections to one server: kept alive, reused last in first out, and never fewer than needed.

There is no limit unless one is asked for: every request that finds no idle connection opens one.
What a request waits (for a connection to open, or for one to come free under a limit) is its pool
wait. Names are looked up once. A kept connection that the server closed before a byte of the answer
costs another attempt, which the flight counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import SplitResult

from harness.load.alarm import Due
from harness.load.http1 import ProtocolError, ResponseParser

#: Connections opened at a time: more would overflow a server's listen queue and wait for SYN
#: retries, a second each.
_OPENING = 256
_CONNECT_S = 30.0


class Exchange(Protocol):
    """One request and its answer, told of what happens to it. One of `ended` and `failed` is
    called, once. Times are of the loop's clock.
    """

    def started(self, now: float, fresh: bool, abort: Callable[[str], None]) -> None: ...

    def body(self, status: int, headers: dict[bytes, bytes], data: bytes, now: float) -> None: ...

    def ended(self, status: int, headers: dict[bytes, bytes], now: float) -> None: ...

    def failed(self, reason: str, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where requests go. `proxy` is (host, port): plain HTTP is sent to it, TLS tunnelled."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    proxy: tuple[str, int] | None = None

    @classmethod
    def of(
        cls,
        url: SplitResult,
        tls: ssl.SSLContext | None = None,
        proxy: tuple[str, int] | None = None,
    ) -> Origin:
        secure = url.scheme == "https"
        return cls(
            url.hostname or "",
            url.port or (443 if secure else 80),
            (tls or ssl.create_default_context()) if secure else None,
            proxy,
        )


class Pool:
    """All connections to `origin`. `limit` bounds them; None does not. Sends that are `due` go
    before the next answer is read.
    """

    def __init__(self, origin: Origin, limit: int | None = None, due: Due | None = None) -> None:
        self.due = due or Due()
        self.origin = origin
        self.limit = limit
        self.opened = 0
        self._loop = asyncio.get_running_loop()
        # In order of use, and quick to remove from when thousands close at once.
        self._idle: dict[_Connection, None] = {}
        self._open: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[bytes, Exchange]] = deque()
        self._addresses: list[str] = []

    def submit(self, message: bytes, exchange: Exchange) -> None:
        """Send `message` on an idle connection, else on a new one."""
        idle = self._idle
        if idle:
            idle.popitem()[0].start(message, exchange)
            return
        self._waiting.append((message, exchange))
        self._open_more()

    def close(self) -> None:
        for task in self._opening:
            task.cancel()
        while self._waiting:
            self._waiting.popleft()[1].failed("the client closed", self._loop.time())
        for connection in list(self._open):
            connection.abort("the client closed")

    def _open_more(self) -> None:
        wanted = min(len(self._waiting), _OPENING) - len(self._opening)
        if self.limit is not None:
            wanted = min(wanted, self.limit - len(self._open) - len(self._opening))
        for _ in range(wanted):
            task = self._loop.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._tried)

    def _tried(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            if self._waiting:
                _, exchange = self._waiting.popleft()
                exchange.failed(f"cannot connect: {error}", self._loop.time())
            if not isinstance(error, OSError | TimeoutError | ProtocolError | ssl.SSLError):
                raise error
        self._open_more()

    async def _connect(self) -> None:
        origin = self.origin
        host, port = origin.proxy or (origin.host, origin.port)
        if not self._addresses:
            found = await self._loop.getaddrinfo(host, port, type=1)
            self._addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        failure: Exception | None = None
        for address in self._addresses:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    connection = await self._reach(address, port)
                break
            except TimeoutError:
                failure = TimeoutError(f"no answer from {address} port {port} in {_CONNECT_S:g} s")
            except OSError as error:
                failure = error
        else:
            raise failure or OSError(f"{host} has no address")
        self.opened += 1
        self._open.add(connection)
        self.free(connection)

    async def _reach(self, address: str, port: int) -> _Connection:
        origin = self.origin
        if origin.proxy and origin.tls:
            tunnel = _Tunnel(f"{origin.host}:{origin.port}", self._loop.create_future())
            transport, _ = await self._loop.create_connection(lambda: tunnel, address, port)
            connection = _Connection(self)
            try:
                await tunnel.ready
                upgraded = await self._loop.start_tls(
                    transport, connection, origin.tls, server_hostname=origin.host
                )
            except BaseException:
                transport.abort()
                raise
            assert upgraded is not None
            connection.connection_made(upgraded)
            return connection
        secure = origin.tls
        _, made = await self._loop.create_connection(
            lambda: _Connection(self),
            address,
            port,
            ssl=secure,
            server_hostname=origin.host if secure else None,
        )
        return made

    def free(self, connection: _Connection) -> None:
        """`connection` can take the next request."""
        if self._waiting:
            connection.start(*self._waiting.popleft())
        else:
            self._idle[connection] = None

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
        if self._waiting:
            self._open_more()


class _Connection(asyncio.Protocol):
    """One connection, carrying one exchange at a time."""

    __slots__ = (
        *("_clock", "_due", "_exchange", "_fd", "_message"),
        *("_parser", "_pool", "_transport", "_used"),
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._due = pool.due
        self._clock = pool._loop.time
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser = ResponseParser()
        self._message = b""
        self._used = False
        #: Of the socket where bytes may go to it as they are, else -1.
        self._fd = -1

    def start(self, message: bytes, exchange: Exchange) -> None:
        assert self._transport is not None and self._exchange is None
        if self._transport.is_closing():
            self._pool._waiting.appendleft((message, exchange))
            self._pool.lost(self)
            return
        self._exchange = exchange
        self._message = message
        self._parser = ResponseParser()
        self._write(self._transport, message)
        exchange.started(self._clock(), not self._used, self.abort)

    def _write(self, transport: asyncio.Transport, message: bytes) -> None:
        """At once: uvloop writes only after all reads that are ready."""
        sent = 0
        # An answer may come before all of its request has gone: that goes first.
        if self._fd >= 0 and not transport.get_write_buffer_size():
            # What is wrong with the socket, the transport finds out and tells.
            with contextlib.suppress(OSError):
                sent = os.write(self._fd, message)
        if sent < len(message):
            transport.write(message[sent:] if sent else message)

    def abort(self, reason: str) -> None:
        """Give the connection up. Its exchange fails for `reason`."""
        exchange, self._exchange = self._exchange, None
        if self._transport is not None:
            self._transport.abort()
        if exchange is not None:
            exchange.failed(reason, self._clock())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sslcontext") is None:
            self._fd = transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        exchange, parser = self._exchange, self._parser
        if exchange is None:
            # Bytes that nobody asked for: an answer to no request, or a server's farewell.
            if self._transport is not None:
                self._transport.abort()
            return
        try:
            body = parser.feed(data)
        except ProtocolError as error:
            self.abort(str(error))
            return
        if body:
            exchange.body(parser.status, parser.headers, body, now)
        if parser.ended:
            self._end(exchange, parser, now)
        if self._due.at_s <= now:
            self._due.act()

    def _end(self, exchange: Exchange, parser: ResponseParser, now: float) -> None:
        if self._exchange is None:
            return
        self._exchange = None
        self._used = True
        self._message = b""
        # Free first: the end of one exchange often starts the next.
        if parser.keep_alive:
            self._pool.free(self)
        elif self._transport is not None:
            self._transport.close()
        exchange.ended(parser.status, parser.headers, now)

    def connection_lost(self, error: Exception | None) -> None:
        self._fd = -1
        exchange, parser = self._exchange, self._parser
        self._pool.lost(self)
        if exchange is None:
            return
        now = self._clock()
        try:
            parser.eof()
        except ProtocolError as broken:
            self._exchange = None
            if self._used and not parser.begun:
                self._pool.submit(self._message, exchange)
                return
            if parser.status == 0 or error is not None:
                exchange.failed(f"connection lost: {error or broken}", now)
            else:
                exchange.failed(f"truncated: {broken}", now)
        else:
            self._end(exchange, parser, now)


class _Tunnel(asyncio.Protocol):
    """CONNECT through a proxy: `ready` is done when it answered 200."""

    def __init__(self, authority: str, ready: asyncio.Future[None]) -> None:
        self.ready = ready
        self._authority = authority
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        request = f"CONNECT {self._authority} HTTP/1.1\r\nHost: {self._authority}\r\n\r\n"
        cast(asyncio.Transport, transport).write(request.encode())

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if b"\r\n\r\n" in self._answer and not self.ready.done():
            line = self._answer.split(b"\r\n", 1)[0]
            if b" 200" in line:
                self.ready.set_result(None)
            else:
                self.ready.set_exception(ProtocolError(f"the proxy answered {line[:60]!r}"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ready.done():
            self.ready.set_exception(error or ProtocolError("the proxy closed the connection"))
