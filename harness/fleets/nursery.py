"""The owner's end of the worker nursery: asks for workers, hears of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import NotReady

#: Importing torch on two busy cores takes a few seconds.
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 8.0


class Nursery:
    """A process that forks workers. They and it end with this connection, however it ends."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        server: asyncio.Server,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._server = server
        self._reader = reader
        self._writer = writer
        self._next_id = 0
        self._forks: dict[int, asyncio.Future[int]] = {}
        self._on_exit: dict[int, Callable[[int], None]] = {}
        self._listener = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(cls, folder: Path) -> Nursery:
        """Start it with its socket and log in `folder`. Raises NotReady."""
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        connected = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not connected.done():
                connected.set_result((reader, writer))

        path = folder / "nursery.sock"
        server = await asyncio.start_unix_server(accept, str(path))
        log = folder / "nursery.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "engine.worker.nursery",
                "--socket",
                str(path),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait(
                (connected, ended),
                timeout=READY_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if connected.done():
                reader, writer = connected.result()
                line = await asyncio.wait_for(reader.readline(), READY_TIMEOUT_S)
                if line and json.loads(line).get("ready"):
                    return cls(process, server, reader, writer)
        except TimeoutError:
            pass
        finally:
            ended.cancel()
        server.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise NotReady(f"the worker nursery did not start: {last_line(log)}")

    async def fork(
        self, argv: list[str], log: Path, netns: str | None, on_exit: Callable[[int], None]
    ) -> int:
        """A new worker's pid. `on_exit` hears its exit status, negative for a signal."""
        self._next_id += 1
        number = self._next_id
        forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._forks[number] = forked
        message = {"id": number, "argv": argv, "log": str(log), "netns": netns}
        self._writer.write(json.dumps(message).encode() + b"\n")
        try:
            await self._writer.drain()
            pid = await asyncio.wait_for(forked, READY_TIMEOUT_S)
        except (TimeoutError, ConnectionError) as error:
            raise NotReady(f"the worker nursery does not answer ({type(error).__name__})") from None
        self._on_exit[pid] = on_exit
        return pid

    async def close(self) -> None:
        """End all workers and the nursery; returns when they have ended."""
        self._listener.cancel()
        self._writer.close()
        self._server.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _listen(self) -> None:
        while line := await self._reader.readline():
            self._heard(json.loads(line))
        for forked in self._forks.values():
            if not forked.done():
                forked.set_exception(NotReady("the worker nursery ended"))
        for on_exit in list(self._on_exit.values()):
            on_exit(-1)

    def _heard(self, message: dict[str, Any]) -> None:
        if "pid" in message:
            self._forks.pop(message["id"]).set_result(message["pid"])
        elif "exit" in message:
            on_exit = self._on_exit.pop(message["exit"], None)
            if on_exit is not None:
                on_exit(message["status"])


def last_line(log: Path) -> str:
    """The last line that a process wrote, for an error message."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "it wrote nothing"
