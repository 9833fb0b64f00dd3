"""Two small workers for measurements and fault tests: one sends caches, the other takes them.

    python -m engine.transport.peers sink   '{"host": ..., "layout": ...}'   prints {"port": ...}
    python -m engine.transport.peers source '{"to": [host, port], ...}'      prints one result

Each runs in a process (and, for links, a network namespace) of its own and speaks JSON lines.
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
from engine.transport.messages import Key, Manifest
from engine.transport.outbound import Peer
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
    """Takes every offer into the same memory: caches are dropped as soon as they are admitted."""

    def __init__(self, arena: SharedArena) -> None:
        self.arena = arena
        self.committed = 0

    async def on_offer(self, key: Key, manifest: Manifest) -> dict[Region, list[Range]]:
        at = 0
        regions = {}
        for item in manifest.regions:
            regions[item.region] = [Range(at, item.size_bytes)]
            at += item.size_bytes
        return regions

    async def on_commit(self, key: Key, arrival: Arrival) -> None:
        self.committed += 1

    def on_abort(self, key: Key) -> None:
        pass


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
    """Serve until stdin closes; then print the plane's CPU seconds."""
    arena = SharedArena.create(options["arena_bytes"])
    worker = Sink(arena)
    plane = await DataPlane.start(
        arena,
        _settings(options, 2, options["host"]),
        Callbacks(worker.on_offer, worker.on_commit, worker.on_abort),
    )
    print(json.dumps({"port": plane.port}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps({"cpu_s": cpu_s(plane.pid), "committed": worker.committed}), flush=True)
    await plane.close()


async def source(options: dict[str, Any]) -> None:
    """Send `repeats` caches of `layers` x `layer_bytes` (`pace_s` of compute a layer first); print
    bytes, seconds and CPU seconds."""
    layers, layer_bytes = options["layers"], options["layer_bytes"]
    arena = SharedArena.create(layers * layer_bytes)
    block = os.urandom(1 << 20)
    for at in range(0, arena.size_bytes, len(block)):
        part = min(len(block), arena.size_bytes - at)
        arena.buffer[at : at + part] = block[:part]
    plane = await DataPlane.start(arena, _settings(options, 1, "127.0.0.1"))
    regions = [RegionSize(Region(layer, Kind.KV), layer_bytes) for layer in range(layers)]
    manifest = Manifest(tuple(regions), n_tokens=1, chunk_bytes=options.get("chunk_bytes", 1 << 20))
    peer = Peer(options["to"][0], options["to"][1])
    # The first transfer opens the connections and touches the memory.
    results = []
    for number in range(options.get("repeats", 1) + 1):
        used = cpu_s(plane.pid)
        started = time.perf_counter()
        transfer = plane.offer(peer, Key(f"b{os.getpid()}-{number}"), manifest)
        for layer, item in enumerate(regions):
            if options.get("pace_s"):
                await asyncio.sleep(started + (layer + 1) * options["pace_s"] - time.perf_counter())
            transfer.push(item.region, [Range(layer * layer_bytes, layer_bytes)])
        stats = await transfer.commit()
        results.append(
            {
                "seconds": time.perf_counter() - started,
                "cpu_s": cpu_s(plane.pid) - used,
                "bytes": manifest.total_bytes,
                "wire_bytes": stats.wire_bytes,
                "resent": stats.resent,
            }
        )
    print(json.dumps({"transfers": results[1:]}), flush=True)
    await plane.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["sink", "source"])
    parser.add_argument("options", type=json.loads)
    arguments = parser.parse_args()
    asyncio.run({"sink": sink, "source": source}[arguments.part](arguments.options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
