"""The campaign's kinds of fault on real processes: kill, stop, restart, cut, cancel; then count.

A small experiment runs for so many minutes on real workers behind a real shaped link. Everything is
judged from the outside: the requests' counts, their tokens against one monolithic engine, `/stats`
of each worker, and what the processes hold (memory, descriptors, processes).
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from engine.in_use import in_use_bytes
from harness import realtime
from harness.chaos.holdings import FLOOR_S, Holdings
from harness.chaos.inflict import SETTLE_S, Faults
from harness.chaos.processes import command_of, descendants, family, held_by
from harness.experiment import ConfigurationSpec, Experiment
from harness.fleets.local import LocalFleet, LocalFleets
from harness.fleets.worker_words import ORACLE
from harness.instances.remote import RemoteInstance
from harness.measure import phase_requests
from harness.phases import Phase
from harness.policies.catalog import make_policy
from harness.ports import ServingError
from harness.replay import ReplayCounts, replay
from harness.router import RetryRules, Router
from results.records import RequestRecord, Status
from workloads.request import Request

#: Faults can take whole attempts away for seconds; a request outlasts several of them.
RETRY = RetryRules(max_attempts=8, backoff_s=0.2)
REQUEST_RATE = 0.4  # modelled requests a second; `TIME_SCALE` of them arrive in a real second
TIME_SCALE = 5.0
#: A worker's cache is full, and evicts, before its memory is looked at: it keeps a record of each
#: page, and what fills up once would look like growth without end.
PAGES = 1024
#: Likewise the harness: it remembers so many blocks, states, page names and events of each worker,
#: at 2.5 to 8 new ones a second. The documents that are asked about have 100 blocks.
DIRECTORY_ENTRIES = 256
#: How often what the processes hold is looked at.
LOOK_S = 5.0
#: A worker that does not say within so long what it has in use is stopped: not this time.
SAY_S = 1.0
DRAIN_S = 90.0
#: The other end of a cache tells of it within so long, or was killed first.
HALF_S = 60.0
#: One in so many requests is computed again by one engine alone.
VERIFY_EVERY = 8
#: A request in flight has a control connection at either worker, which stays open for the next.
CONNECTIONS = 2


@dataclass(slots=True)
class Report:
    """What a soak did and found. `faults` counts each kind; `holdings` has a line for each process;
    `cores` is what all processes used on average; `stalled_s` is how long the harness itself stood
    still (nobody may be lost for that)."""

    seconds: float = 0.0
    counts: ReplayCounts = field(default_factory=ReplayCounts)
    cancelled: int = 0
    retried: int = 0
    verified: int = 0
    most_in_flight: int = 0
    fetched: int = 0
    fetches_failed: int = 0
    audited: int = 0
    half_audited: int = 0
    stalled_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    holdings: list[str] = field(default_factory=list)
    cores: float = 0.0
    processes: int = 0
    violations: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        counts = self.counts
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return [
            f"{self.seconds:.0f} s of faults: {done or 'none'}",
            f"{counts.offered} requests: {counts.succeeded} succeeded ({self.retried} after a "
            f"retry), {self.cancelled} cancelled by their clients, "
            f"{counts.failed - self.cancelled} lost, {counts.unsent} unsent",
            f"{self.most_in_flight} in flight at most; {self.verified} verified token for token "
            "against one engine",
            f"{self.fetched} prefixes crossed before a prefill, {self.fetches_failed} failed to",
            f"{self.audited} caches audited, the same digest at both ends; {self.half_audited} at "
            "one end only",
            f"{self.processes} processes below the harness, {self.cores:.2f} cores on average",
            *([f"the harness stood still for {self.stalled_s:.1f} s"] if self.stalled_s else []),
            *self.holdings,
            *(f"VIOLATION {each}" for each in self.violations),
        ]


def experiment_of(seed: int) -> tuple[Experiment, ConfigurationSpec]:
    """Two clusters, two decode instances, tokens enough to keep each busy for a while, and
    documents that are asked about from either cluster, so that prefixes cross too."""
    experiment = Experiment.model_validate(
        {
            "name": "soak",
            "seed": seed,
            "mode": "emulate",
            "workload": {
                "kind": "documents",
                "document": {"mu": 8.8, "sigma": 0.6, "min_tokens": 1024, "max_tokens": 30000},
                "live_documents": 8,
                "reuse": 0.75,
                "output_tokens": 512,
            },
            "cache": {"interval_blocks": 4, "directory_entries": DIRECTORY_ENTRIES},
            "emulate": {"time_scale": TIME_SCALE},
            "configurations": [
                {
                    "name": "prfaas",
                    "policy": "eft",
                    "n_prfaas": 1,
                    "n_prefill": 1,
                    "n_decode": 2,
                }
            ],
        }
    )
    return experiment, experiment.configurations[0]


def soak(minutes: float, seed: int, say: Callable[[str], None] = lambda line: None) -> Report:
    """Raises NotReady where the fleet does not come up; finds everything else itself."""
    report = Report()
    before = set(descendants(os.getpid()))
    with tempfile.TemporaryDirectory(prefix="prfaas-chaos-") as folder:
        realtime.run(_soak(minutes * 60.0, seed, Path(folder), report, say))
    left = [pid for pid in descendants(os.getpid()) if pid not in before]
    if left:
        report.violations.append(f"processes left behind: {left}")
    return report


async def _soak(
    seconds: float, seed: int, folder: Path, report: Report, say: Callable[[str], None]
) -> None:
    experiment, configuration = experiment_of(seed)
    fleet = await LocalFleets(experiment, folder, PAGES).open(experiment, configuration)
    loop = asyncio.get_running_loop()
    try:
        policy = make_policy(configuration.policy, configuration.threshold_tokens or 0.0, {})
        router = Router(
            policy,
            fleet.view,
            fleet.instances,
            fleet.links,
            RETRY,
            prefixes=fleet.prefixes,
            copier=fleet.copier,
        )
        state = _Soak(fleet, router, report)
        faults = Faults(fleet, state.names, state.cancel_two, random.Random(seed), say)
        phase = Phase("soak", REQUEST_RATE, 0.0, seconds * fleet.scale.time_scale)
        expected = len(descendants(os.getpid()))
        holdings = Holdings()
        began_s = loop.time()
        inflicting = loop.create_task(faults.inflict(began_s + seconds))
        beside = [
            loop.create_task(state.look(holdings)),
            loop.create_task(state.verify()),
        ]
        load = replay(
            phase_requests(experiment, phase, fleet.scale, state.note),
            state.serve,
            state.ended,
            origin_s=began_s,
            drain_s=DRAIN_S,
            timeout=fleet.timeout,
        )
        loading = loop.create_task(load)
        # Without its faults a soak shows nothing: it ends with whichever fails first.
        await asyncio.gather(loading, inflicting)
        report.counts = loading.result()
        report.seconds = loop.time() - began_s
        await state.settle(faults)
        for task in beside:
            if task.done():
                task.result()
        await state.verified()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await state.audit_all()
        if fleet.copier is not None:
            report.fetched = fleet.copier.figures.fetched
            report.fetches_failed = fleet.copier.figures.failed
        report.stalled_s = fleet.facts()["stalled_s"]
        report.processes = len(descendants(os.getpid()))
        report.faults = faults.done
        report.violations += faults.violations
        _judge(report, holdings, expected)
    finally:
        await fleet.close()


def _judge(report: Report, holdings: Holdings, expected_processes: int) -> None:
    counts, violations = report.counts, report.violations
    trends = holdings.trends()
    report.holdings = [trend.line() for trend in trends]
    report.cores = sum(trend.cpu_s for trend in trends) / report.seconds
    if counts.offered != counts.succeeded + counts.failed + counts.unsent:
        violations.append(f"counts do not add up: {counts}")
    violations += holdings.violations(CONNECTIONS * report.most_in_flight)
    if report.processes != expected_processes:
        violations.append(f"{expected_processes} processes became {report.processes}")


class _Soak:
    """Load on one fleet, and what is seen of it meanwhile."""

    def __init__(self, fleet: LocalFleet, router: Router, report: Report) -> None:
        self._fleet = fleet
        self._router = router
        self._report = report
        self._clients: dict[asyncio.Task[Any], int] = {}
        self._cancelled: set[int] = set()
        self._kept: dict[int, Request] = {}
        self._to_verify: asyncio.Queue[tuple[Request, list[int]]] = asyncio.Queue()
        #: Digests told by one end of a cache so far, and when (loop seconds).
        self._digests: dict[tuple[str, int, int, str], tuple[str | None, float]] = {}
        self.names = [name for name in fleet.instances if name != ORACLE]

    # --- load --------------------------------------------------------------------------------

    def note(self, request: Request) -> None:
        if request.id % VERIFY_EVERY == 0:
            self._kept[request.id] = request

    async def serve(self, request: Request, record: RequestRecord, origin_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = request.id
        report = self._report
        report.most_in_flight = max(report.most_in_flight, len(self._clients))
        try:
            await self._router.serve(request, record, origin_s)
        finally:
            del self._clients[task]

    def ended(self, record: RequestRecord) -> None:
        report = self._report
        request = self._kept.pop(record.id, None)
        if record.status is Status.SUCCEEDED:
            report.retried += record.attempts > 1
            if request is not None and record.token_ids is not None:
                self._to_verify.put_nowait((request, record.token_ids))
        elif record.id in self._cancelled and record.status is Status.FAILED:
            report.cancelled += 1
        elif record.status is not Status.UNSENT:
            report.violations.append(f"request {record.id} lost: {record.failure}")
        self._cancelled.discard(record.id)
        record.token_ids = None

    async def verify(self) -> None:
        """Compute the sampled requests again, one after the other, as they end."""
        while True:
            request, token_ids = await self._to_verify.get()
            if await self._fleet.verify(request, token_ids):
                self._report.verified += 1
            else:
                self._report.violations.append(f"request {request.id}: wrong tokens")
            self._to_verify.task_done()

    async def verified(self) -> None:
        """Returns when all that were sampled have been computed again."""
        await asyncio.wait_for(self._to_verify.join(), SETTLE_S)

    # --- what is held ------------------------------------------------------------------------

    async def look(self, holdings: Holdings) -> None:
        """Note what the harness and each process below it hold, over and over."""
        loop, own = asyncio.get_running_loop(), os.getpid()
        collected_s = -math.inf
        while True:
            if loop.time() - collected_s >= FLOOR_S:
                # Cycles that wait for a full collection are no growth, and one seldom comes by
                # itself where so many objects live as long as the process.
                gc.collect()
                collected_s = loop.time()
            names = {self._fleet.pid(name): name for name in (*self.names, ORACLE)}
            said = dict(zip(names, await self._in_use(list(names.values())), strict=True))
            mine = replace(held_by(own), in_use_bytes=in_use_bytes())
            holdings.note(loop.time(), "harness", own, mine)
            for pid, parent in family(own).items():
                name, in_use = names.get(pid), said.get(pid, {}).get("in_use_bytes")
                if name is None and parent in names:
                    name = f"{names[parent]}'s plane"
                    in_use = said[parent].get("plane_in_use_bytes")
                with suppress(FileNotFoundError, ProcessLookupError):
                    held = replace(held_by(pid), in_use_bytes=in_use)
                    holdings.note(loop.time(), name or command_of(pid), pid, held)
            await self.audit()
            await asyncio.sleep(LOOK_S)

    async def _in_use(self, names: list[str]) -> list[dict[str, int | None]]:
        """What the workers say that they and their planes have in use, nothing for one that does
        not answer."""

        async def ask(name: str) -> dict[str, int | None]:
            try:
                async with asyncio.timeout(SAY_S):
                    memory: dict[str, int | None] = (await self._remote(name).stats())["memory"]
            except (ServingError, aiohttp.ClientError, TimeoutError, ConnectionError):
                return {}
            return memory

        return await asyncio.gather(*map(ask, names))

    async def audit(self) -> None:
        """Take what the workers say of the caches that crossed; both ends must say the same."""
        now_s = asyncio.get_running_loop().time()
        for row in await self._fleet.audit():
            cache = (row.cache, row.id, row.attempt, row.receiver)
            if cache not in self._digests:
                self._digests[cache] = row.digest, now_s
            elif self._digests.pop(cache)[0] == row.digest:
                self._report.audited += 1
            else:
                self._report.violations.append(f"{cache}: the digests of its ends differ")
        self._give_up_before(now_s - HALF_S)

    async def audit_all(self) -> None:
        """The last of it."""
        await self.audit()
        self._give_up_before(math.inf)

    def _give_up_before(self, at_s: float) -> None:
        """Count the caches of which one end alone had told by then."""
        late = [cache for cache, (_, told_s) in self._digests.items() if told_s < at_s]
        for cache in late:
            del self._digests[cache]
        self._report.half_audited += len(late)

    # --- faults ------------------------------------------------------------------------------

    def cancel_two(self) -> None:
        for task in list(self._clients)[:2]:
            self._cancelled.add(self._clients[task])
            task.cancel()

    def _remote(self, name: str) -> RemoteInstance:
        instance = self._fleet.instances[name]
        assert isinstance(instance, RemoteInstance)
        return instance

    # --- the end -----------------------------------------------------------------------------

    async def settle(self, faults: Faults) -> None:
        """Wait until nothing is held anywhere; what still is then has leaked."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SETTLE_S
        while (left := await self._left(faults)) and loop.time() < end_s:  # noqa: ASYNC110 - polled
            await asyncio.sleep(0.5)
        self._report.violations += left

    async def _left(self, faults: Faults) -> list[str]:
        left = []
        for name in self.names:
            await faults.recover(name)
            stats = await self._remote(name).stats()
            for what in ("leases", "arrivals", "jobs", "waiting", "running"):
                if stats[what]:
                    left.append(f"{name}: {stats[what]} {what}")
            if stats["prefixes"]["in_hand"]:
                left.append(f"{name}: {stats['prefixes']['in_hand']} prefixes in hand")
            for group, figures in stats["cache"].items():
                if figures["owned"] or figures["pinned"]:
                    left.append(f"{name}: {figures['owned']} of {group} owned")
        for pool in self._fleet.view.prefill.values():
            left += [f"{pool.cluster}: {sum(pool.queued)} queued"] if any(pool.queued) else []
        for decode in self._fleet.view.decode.values():
            active = sum(decode.active(key) for key in range(len(decode.names)))
            left += [f"{decode.cluster}: {active} active"] if active else []
        return left
