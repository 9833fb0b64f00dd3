"""Measures the transport against plain sockets and iperf3, in one interleaved window.

A *place* says how to reach from one process to another (loopback, two namespaces, a shaped link).
Everything compared runs round by round in turn, so that what the machine does besides falls on all
alike; ratios are medians of the ratios of single rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.transport.cipher import CipherRate, measure_cipher, median_rate
from engine.transport.messages import CHUNK_BYTES
from engine.transport.pacing import host_congestion
from engine.transport.security import Security

ROOT = str(Path(__file__).resolve().parents[2])
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a source and a sink run. expose(port): the address at which the source reaches the
    sink's port, across the link. rate_bps: what a shaper allows of payload, 0 where there is none.
    """

    name: str
    description: str
    sink_host: str
    expose: Callable[[int], Awaitable[tuple[str, int]]]
    source_prefix: Sequence[str] = ()
    sink_prefix: Sequence[str] = ()
    rate_bps: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """size_bytes: what each contestant sends a round. layers, layer_bytes: of one cache of the
    layer-wise transfers; as many caches are sent as make up size_bytes (layer_bytes 0: one), and
    `parallel` of them are under way at a time, as a prefill instance has them. rounds: of the
    interleaved window. security: (source, sink), to measure TLS as well."""

    size_bytes: int = 256 << 20
    layers: int = 32
    layer_bytes: int = 0
    parallel: int = 4
    lanes: int = 4
    chunk_bytes: int = CHUNK_BYTES
    rounds: int = 5
    overlap: bool = True
    security: tuple[Security, Security] | None = None

    def layered(self) -> dict[str, int]:
        """The layer-wise job."""
        size = self.layer_bytes or self.size_bytes // self.layers
        return {
            "layers": self.layers,
            "layer_bytes": size,
            "caches": max(1, self.size_bytes // (self.layers * size)),
            "parallel": self.parallel,
        }


@dataclass(slots=True)
class Measure:
    """One contestant's rounds: Gbit/s of payload, and CPU seconds per GB of both ends together."""

    gbps: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Transfer hidden behind compute: `prefill_s` of paced layers; the transfer alone takes
    `transfer_s`. ideal_s: prefill and then the last layer's transfer."""

    prefill_s: float
    transfer_s: float
    ideal_s: float
    layer_wise_s: float
    serial_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """congestion: the control of the data connections and of the plain sockets."""

    place: Place
    plan: Plan
    measures: dict[str, Measure]
    overlap: Overlap | None
    cipher: CipherRate | None = None
    congestion: str = ""

    @property
    def yardsticks(self) -> list[str]:
        """What the others are compared with."""
        return [name for name in self.measures if name == "raw" or name.startswith("iperf3")]

    def ratio(self, name: str, to: str) -> float | None:
        """Median over rounds of name's rate / to's rate; None where one was not measured."""
        ours, theirs = self.measures.get(name), self.measures.get(to)
        if ours is None or theirs is None:
            return None
        pairs = zip(ours.gbps, theirs.gbps, strict=False)
        return statistics.median(a / b for a, b in pairs)


class _Worker:
    """A process that answers lines with lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self.read()

    async def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError("a bench worker ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def _worker(prefix: Sequence[str], part: str, options: dict) -> AsyncIterator[_Worker]:
    process = await asyncio.create_subprocess_exec(
        *prefix,
        sys.executable,
        "-m",
        "engine.transport.peers",
        part,
        json.dumps(options),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield _Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def iperf3_gbps(
    place: Place, seconds: float, connections: int, congestion: str = ""
) -> tuple[float, float] | None:
    """(Gbit/s received, CPU seconds per GB of both ends), or None where it is not installed.
    congestion: a congestion control by name, empty for the host's."""
    if shutil.which("iperf3") is None:
        return None
    port = 5201
    server = await asyncio.create_subprocess_exec(
        *(*place.sink_prefix, "iperf3", "-s", "-1", "-B", place.sink_host, "-p", str(port)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        host, seen_port = await place.expose(port)
        await asyncio.sleep(0.3)
        client = await asyncio.create_subprocess_exec(
            *(*place.source_prefix, "iperf3", "-c", host, "-p", str(seen_port)),
            *("-P", str(connections), "-t", str(seconds), "-J"),
            *(("-C", congestion) if congestion else ()),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await client.communicate()
        end = json.loads(output)["end"]
        rate_bps = end["sum_received"]["bits_per_second"]
        shares = end["cpu_utilization_percent"]
        busy = (shares["host_total"] + shares["remote_total"]) / 100
        return rate_bps / 1e9, busy / (rate_bps / 8e9)
    except (KeyError, ValueError):
        return None
    finally:
        # It serves one client and ends by itself, unless the client never came.
        try:
            async with asyncio.timeout(3):
                await server.wait()
        except TimeoutError:
            server.kill()
            await server.wait()


async def run_bench(place: Place, plan: Plan) -> Result:
    """Measure everything that the plan asks for at one place."""
    async with contextlib.AsyncExitStack() as stack:
        plain = await _Pair.start(stack, place, plan, None)
        secure = None
        if plan.security is not None:
            secure = await _Pair.start(stack, place, plan, plan.security)
        whole = {"layers": 1, "layer_bytes": plan.size_bytes}
        contestants: dict[str, Callable[[], Awaitable[tuple[float, float] | None]]] = {
            "raw": lambda: plain.measure({**whole, "raw": plan.lanes}),
            "single": lambda: plain.measure(whole),
            "layers": lambda: plain.measure(plan.layered()),
        }
        if secure is not None:
            contestants["tls"] = lambda: secure.measure(whole)
        measures: dict[str, Measure] = {}
        ciphers: list[CipherRate] = []
        for attempt in range(plan.rounds + 1):
            for name, measure in contestants.items():
                outcome = await measure()
                if attempt and outcome is not None:  # the first round opens connections
                    _note(measures, name, outcome)
            if attempt:
                if plan.security is not None:
                    ciphers.append(measure_cipher(*plan.security))
                gbps = measures["raw"].gbps[-1]
                seconds = max(1.0, min(4.0, 8 * plan.size_bytes / (gbps * 1e9)))
                others = {"iperf3": ""}
                if plain.congestion != host_congestion():
                    # Both comparisons are of interest: with what a user gets who asks for nothing,
                    # and with the same control on either side.
                    others[f"iperf3 -C {plain.congestion}"] = plain.congestion
                for name, congestion in others.items():
                    outcome = await iperf3_gbps(place, seconds, plan.lanes, congestion)
                    if outcome is not None:
                        _note(measures, name, outcome)
        overlap = await plain.overlap(measures["layers"]) if plan.overlap else None
    cipher = median_rate(ciphers) if ciphers else None
    return Result(place, plan, measures, overlap, cipher, plain.congestion)


def _note(measures: dict[str, Measure], name: str, outcome: tuple[float, float]) -> None:
    measure = measures.setdefault(name, Measure())
    measure.gbps.append(outcome[0])
    measure.cpu_s_per_gb.append(outcome[1])


@dataclass(slots=True)
class _Pair:
    """A source and a sink at one place. congestion: the control that data connections use there,
    known when the plain sockets have been measured."""

    plan: Plan
    source: _Worker
    sink: _Worker
    address: tuple[str, int]
    raw_address: tuple[str, int]
    congestion: str = ""

    @classmethod
    async def start(
        cls,
        stack: contextlib.AsyncExitStack,
        place: Place,
        plan: Plan,
        security: tuple[Security, Security] | None,
    ) -> _Pair:
        common = {"arena_bytes": plan.size_bytes, "lanes": plan.lanes}
        for_source: dict[str, Any] = dict(common)
        for_sink: dict[str, Any] = {**common, "host": place.sink_host}
        if security is not None:
            for_source["security"], for_sink["security"] = (s.to_json() for s in security)
        sink = await stack.enter_async_context(_worker(place.sink_prefix, "sink", for_sink))
        source = await stack.enter_async_context(_worker(place.source_prefix, "source", for_source))
        async with asyncio.timeout(START_S):
            ports = await sink.read()
            await source.read()
        return cls(
            plan,
            source,
            sink,
            await place.expose(ports["port"]),
            await place.expose(ports["raw_port"]),
        )

    async def measure(self, job: dict[str, Any]) -> tuple[float, float]:
        """(Gbit/s of payload, CPU seconds per GB of both ends) of one job."""
        raw = "raw" in job
        name = "raw_cpu_s" if raw else "cpu_s"
        before = (await self.sink.ask({}))[name]
        to = list(self.raw_address if raw else self.address)
        answer = await self.source.ask({"chunk_bytes": self.plan.chunk_bytes, **job, "to": to})
        self.congestion = answer.get("congestion", self.congestion)
        used_s = answer["cpu_s"] + (await self.sink.ask({}))[name] - before
        size = job.get("caches", 1) * job["layers"] * job["layer_bytes"]
        return 8 * size / answer["seconds"] / 1e9, used_s / (size / 1e9)

    async def overlap(self, measured: Measure) -> Overlap:
        """Pace the layers so that the transfer alone takes 60 % of the prefill, then compare."""
        plan = self.plan
        transfer_s = 8 * plan.size_bytes / (statistics.median(measured.gbps) * 1e9)
        prefill_s = transfer_s / 0.6
        job = {
            "layers": plan.layers,
            "layer_bytes": plan.size_bytes // plan.layers,
            "chunk_bytes": plan.chunk_bytes,
            "pace_s": prefill_s / plan.layers,
            "to": list(self.address),
        }
        layer_wise, serial = [], []
        for _ in range(plan.rounds):
            layer_wise.append((await self.source.ask(job))["seconds"])
            serial.append((await self.source.ask({**job, "serial": True}))["seconds"])
        return Overlap(
            prefill_s,
            transfer_s,
            prefill_s + transfer_s / plan.layers,
            statistics.median(layer_wise),
            statistics.median(serial),
        )
