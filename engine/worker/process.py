"""The worker process: starts, serves, and ends with one clear line whatever happens."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from aiohttp import web

from engine.pacing import Pacing
from engine.transport.errors import TransportError
from engine.transport.security import server_context
from engine.worker import options as worker_options
from engine.worker.api import make_app
from engine.worker.lifeline import die_with_parent
from engine.worker.loading import load_engine
from engine.worker.options import WorkerOptions
from engine.worker.worker import Worker

log = logging.getLogger(__name__)


class StartFailed(Exception):
    """The worker could not come up; the message says what to mend."""

    exit_code = 3


def main(argv: Sequence[str]) -> int:
    """`prfaas worker` without the other commands, for the nursery. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="prfaas worker", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    worker_options.add_arguments(parser)
    try:
        return serve(worker_options.from_namespace(parser.parse_args(argv)))
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        print(f"prfaas worker: {error}", file=sys.stderr)
        return int(code)


def serve(options: WorkerOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises errors with an `exit_code`."""
    logging.basicConfig(
        format=f"%(asctime)s {options.name} %(levelname)s %(name)s: %(message)s", level=logging.INFO
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    if options.socket is not None:
        die_with_parent()
    return uvloop.run(_serve(options))


async def _serve(options: WorkerOptions) -> int:
    # First what is cheap to find wrong: it should show before seconds of loading.
    listener = _listen(options)
    context = None if options.security is None else server_context(options.security)
    if options.socket is not None:
        # The socket file's mode says who may use it.
        context = None
    pacing = None if options.pacing is None else Pacing.read(options.pacing)
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[BaseException | None] = loop.create_future()

    def finish(error: BaseException | None = None) -> None:
        if not stop.done():
            stop.set_result(error)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, finish)
    worker = Worker(options, load_engine(options), pacing)
    runner = web.AppRunner(
        make_app(worker),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=options.grace_s,
    )
    try:
        try:
            await worker.start(finish)
        except TransportError as error:
            raise StartFailed(f"data plane on {options.data_host}: {error}") from error
        await runner.setup()
        await web.SockSite(runner, listener, ssl_context=context).start()
        log.info("%s ready as %s", options.socket or options.listen, options.role)
        crash = await stop
        if crash is not None:
            log.error("the engine loop failed", exc_info=crash)
            return 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(options.grace_s):
                await worker.drain()
        return 0
    finally:
        await runner.cleanup()
        await worker.stop()
        if options.socket is not None:
            options.socket.unlink(missing_ok=True)


def _listen(options: WorkerOptions) -> socket.socket:
    """The control API's listening socket. Raises StartFailed."""
    try:
        if options.listen is not None:
            return socket.create_server(options.listen, reuse_port=False)
        assert options.socket is not None
        _remove_stale(options.socket)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(options.socket))
        listener.listen(128)
        return listener
    except OSError as error:
        where = options.socket or "{}:{}".format(*options.listen or ("", 0))
        why = os.strerror(error.errno) if error.errno else str(error)
        raise StartFailed(f"cannot listen on {where}: {why}") from error


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a worker that is gone; one that answers is left, and bind fails."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
