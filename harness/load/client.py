"""One client process: sends its share of a run. Told what to do by lines of JSON on stdin.

In comes {"start": {...}}, then {"phase": {...}} and {"go": origin_s} for each phase, {"stop": true}
to send no more, and {"close": complete} at the end; the end of stdin is the end of the parent, and
then what there is is written and the process ends. Out go {"ready": model}, {"prepared": true},
{"progress": {...}} every second, {"done": {...}}, {"closed": true}, or {"error", "exit_code"}.
Clock readings are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.worker.lifeline import die_with_parent
from harness.errors import ExitCode, NotReady
from harness.load.alarm import Due
from harness.load.driver import Driver
from harness.load.flight import Flight
from harness.load.limits import raise_open_files
from harness.load.monitor import LoopMonitor
from harness.load.recording import ClientRecorder
from harness.load.spec import LoadSpec, PhaseSpec, schedule_of
from harness.realtime import run
from harness.targets.base import Target
from harness.targets.factory import make_target

_PROGRESS_S = 1.0
_FLUSH_S = 30.0
_READY_RETRY_S = 1.0
_SWITCH_S = 0.0001
#: So long may the files take when the parent is gone.
_LAST_S = 10


_saying = threading.Lock()


def say(**message: Any) -> None:
    """One line to the parent; from any thread."""
    line = json.dumps(message) + "\n"
    with _saying:
        sys.stdout.write(line)
        sys.stdout.flush()


class Client:
    """The state of a client process between its commands."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.spec = LoadSpec.model_validate(start["spec"])
        self.index: int = start["index"]
        self.due = Due()
        self.target: Target = make_target(self.spec.target_of(self.index), self.due)
        self.recorder = ClientRecorder(
            Path(start["directory"]),
            self.spec.name,
            dict(start["meta"], client=str(self.index)),
            self.spec.slo.limits(),
        )
        self.driver: Driver | None = None
        self._received = 0
        self._failures: dict[str, int] = {}

    async def ready(self, timeout_s: float) -> str:
        """Probe until the target answers. Raises NotReady after `timeout_s`."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            try:
                return await self.target.probe()
            except NotReady:
                if loop.time() >= until_s:
                    raise
            await asyncio.sleep(_READY_RETRY_S)

    async def phase(self, phase: PhaseSpec, commands: asyncio.Queue[dict[str, Any]]) -> None:
        """Prepare, wait for the word, run, and report."""
        loop = asyncio.get_running_loop()
        shared = self.spec.model_copy(update={"max_concurrency": phase.max_concurrency})
        schedule = schedule_of(shared, phase, self.index)
        # A trace is opened and sorted for its first request: not on the clock.
        schedule.peek()
        driver = self.driver = Driver(
            self.target,
            self._flight,
            max_concurrency=shared.cap(self.index),
            timeout_s=self.spec.timeout_s,
            due=self.due,
        )
        self._received = 0
        self._failures = {}
        say(prepared=True)
        go = await commands.get()
        if "go" not in go:
            return
        origin_s: float = go["go"]
        monitor = LoopMonitor()
        reporter = loop.create_task(self._report(phase, driver))
        try:
            await driver.run(
                schedule,
                phase.name,
                origin_s,
                closed=phase.closed,
                until_s=phase.duration_s if phase.closed else None,
                drain_s=self.spec.drain_s,
                seed=phase.seed,
            )
        finally:
            reporter.cancel()
            health = monitor.stop(self.spec.target.max_connections is not None)
            self.driver = None
        self.recorder.seal()
        tally = await asyncio.wrap_future(self.recorder.snapshot(phase.name))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        say(
            done={
                "counts": asdict(driver.counts),
                "health": asdict(health),
                "in_flight": 0,
                "received_bytes": self._received,
                "tally": tally,
                "failures": self._failures,
                "max_rss_bytes": usage.ru_maxrss * 1024,
            }
        )

    def _flight(self, flight: Flight) -> None:
        self._received += flight.received_bytes
        if flight.failure:
            # Messages that differ only in their ending are one kind, and kinds are bounded.
            kind = flight.failure[:120]
            if kind in self._failures or len(self._failures) < 100:
                self._failures[kind] = self._failures.get(kind, 0) + 1
        self.recorder.add(flight)

    async def _report(self, phase: PhaseSpec, driver: Driver) -> None:
        loop = asyncio.get_running_loop()
        flushed_s = loop.time()
        while True:
            await asyncio.sleep(_PROGRESS_S)
            if loop.time() - flushed_s > _FLUSH_S:
                flushed_s = loop.time()
                self.recorder.flush()
            self.recorder.seal()
            tally = await asyncio.wrap_future(self.recorder.snapshot(phase.name))
            # What batches and histograms leave in cycles is few objects but large ones.
            gc.collect(1)
            progress = {
                "counts": asdict(driver.counts),
                "in_flight": driver.in_flight,
                "received_bytes": self._received,
                "tally": tally,
                "failures": dict(self._failures),
            }
            # It is more than a pipe holds: a parent that is busy must not stop the loop.
            await asyncio.to_thread(say, progress=progress)


async def _commands(
    queue: asyncio.Queue[dict[str, Any]], clients: list[Client], serving: asyncio.Task[Any]
) -> None:
    """Lines of stdin; a stop is obeyed at once, and so is the end of the parent."""
    reader = asyncio.StreamReader(limit=64 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        message = json.loads(line)
        if "stop" in message:
            for client in clients:
                if client.driver is not None:
                    client.driver.stop()
                # Whoever stops may kill next; what the writer met is raised at the close.
                with contextlib.suppress(Exception):
                    client.recorder.flush()
        else:
            queue.put_nowait(message)
    serving.cancel()


async def serve() -> None:
    clients: list[Client] = []
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    serving = asyncio.current_task()
    assert serving is not None
    listening = asyncio.get_running_loop().create_task(_commands(queue, clients, serving))
    try:
        start = (await queue.get())["start"]
    except asyncio.CancelledError:
        return
    client = Client(start)
    clients.append(client)
    complete = False
    try:
        say(ready=await client.ready(start["ready_timeout_s"]))
        gc.collect()
        gc.freeze()
        # What a request leaves behind has no cycles; the young generation may wait longer.
        gc.set_threshold(50_000, 10, 10)
        while True:
            message = await queue.get()
            if "phase" in message:
                await client.phase(PhaseSpec.model_validate(message["phase"]), queue)
            elif "close" in message:
                complete = bool(message["close"])
                break
    except asyncio.CancelledError:
        # Nobody is left to hear of it.
        return
    finally:
        await client.target.close()
        client.recorder.close(complete)
        listening.cancel()
    say(closed=True)


def _tie_to_parent() -> None:
    """Signals to the whole group are the parent's to act on. That it ended is a SIGTERM too, and
    heard also by a loop that is too busy to read stdin: it has `_LAST_S` then.
    """
    parent = os.getppid()

    def terminated(*_: object) -> None:
        if os.getppid() != parent:
            signal.alarm(_LAST_S)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, terminated)
    die_with_parent(parent)


def main() -> int:
    _tie_to_parent()
    raise_open_files()
    # The loop waits at most so long for the interpreter while the recorder's thread has it.
    sys.setswitchinterval(_SWITCH_S)
    try:
        run(serve())
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            say(error=f"{type(error).__name__}: {error}", exit_code=int(ExitCode.BUG))
            raise
        say(error=str(error), exit_code=int(code))
        return int(code)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
