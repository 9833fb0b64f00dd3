"""Two small workers for measurements and fault tests: one takes caches, the other sends them.

    python -m engine.transport.peers sink   '{"host": "127.0.0.1", "arena_bytes": 1048576}'
    python -m engine.transport.peers source '{"arena_bytes": 1048576}'

Each runs in a process (and, for links, a network namespace) of its own and speaks JSON lines: it
prints where it listens, then answers each line it reads with one line, until its input closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from engine.transport.arena import SharedArena
from engine.transport.client import Arrival, Callbacks, DataPlane
from engine.transport.messages import CHUNK_BYTES, Key, Manifest
from engine.transport.outbound import Peer
from engine.transport.raw import RawSink, send_options, send_raw
from engine.transport.regions import Kind, Range, Region, RegionSize
from engine.transport.security import Security
from engine.transport.settings import Settings

LAYOUT = "bench"
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Sink:
    """Takes every offer into the next memory, round and round: caches are dropped as soon as they
    are admitted."""

    def __init__(self, arena: SharedArena) -> None:
        self.arena = arena
        self.committed = 0
        self._next = 0

    async def on_offer(self, key: Key, manifest: Manifest) -> dict[Region, list[Range]]:
        at, self._next = _place(self._next, manifest.total_bytes, self.arena.size_bytes)
        regions = {}
        for item in manifest.regions:
            regions[item.region] = [Range(at, item.size_bytes)]
            at += item.size_bytes
        return regions

    async def on_commit(self, key: Key, arrival: Arrival) -> None:
        self.committed += 1

    def on_abort(self, key: Key) -> None:
        pass


def _place(at: int, size: int, room: int) -> tuple[int, int]:
    """(where `size` bytes lie, where the next ones begin) in `room` bytes used round and round."""
    if at + size > room:
        at = 0
    return at, at + size


def _settings(options: dict[str, Any], incarnation: int, host: str) -> Settings:
    security = options.get("security")
    return Settings(
        incarnation=incarnation,
        layout=options.get("layout", LAYOUT),
        host=host,
        lanes=options.get("lanes", 4),
        allow_plain=True,
        security=None if security is None else Security.from_json(security),
    )


async def sink(options: dict[str, Any]) -> None:
    """Prints {"port", "raw_port"}; answers any line with CPU seconds so far (of the worker and its
    plane; of the raw sockets, which live in the worker) and caches taken."""
    arena = SharedArena.create(options["arena_bytes"])
    worker = Sink(arena)
    plane = await DataPlane.start(
        arena,
        _settings(options, 2, options["host"]),
        Callbacks(worker.on_offer, worker.on_commit, worker.on_abort),
    )
    raw = RawSink(options["host"], arena)
    print(json.dumps({"port": plane.port, "raw_port": raw.port}), flush=True)
    while await _line():
        answer = {
            "cpu_s": cpu_s(plane.pid) + cpu_s(os.getpid()),
            "raw_cpu_s": cpu_s(os.getpid()),
            "committed": worker.committed,
        }
        print(json.dumps(answer), flush=True)
    await plane.close()


async def source(options: dict[str, Any]) -> None:
    """Prints {}; each line is a job, answered with its seconds, CPU seconds and bytes.

    job: to (host, port), layers, layer_bytes, chunk_bytes, caches (how many, 1 unless given) of
    which `parallel` are under way at a time, pace_s (compute per layer before it may be pushed),
    serial (push only after the last layer), or raw (that many plain sockets instead; the answer
    names their congestion control).
    """
    arena = SharedArena.create(options["arena_bytes"])
    block = os.urandom(1 << 20)
    for at in range(0, arena.size_bytes, len(block)):
        part = min(len(block), arena.size_bytes - at)
        arena.buffer[at : at + part] = block[:part]
    plane = await DataPlane.start(arena, _settings(options, 1, "127.0.0.1"))
    print(json.dumps({}), flush=True)
    number = 0
    while line := await _line():
        job = json.loads(line)
        raw = None
        if "raw" in job:
            raw = await asyncio.to_thread(send_options, tuple(job["to"]))
        pids = [os.getpid()] if raw else [os.getpid(), plane.pid]
        used_s, started_s = sum(map(cpu_s, pids)), time.perf_counter()
        if raw:
            total = job.get("caches", 1) * job["layers"] * job["layer_bytes"]
            address, (tcp, congestion) = tuple(job["to"]), raw
            await asyncio.to_thread(send_raw, address, arena, total, job["raw"], tcp)
            result = {"wire_bytes": total, "resent": 0, "congestion": congestion}
        else:
            number += 1
            result = await _send_all(plane, f"{os.getpid()}-{number}", job, started_s)
            result["verdicts"] = _verdicts(plane)
        result["seconds"] = time.perf_counter() - started_s
        result["cpu_s"] = sum(map(cpu_s, pids)) - used_s
        print(json.dumps(result), flush=True)
    await plane.close()


async def _send_all(plane: DataPlane, name: str, job: dict[str, Any], started_s: float) -> dict:
    """All caches of a job; sums of what `_send` says."""
    left = iter(range(job.get("caches", 1)))
    total = {"wire_bytes": 0, "resent": 0}

    async def one_by_one() -> None:
        for cache in left:
            result = await _send(plane, Key(f"{name}-{cache}"), cache, job, started_s)
            for key in total:
                total[key] += result[key]

    await asyncio.gather(*(one_by_one() for _ in range(job.get("parallel", 1))))
    return total


async def _send(
    plane: DataPlane, key: Key, cache: int, job: dict[str, Any], started_s: float
) -> dict:
    size = job["layer_bytes"]
    whole = job["layers"] * size
    base = cache % (plane.arena.size_bytes // whole) * whole
    regions = tuple(RegionSize(Region(n, Kind.KV), size) for n in range(job["layers"]))
    manifest = Manifest(regions, n_tokens=1, chunk_bytes=job.get("chunk_bytes", CHUNK_BYTES))
    transfer = plane.offer(Peer(*job["to"]), key, manifest)
    pieces = [(item.region, [Range(base + n * size, size)]) for n, item in enumerate(regions)]
    for layer, piece in enumerate(pieces):
        if job.get("pace_s"):
            due_s = started_s + (layer + 1) * job["pace_s"]
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        if not job.get("serial"):
            transfer.push_many([piece])
    if job.get("serial"):
        transfer.push_many(pieces)
    stats = await transfer.commit()
    return {"wire_bytes": stats.wire_bytes, "resent": stats.resent}


def _verdicts(plane: DataPlane) -> list[str]:
    """The verdicts since the last call, each time it changed."""
    rows = plane.link_samples()
    return [
        row["verdict"]
        for before, row in zip([None, *rows], rows, strict=False)
        if before is None or before["verdict"] != row["verdict"]
    ]


async def _line() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["sink", "source"])
    parser.add_argument("options", type=json.loads)
    arguments = parser.parse_args()
    asyncio.run({"sink": sink, "source": source}[arguments.part](arguments.options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
