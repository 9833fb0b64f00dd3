"""Caches that cross a link, each exactly once: the load of `prfaas link follow`.

    python -m harness.links.caches sink   JSON   on one side
    python -m harness.links.caches source JSON   on the other

The source sends caches 0, 1, 2, ... over the KV transport, several at a time so that the link never
waits for a commit, and offers a cache again under the next attempt until the sink has it. What a
cache holds follows from its number, so the sink compares every byte of it. JSON lines: the source
prints one each `report_s`, and at the end (a line on stdin) its ledger; the sink answers a line
with its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.transport.arena import SharedArena
from engine.transport.client import Arrival, Callbacks, DataPlane, Refusal
from engine.transport.errors import PlaneLost, TransferRefused, TransportError
from engine.transport.messages import Key, Manifest
from engine.transport.observed import observe
from engine.transport.outbound import Peer
from engine.transport.regions import Kind, Range, Region, RegionSize
from engine.transport.settings import Settings

LAYOUT = "link-follow"
#: Refusal of a cache that the sink has already: the answer to its commit was lost on the way.
HERE = "this cache is here already"
#: A pause after a failed attempt, and how long the last caches may take after the end.
RETRY_S, DRAIN_S = 0.1, 20.0


@dataclass(frozen=True, slots=True)
class Load:
    """layers x layer_bytes a cache, `parallel` of them under way at a time, over `lanes`
    connections. chunk_bytes: small, so that a slow link still moves one in a fraction of a second.
    """

    layers: int = 16
    layer_bytes: int = 65_536
    chunk_bytes: int = 65_536
    parallel: int = 4
    lanes: int = 2
    report_s: float = 0.5

    @property
    def cache_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def manifest(self) -> Manifest:
        regions = (RegionSize(Region(n, Kind.KV), self.layer_bytes) for n in range(self.layers))
        return Manifest(tuple(regions), n_tokens=1, chunk_bytes=self.chunk_bytes)

    def pattern(self) -> bytes:
        """The bytes that every cache is cut from, the same at both ends."""
        return random.Random(1).randbytes(4 * self.cache_bytes)

    def ranges(self, cache: int) -> list[Range]:
        """Where the layers of `cache` lie in the pattern; no two caches in a row are alike."""
        room = 3 * self.cache_bytes
        starts = ((cache * 7919 + layer * 104_729) * 64 % room for layer in range(self.layers))
        return [Range(start, self.layer_bytes) for start in starts]


@dataclass(slots=True)
class Taken:
    """The sink's ledger. admitted: cache -> how often it was; damaged: of other content."""

    admitted: dict[int, int] = field(default_factory=dict)
    damaged: int = 0
    aborted: int = 0

    def to_json(self) -> dict[str, int]:
        return {
            "caches": len(self.admitted),
            "highest": max(self.admitted, default=-1),
            "doubled": sum(self.admitted.values()) - len(self.admitted),
            "damaged": self.damaged,
            "aborted": self.aborted,
        }


class Sink:
    """Slots for as many caches as may be under way, and as many again that are being let go."""

    def __init__(self, load: Load, arena: SharedArena, pattern: bytes) -> None:
        self.taken = Taken()
        self._load = load
        self._arena = arena
        self._pattern = memoryview(pattern)
        self._free = [n * load.cache_bytes for n in range(2 * load.parallel)]
        self._held: dict[Key, int] = {}

    async def on_offer(self, key: Key, manifest: Manifest) -> dict[Region, list[Range]]:
        if int(key.request_id) in self.taken.admitted:
            raise Refusal(HERE, retryable=False)
        while not self._free:  # noqa: ASYNC110 - cancelled when the offer is withdrawn
            await asyncio.sleep(0.01)
        at = self._held[key] = self._free.pop()
        size = self._load.layer_bytes
        return {
            item.region: [Range(at + n * size, size)] for n, item in enumerate(manifest.regions)
        }

    async def on_commit(self, key: Key, arrival: Arrival) -> None:
        cache = int(key.request_id)
        at = self._held.pop(key)
        size = self._load.layer_bytes
        for layer, source in enumerate(self._load.ranges(cache)):
            (here,) = self._arena.views([(at + layer * size, size)])
            if here != self._pattern[source.offset : source.offset + size]:
                self.taken.damaged += 1
                break
        self.taken.admitted[cache] = self.taken.admitted.get(cache, 0) + 1
        self._free.append(at)

    def on_abort(self, key: Key) -> None:
        self.taken.aborted += 1
        self._free.append(self._held.pop(key))


async def sink(options: dict[str, Any]) -> None:
    """Prints {"port"}; answers every line with its ledger."""
    load = Load(**options["load"])
    arena = SharedArena.create(2 * load.parallel * load.cache_bytes)
    taker = Sink(load, arena, load.pattern())
    callbacks = Callbacks(taker.on_offer, taker.on_commit, taker.on_abort)
    plane = await DataPlane.start(arena, _settings(load, 2, options["host"]), callbacks)
    print(json.dumps({"port": plane.port}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(taker.taken.to_json()), flush=True)
    await plane.close()


@dataclass(slots=True)
class Sent:
    """The source's ledger. committed: caches that the sink has, `late` of them learned from its
    refusal; failed: attempts that ended without commit. wire_bytes: of the committed attempts."""

    committed: int = 0
    late: int = 0
    failed: int = 0
    resent: int = 0
    wire_bytes: int = 0
    unfinished: int = 0


class Source:
    def __init__(self, load: Load, plane: DataPlane, peer: Peer) -> None:
        self.sent = Sent()
        self.stopping = False
        self._load = load
        self._plane = plane
        self._peer = peer
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Caches one after the other until `stopping`; the last is finished."""
        while not self.stopping:
            cache = next(self._numbers)
            self.sent.unfinished += 1
            for attempt in itertools.count():
                if await self._attempt(Key(str(cache), attempt)):
                    break
                self.sent.failed += 1
                await asyncio.sleep(RETRY_S)
            self.sent.committed += 1
            self.sent.unfinished -= 1

    async def _attempt(self, key: Key) -> bool:
        """Whether the sink has the cache. Raises PlaneLost."""
        manifest = self._load.manifest()
        transfer = self._plane.offer(self._peer, key, manifest)
        places = self._load.ranges(int(key.request_id))
        transfer.push_many(
            [(item.region, [at]) for item, at in zip(manifest.regions, places, strict=True)]
        )
        try:
            stats = await transfer.commit()
        except TransferRefused as error:
            self.sent.late += HERE in error.reason
            return HERE in error.reason
        except PlaneLost:
            raise
        except TransportError:
            return False
        self.sent.wire_bytes += stats.wire_bytes
        self.sent.resent += stats.resent
        return True


async def source(options: dict[str, Any]) -> None:
    """Prints {} when it is ready; then a report each `report_s`, until a line comes; then the
    ledger."""
    load = Load(**options["load"])
    pattern = load.pattern()
    arena = SharedArena.create(len(pattern))
    arena.buffer[:] = pattern
    plane = await DataPlane.start(arena, _settings(load, 1, "127.0.0.1"))
    sender = Source(load, plane, Peer(*options["to"]))
    print(json.dumps({}), flush=True)
    workers = [asyncio.create_task(sender.run()) for _ in range(load.parallel)]
    asked = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    reported_s = time.monotonic()
    while not asked.done():
        await asyncio.wait([asked, *workers], timeout=load.report_s, return_when="FIRST_COMPLETED")
        for worker in workers:
            if worker.done():
                worker.result()
        now_s = time.monotonic()
        seen = asdict(observe(plane.link_samples(), now_s - reported_s))
        reported_s = now_s
        print(json.dumps({"committed": sender.sent.committed, "link": seen}), flush=True)
    sender.stopping = True
    _, late = await asyncio.wait(workers, timeout=DRAIN_S)
    for worker in late:
        worker.cancel()
    print(json.dumps({"sent": asdict(sender.sent)}), flush=True)
    await plane.close()


def _settings(load: Load, incarnation: int, host: str) -> Settings:
    # The two namespaces, or this host's loopback, hold nobody but these two processes.
    return Settings(incarnation, LAYOUT, host, lanes=load.lanes, allow_plain=True)


def main() -> None:
    parts = {"sink": sink, "source": source}
    asyncio.run(parts[sys.argv[1]](json.loads(sys.argv[2])))


if __name__ == "__main__":
    main()
