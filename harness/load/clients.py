"""The client processes of a run, as their parent sees them: started, told, listened to, ended."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import CommandError, ExitCode
from harness.load.recording import Tally
from harness.load.selfcheck import ClientHealth
from harness.load.spec import LoadSpec, PhaseSpec
from harness.replay import ReplayCounts

#: From the word to go until time 0: every process has it by then.
_LEAD_S = 0.1
_READ_LIMIT = 16 << 20


class ClientFailed(CommandError):
    """A client process ended with an error, or without a word."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Progress:
    """Where a phase stands, over all client processes. Times in seconds."""

    elapsed_s: float
    counts: ReplayCounts
    in_flight: int
    received_bytes: int
    tally: Tally
    failures: dict[str, int]


@dataclass(slots=True)
class PhaseDone:
    """What the client processes said of a phase that has ended."""

    counts: ReplayCounts
    clients: list[ClientHealth]
    tally: Tally
    failures: dict[str, int]
    max_rss_bytes: list[int]
    wall_anchor: float
    stopped: bool = False


class Clients:
    """The `spec.processes` client processes; each writes its rows to `directory(index)`."""

    def __init__(
        self, spec: LoadSpec, directory: Callable[[int], Path], meta: dict[str, str]
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._meta = meta
        self._processes: list[asyncio.subprocess.Process] = []
        self._stopped = False

    async def start(self, ready_timeout_s: float) -> str:
        """Start all. Returns the model they will ask for. Raises ClientFailed."""
        for index in range(self._spec.processes):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "harness.load.client",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_READ_LIMIT,
            )
            self._processes.append(process)
            directory = self._directory(index)
            directory.mkdir(parents=True, exist_ok=True)
            start = {
                "spec": self._spec.model_dump(mode="json"),
                "index": index,
                "directory": str(directory),
                "meta": self._meta,
                "ready_timeout_s": ready_timeout_s,
            }
            self._tell(process, start=start)
        answers = await asyncio.gather(*(self._hear(each, "ready") for each in self._processes))
        return str(answers[0]["ready"])

    async def phase(
        self, phase: PhaseSpec, on_progress: Callable[[Progress], None] = lambda progress: None
    ) -> PhaseDone:
        """Run `phase` in all of them. Raises ClientFailed."""
        for process in self._processes:
            self._tell(process, phase=phase.model_dump(mode="json"))
        await asyncio.gather(*(self._hear(each, "prepared") for each in self._processes))
        origin_s = time.monotonic() + _LEAD_S
        wall_anchor = time.time() + _LEAD_S
        for process in self._processes:
            self._tell(process, go=origin_s)
        if self._stopped:
            self.stop()
        latest: dict[int, dict[str, Any]] = {}

        async def follow(index: int) -> dict[str, Any]:
            while True:
                message = await self._hear(self._processes[index], "progress", "done")
                if "done" in message:
                    done: dict[str, Any] = message["done"]
                    return done
                latest[index] = message["progress"]
                if len(latest) == len(self._processes) and index == 0:
                    on_progress(_joined(time.monotonic() - origin_s, list(latest.values())))
                    # Histograms are cycles of a few hundred KiB, and too few for the collector's
                    # own count to notice.
                    gc.collect(1)

        ended = await asyncio.gather(*(follow(at) for at in range(len(self._processes))))
        return PhaseDone(
            counts=_counts(ended),
            clients=[ClientHealth(**each["health"]) for each in ended],
            tally=_tally(ended),
            failures=_failures(ended),
            max_rss_bytes=[each["max_rss_bytes"] for each in ended],
            wall_anchor=wall_anchor,
            stopped=self._stopped,
        )

    def stop(self) -> None:
        """No client sends anything more, in this phase or a later one; what is under way ends."""
        self._stopped = True
        for process in self._processes:
            self._tell(process, stop=True)

    async def close(self, complete: bool) -> None:
        """End all; their files are whole then. Raises ClientFailed."""
        for process in self._processes:
            self._tell(process, close=complete)
        await asyncio.gather(*(self._hear(each, "closed") for each in self._processes))
        await self.abandon()

    async def abandon(self) -> None:
        """End those that still run, whatever they do. Idempotent."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                async with asyncio.timeout(10.0):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._processes = []

    def _tell(self, process: asyncio.subprocess.Process, **message: Any) -> None:
        assert process.stdin is not None
        if not process.stdin.is_closing():
            process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _hear(self, process: asyncio.subprocess.Process, *wanted: str) -> dict[str, Any]:
        assert process.stdout is not None
        while True:
            line = await process.stdout.readline()
            if not line:
                code = await process.wait()
                raise ClientFailed(f"a client process ended with code {code}", ExitCode.BUG)
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                raise ClientFailed(message["error"], ExitCode(message["exit_code"]))
            if any(name in message for name in wanted):
                return message


def _joined(elapsed_s: float, parts: list[dict[str, Any]]) -> Progress:
    return Progress(
        elapsed_s,
        _counts(parts),
        sum(each["in_flight"] for each in parts),
        sum(each["received_bytes"] for each in parts),
        _tally(parts),
        _failures(parts),
    )


def _counts(parts: list[dict[str, Any]]) -> ReplayCounts:
    return ReplayCounts(
        **{name: sum(each["counts"][name] for each in parts) for name in ReplayCounts.__slots__}
    )


def _tally(parts: list[dict[str, Any]]) -> Tally:
    """Histograms are added up; percentiles are only ever taken of the sum."""
    whole = Tally()
    for each in parts:
        whole.merge(Tally.decode(each["tally"]))
    return whole


def _failures(parts: list[dict[str, Any]]) -> dict[str, int]:
    joined: dict[str, int] = {}
    for each in parts:
        for kind, count in each["failures"].items():
            joined[kind] = joined.get(kind, 0) + count
    return joined
