"""The campaign's kinds of fault on real processes: kill, stop, restart, cut, cancel; then count.

A small experiment runs for so many minutes on real workers behind a real shaped link. Everything is
judged from the outside: the requests' counts, their tokens against one monolithic engine, `/stats`
of each worker, and what the processes hold (memory, descriptors, processes).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import realtime
from harness.chaos.processes import Held, descendants, held_by
from harness.errors import NotReady
from harness.experiment import ConfigurationSpec, Experiment
from harness.fleets.local import ORACLE, LocalFleet, LocalFleets
from harness.instances.remote import RemoteInstance
from harness.measure import phase_requests
from harness.phases import Phase
from harness.policies.catalog import make_policy
from harness.replay import ReplayCounts, replay
from harness.router import RetryRules, Router
from results.records import RequestRecord, Status
from workloads.request import Request

#: Faults can take whole attempts away for seconds; a request outlasts several of them.
RETRY = RetryRules(max_attempts=8, backoff_s=0.2)
REQUEST_RATE = 0.4  # modelled requests a second; `TIME_SCALE` of them arrive in a real second
TIME_SCALE = 10.0
CALM_S = 1.5
SETTLE_S = 30.0
DRAIN_S = 90.0
#: One in so many requests is computed again by one engine alone.
VERIFY_EVERY = 8
#: Memory may grow so much over the soak, in the harness itself (bytes).
MEMORY_SLACK = 64 << 20
#: A request in flight has a control connection at either worker, which stays open for the next;
#: beyond these, so many descriptors may be more at the end than at the start.
CONNECTIONS = 2
DESCRIPTOR_SLACK = 8


@dataclass(slots=True)
class Report:
    """What a soak did and found. `faults` counts each kind; `held` is (after the warm-up, at the
    end) of the harness's own process."""

    seconds: float = 0.0
    counts: ReplayCounts = field(default_factory=ReplayCounts)
    cancelled: int = 0
    retried: int = 0
    verified: int = 0
    most_in_flight: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
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
            *(
                f"harness at {when}: {held.rss_bytes / 2**20:.0f} MiB, "
                f"{held.descriptors} descriptors, {held.processes} processes below it"
                for when, held in zip(("the start", "the end"), self.held, strict=False)
            ),
            *(f"VIOLATION {each}" for each in self.violations),
        ]


def experiment_of(seed: int) -> tuple[Experiment, ConfigurationSpec]:
    """Two clusters, two decode instances, tokens enough to keep each busy for a while."""
    experiment = Experiment.model_validate(
        {
            "name": "soak",
            "seed": seed,
            "mode": "emulate",
            "workload": {
                "kind": "lognormal",
                "mu": 8.5,
                "sigma": 0.7,
                "min_tokens": 256,
                "max_tokens": 30000,
                "output_tokens": 512,
            },
            "emulate": {"time_scale": TIME_SCALE},
            "configurations": [
                {
                    "name": "prfaas",
                    "policy": "prfaas-static",
                    "threshold_tokens": 5000,
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
    fleet = await LocalFleets(experiment, folder).open(experiment, configuration)
    loop = asyncio.get_running_loop()
    try:
        policy = make_policy(configuration.policy, configuration.threshold_tokens or 0.0, {})
        router = Router(
            policy, fleet.view, fleet.instances, fleet.links, RETRY, prefixes=fleet.prefixes
        )
        state = _Soak(fleet, router, random.Random(seed), report, say)
        phase = Phase("soak", REQUEST_RATE, 0.0, seconds * fleet.scale.time_scale)
        report.held.append(held_by(os.getpid()))
        expected = report.held[0].processes
        began_s = loop.time()
        faults = loop.create_task(state.inflict(began_s + seconds))
        load = replay(
            phase_requests(experiment, phase, fleet.scale, state.note),
            state.serve,
            state.ended,
            origin_s=began_s,
            drain_s=DRAIN_S,
        )
        report.counts = await load
        await faults
        report.seconds = loop.time() - began_s
        await state.settle()
        await state.verify()
        report.held.append(held_by(os.getpid()))
        report.processes = report.held[-1].processes
        _judge(report, expected)
    finally:
        await fleet.close()


def _judge(report: Report, expected_processes: int) -> None:
    counts, (first, last) = report.counts, report.held
    violations = report.violations
    if counts.offered != counts.succeeded + counts.failed + counts.unsent:
        violations.append(f"counts do not add up: {counts}")
    if last.rss_bytes > first.rss_bytes + MEMORY_SLACK:
        violations.append(f"memory grew from {first.rss_bytes} to {last.rss_bytes} bytes")
    kept = CONNECTIONS * report.most_in_flight + DESCRIPTOR_SLACK
    if last.descriptors > first.descriptors + kept:
        violations.append(f"descriptors grew from {first.descriptors} to {last.descriptors}")
    if last.processes != expected_processes:
        violations.append(f"{expected_processes} processes became {last.processes}")


class _Soak:
    """Load and faults on one fleet."""

    def __init__(
        self,
        fleet: LocalFleet,
        router: Router,
        dice: random.Random,
        report: Report,
        say: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._dice = dice
        self._report = report
        self._say = say
        self._clients: dict[asyncio.Task[Any], int] = {}
        self._cancelled: set[int] = set()
        self._kept: dict[int, Request] = {}
        self._to_verify: list[tuple[Request, list[int]]] = []
        self._names = [name for name in fleet.instances if name != ORACLE]

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
        if record.status is Status.SUCCEEDED:
            report.retried += record.attempts > 1
            request = self._kept.pop(record.id, None)
            if request is not None and record.token_ids is not None:
                self._to_verify.append((request, record.token_ids))
        elif record.id in self._cancelled and record.status is Status.FAILED:
            report.cancelled += 1
        elif record.status is not Status.UNSENT:
            report.violations.append(f"request {record.id} lost: {record.failure}")
        record.token_ids = None

    async def verify(self) -> None:
        for request, token_ids in self._to_verify:
            if await self._fleet.verify(request, token_ids):
                self._report.verified += 1
            else:
                self._report.violations.append(f"request {request.id}: wrong tokens")

    # --- faults ------------------------------------------------------------------------------

    async def inflict(self, until_s: float) -> None:
        """One fault after the other; each has healed before the next begins."""
        loop = asyncio.get_running_loop()
        kinds = [self._kill, self._stop, self._cut, self._cancel]
        while loop.time() < until_s:
            await asyncio.sleep(CALM_S + 2.0 * self._dice.random())
            kind = self._dice.choice(kinds)
            name = kind.__name__.strip("_")
            self._report.faults[name] = self._report.faults.get(name, 0) + 1
            await kind()

    async def _kill(self) -> None:
        name = self._dice.choice(self._names)
        self._say(f"kill {name}")
        with suppress(ProcessLookupError):
            os.kill(self._fleet.pid(name), signal.SIGKILL)
        await asyncio.sleep(self._dice.uniform(0.2, 1.5))
        await self._recover(name)

    async def _stop(self) -> None:
        name = self._dice.choice(self._names)
        pid = self._fleet.pid(name)
        self._say(f"stop {name}")
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._dice.uniform(0.2, 4.0))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        # Whoever watches may have given it up meanwhile, or be about to.
        await asyncio.sleep(0.5)
        await self._recover(name)

    async def _cut(self) -> None:
        link = self._fleet.link
        if link is None:
            return
        whole = link.shape
        down = replace(
            whole,
            forward=replace(whole.forward, down=True),
            reverse=replace(whole.reverse, down=True),
        )
        self._say("cut the link")
        await link.apply(down)
        await asyncio.sleep(self._dice.uniform(0.2, 3.0))
        await link.apply(whole)

    async def _cancel(self) -> None:
        for task in list(self._clients)[:2]:
            self._cancelled.add(self._clients[task])
            task.cancel()

    async def _recover(self, name: str) -> None:
        """Start it again if it is lost; a start that fails is tried again."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SETTLE_S
        while self._remote(name).lost:
            try:
                await self._fleet.restart(name)
            except NotReady as error:
                if loop.time() > end_s:
                    self._report.violations.append(f"{name} did not come back: {error}")
                    return

    def _remote(self, name: str) -> RemoteInstance:
        instance = self._fleet.instances[name]
        assert isinstance(instance, RemoteInstance)
        return instance

    # --- the end -----------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until nothing is held anywhere; what still is then has leaked."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SETTLE_S
        while (left := await self._left()) and loop.time() < end_s:  # noqa: ASYNC110 - polled
            await asyncio.sleep(0.5)
        self._report.violations += left

    async def _left(self) -> list[str]:
        left = []
        for name in self._names:
            await self._recover(name)
            stats = await self._remote(name).stats()
            for what in ("leases", "arrivals", "jobs", "waiting", "running"):
                if stats[what]:
                    left.append(f"{name}: {stats[what]} {what}")
            for group, figures in stats["cache"].items():
                if figures["owned"] or figures["pinned"]:
                    left.append(f"{name}: {figures['owned']} of {group} owned")
        for pool in self._fleet.view.prefill.values():
            left += [f"{pool.cluster}: {sum(pool.queued)} queued"] if any(pool.queued) else []
        for decode in self._fleet.view.decode.values():
            active = sum(decode.active(key) for key in range(len(decode.names)))
            left += [f"{decode.cluster}: {active} active"] if active else []
        return left
