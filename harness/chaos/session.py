"""The control socket of a worker without the socket: what `RemoteInstance` talks to.

Stands for aiohttp's client session and the worker's HTTP application: bodies are parsed by the
worker's own strict parsers, and a client that leaves cancels its work.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict
from typing import Any

import aiohttp

from engine.worker.errors import WorkerError
from engine.worker.messages import parse_decode, parse_key, parse_prefill
from harness.chaos.content import VOCAB
from harness.chaos.worker import VirtualWorker

#: One way over the control socket.
RPC_S = 0.0005


class Response:
    """The part of aiohttp's that is used."""

    def __init__(self, status: int, body: Any = None) -> None:
        self.status = status
        self._body = body
        self._lines: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()

    async def json(self) -> Any:
        return self._body

    @property
    async def content(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            if isinstance(line, BaseException):
                raise line
            yield line

    def write(self, value: Any) -> None:
        self._lines.put_nowait(json.dumps(value).encode() + b"\n")

    def end(self, error: BaseException | None = None) -> None:
        self._lines.put_nowait(error)


class Exchange:
    """`async with session.post(...) as response`: the handler runs in a task of the worker."""

    def __init__(self, session: ControlSession, path: str, body: dict[str, Any]) -> None:
        self._session = session
        self._work = (path, body)
        self._handler: asyncio.Task[None] | None = None
        self._answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Response:
        worker = self._session.worker
        if worker.dead:
            raise aiohttp.ClientConnectionError("no such socket")
        path, body = self._work
        handle = self._session.handler(path, body, self._answer)
        self._handler = task = asyncio.get_running_loop().create_task(handle)
        self._session.handlers.add(task)
        task.add_done_callback(self._session.handlers.discard)
        try:
            return await self._answer
        except asyncio.CancelledError:
            task.cancel()
            raise

    async def __aexit__(self, *error: object) -> None:
        if self._handler is not None and not self._handler.done():
            self._handler.cancel()


class ControlSession:
    """To one life of one worker."""

    def __init__(self, worker: VirtualWorker) -> None:
        self.worker = worker
        self.handlers: set[asyncio.Task[None]] = set()

    def post(self, path: str, json: dict[str, Any], timeout: object = None) -> Exchange:
        return Exchange(self, path, json)

    def sever(self) -> None:
        """The worker died: every exchange breaks."""
        for task in list(self.handlers):
            task.cancel()

    async def handler(
        self, path: str, body: dict[str, Any], answer: asyncio.Future[Response]
    ) -> None:
        worker = self.worker
        stream: Response | None = None
        try:
            await asyncio.sleep(RPC_S)
            await worker.running()
            try:
                if path == "/decode":
                    async with contextlib.aclosing(self._decode(body)) as lines:
                        async for line in lines:
                            await worker.running()
                            if stream is None:
                                stream = Response(200)
                                _give(answer, stream)
                            stream.write(line)
                    assert stream is not None
                    stream.end()
                else:
                    found = await self._simple(path, body)
                    await worker.running()
                    await asyncio.sleep(RPC_S)
                    _give(answer, Response(200, found))
            except WorkerError as error:
                await worker.running()
                told = {"error": error.kind, "message": str(error)}
                if stream is None:
                    _give(answer, Response(error.status, told))
                else:
                    stream.write(told)
                    stream.end()
        except asyncio.CancelledError:
            lost = aiohttp.ClientConnectionError("the worker closed the connection")
            if stream is not None:
                stream.end(lost)
            elif not answer.done():
                answer.set_exception(lost)
            raise
        except Exception as error:
            if not worker.dead:
                worker.violate(f"worker error: {path}: {type(error).__name__}: {error}")
            told = {"error": "internal", "message": repr(error)}
            _give(answer, Response(500, told))

    async def _simple(self, path: str, body: dict[str, Any]) -> Any:
        worker = self.worker
        match path:
            case "/prefill":
                return asdict(await worker.prefill(parse_prefill(body, VOCAB)))
            case "/abandon":
                worker.abandon(parse_key(body))
            case "/drain":
                await worker.drain()
            case "/convert":
                await worker.convert(body["role"])
            case _:
                raise AssertionError(path)
        return {}

    async def _decode(self, body: dict[str, Any]) -> AsyncGenerator[Any]:
        worker = self.worker
        parsed = parse_decode(body)
        sequence = worker.take(parsed)
        tokens = worker.stream(parsed.key, sequence)
        first = True
        try:
            async for token in tokens:
                yield {"admitted_s" if first else "t_s": token.t_s, "token": token.id}
                first = False
        finally:
            await tokens.aclose()
        yield {"done": True, "overruns": sequence.overruns}


def _give(answer: asyncio.Future[Response], response: Response) -> None:
    if not answer.done():
        answer.set_result(response)
