"""The process that carries an emulated link: `python -m harness.links.emulator TOKEN`.

Protocol: the first line of stdin is the configuration; "ready" on stdout says that the link is up,
any other line is an error. Later requests are JSON lines over the control socket. A process that is
not detached ends when its stdin does, however its owner died. Light imports only: it must start at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Protocol

from harness.links.counters import CountersFile
from harness.links.shape import LinkShape
from harness.links.wire import Wire


class Engine(Protocol):
    """What an emulator process runs: `RelayEngine` or `TunEngine`."""

    wires: tuple[Wire, Wire]

    def reshape(self, shape: LinkShape) -> None: ...

    async def expose(self, side: int, host: str, port: int) -> int: ...

    def close(self) -> None: ...


def _build_engine(config: dict[str, Any], publish: CountersFile) -> Engine:
    shape, seed = LinkShape.from_json(config["shape"]), config["seed"]
    if config["kind"] == "relay":
        from harness.links.relay_engine import RelayEngine

        return RelayEngine(shape, seed, publish.write)
    from harness.links.tun_engine import TunEngine

    return TunEngine(shape, seed, publish.write, config["devices"])


async def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "shape":
        engine.reshape(LinkShape.from_json(request["shape"]))
        return {"ok": True}
    if request["op"] == "expose":
        return {"port": await engine.expose(request["side"], request["host"], request["port"])}
    return {"error": f"unknown request {request['op']!r}"}


async def _serve(config: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    publish = CountersFile(Path(config["counters"]), create=True)
    engine = _build_engine(config, publish)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while line := await reader.readline():
                try:
                    answer = await _answer(engine, json.loads(line))
                except (OSError, ValueError, KeyError, NotImplementedError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()

    server = await asyncio.start_unix_server(handle, config["control"])
    if not config["detached"]:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else ended.set())
    print("ready", flush=True)
    await ended.wait()
    server.close()
    engine.close()


def main() -> None:
    config = json.loads(sys.stdin.buffer.readline())
    # Its timers must not wait behind busy workers, or the link would be slower on a busy host.
    # Without the privilege the default priority stays.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        asyncio.run(_serve(config))
    except OSError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
