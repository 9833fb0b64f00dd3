"""The client processes of a run, as their parent sees them: started, told, listened to, ended."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import CommandError, ExitCode
from harness.load.recording import Tally
from harness.load.selfcheck import ClientHealth
from harness.load.spec import LoadSpec, PhaseSpec
from harness.replay import ReplayCounts

#: From the word to go until time 0: every process has it by then.
_LEAD_S = 0.1
#: Beyond its duration and its drain a phase may take its duration again, but at least so long.
_GRACE_S = 60.0
#: From the word to stop until the kill of clients that are overdue: they write what they have.
_LAST_WORDS_S = 5.0
#: So long may a client take to get ready for a phase (it opens and sorts a trace), and to write the
#: ends of its files.
_PREPARE_S = 600.0
_READ_LIMIT = 16 << 20


class ClientFailed(CommandError):
    """A client process ended with an error, or without a word, or was killed."""

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


def longest_s(spec: LoadSpec, phase: PhaseSpec) -> float | None:
    """How long `phase` can take, s; None where only its requests end it: a cap, or turns that wait
    for others, put off what was due within the duration.
    """
    delayed = spec.max_concurrency is not None or spec.sessions == "closed"
    if phase.duration_s is None or (delayed and not phase.closed):
        return None
    return phase.duration_s + spec.drain_s + max(_GRACE_S, phase.duration_s)


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
        self._timer: asyncio.TimerHandle | None = None
        #: Why the clients were killed; empty: they were not.
        self.killed = ""

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
        answers = await self._hear_all("ready", ready_timeout_s + _PREPARE_S)
        return str(answers[0]["ready"])

    async def phase(
        self, phase: PhaseSpec, on_progress: Callable[[Progress], None] = lambda progress: None
    ) -> PhaseDone:
        """Run `phase` in all of them. Of clients that are killed it tells what they last said.

        Raises ClientFailed.
        """
        for process in self._processes:
            self._tell(process, phase=phase.model_dump(mode="json"))
        await self._hear_all("prepared", _PREPARE_S)
        origin_s = time.monotonic() + _LEAD_S
        wall_anchor = time.time() + _LEAD_S
        for process in self._processes:
            self._tell(process, go=origin_s)
        if self._stopped:
            self.stop()
        elif (limit_s := longest_s(self._spec, phase)) is not None:
            self._kill_after(
                limit_s,
                f"a phase of {phase.duration_s:g} s had not ended after {limit_s:g} s",
            )
        latest: dict[int, dict[str, Any]] = {}
        running = set(range(len(self._processes)))

        async def follow(index: int) -> dict[str, Any]:
            while True:
                try:
                    message = await self._hear(self._processes[index], "progress", "done")
                except ClientFailed:
                    if not self.killed:
                        raise
                    return latest.get(index) or _NOTHING
                if "done" in message:
                    done: dict[str, Any] = message["done"]
                    latest[index] = done
                    running.discard(index)
                    return done
                latest[index] = message["progress"]
                # Once a round, and on when some have nothing more to send.
                if len(latest) == len(self._processes) and index == min(running):
                    on_progress(_joined(time.monotonic() - origin_s, list(latest.values())))
                    # Histograms are cycles of a few hundred KiB, and too few for the collector's
                    # own count to notice.
                    gc.collect(1)

        ended = await asyncio.gather(*(follow(at) for at in range(len(self._processes))))
        self._disarm()
        return PhaseDone(
            counts=_counts(ended),
            clients=[ClientHealth(**each["health"]) for each in ended if "health" in each],
            tally=_tally(ended),
            failures=_failures(ended),
            max_rss_bytes=[each["max_rss_bytes"] for each in ended if "max_rss_bytes" in each],
            wall_anchor=wall_anchor,
            stopped=self._stopped,
        )

    def stop(self) -> None:
        """No client sends anything more, in this phase or a later one; what is under way ends, or
        is ended with its client when the drain is long over.
        """
        self._stopped = True
        for process in self._processes:
            self._tell(process, stop=True)
        limit_s = self._spec.drain_s + _GRACE_S
        self._kill_after(limit_s, f"they were not done {limit_s:g} s after the stop")

    def kill(self, reason: str) -> None:
        """End all at once. What they have not written is lost."""
        self.killed = self.killed or f"the clients were killed: {reason}"
        self._disarm()
        for process in self._processes:
            if process.returncode is None:
                process.kill()

    def _kill_after(self, delay_s: float, reason: str) -> None:
        self._disarm()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._overdue, reason)

    def _overdue(self, reason: str) -> None:
        for process in self._processes:
            self._tell(process, stop=True)
        self._timer = asyncio.get_running_loop().call_later(_LAST_WORDS_S, self.kill, reason)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self, complete: bool) -> None:
        """End all; their files are whole then. Raises ClientFailed."""
        for process in self._processes:
            self._tell(process, close=complete)
        await self._hear_all("closed", _PREPARE_S)
        await self.abandon()

    async def abandon(self) -> None:
        """End those that still run, whatever they do. Idempotent."""
        self._disarm()
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

    async def _hear_all(self, wanted: str, limit_s: float) -> list[dict[str, Any]]:
        """The word `wanted` of each client. Raises ClientFailed, after `limit_s` too: those that
        stand still are killed then, and the others with them.
        """
        hearing = [asyncio.ensure_future(self._hear(each, wanted)) for each in self._processes]
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.gather(*hearing)
        except TimeoutError:
            silent = [
                str(process.pid)
                for process, heard in zip(self._processes, hearing, strict=True)
                if heard.cancelled()
            ]
            self.kill(
                f"process {', '.join(silent)} was not {wanted} within {limit_s:g} s; was it "
                "stopped, or the machine out of memory?"
            )
            raise ClientFailed(self.killed, ExitCode.INCOMPLETE) from None

    async def _hear(self, process: asyncio.subprocess.Process, *wanted: str) -> dict[str, Any]:
        assert process.stdout is not None
        while True:
            line = await process.stdout.readline()
            if not line:
                code = await process.wait()
                if self.killed:
                    raise ClientFailed(
                        f"{self.killed}, before anything was measured", ExitCode.INTERRUPTED
                    )
                raise ClientFailed(f"a client process ended with code {code}", ExitCode.BUG)
            message: dict[str, Any] = json.loads(line)
            if "error" in message:
                raise ClientFailed(message["error"], ExitCode(message["exit_code"]))
            if any(name in message for name in wanted):
                return message


#: Of a client that was killed before it said anything.
_NOTHING: dict[str, Any] = {
    "counts": asdict(ReplayCounts()),
    "tally": Tally().encode(),
    "failures": {},
}


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
