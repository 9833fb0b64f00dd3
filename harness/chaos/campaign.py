"""Runs one plan in virtual time and says which invariants it broke."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.transport.errors import PlaneLost
from harness.chaos import faults, load
from harness.chaos.clock import CampaignLoop, virtual_worker_clock
from harness.chaos.faults import Fault, Plan
from harness.chaos.invariants import CHECKS, Evidence
from harness.chaos.system import System
from harness.chaos.wire import Odds
from harness.clock.loop import DeadlockError
from harness.replay import replay
from results.records import RequestRecord

#: Bounds on progress, virtual seconds: until all requests have ended after the last probe was
#: sent, and until nothing is under way after that.
DRAIN_S = 40.0
SETTLE_S = 15.0


@dataclass(frozen=True, slots=True)
class Violation:
    """`name` of the invariant, and what was seen."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(slots=True)
class Outcome:
    """`story`: (virtual second, what happened), in order."""

    plan: Plan
    violations: list[Violation] = field(default_factory=list)
    story: list[tuple[float, str]] = field(default_factory=list)
    succeeded: int = 0
    failed: int = 0
    checks: int = 0

    def broke(self, name: str) -> bool:
        return any(violation.name == name for violation in self.violations)


def run_plan(plan: Plan) -> Outcome:
    """Deterministic: the same plan gives the same outcome, violations and story."""
    outcome = Outcome(plan)
    loop = CampaignLoop(until_s=plan.healed_s + load.GRACE_S + DRAIN_S + SETTLE_S + 10.0)

    def tell(what: str) -> None:
        outcome.story.append((loop.time(), what))

    def violate(text: str) -> None:
        name, _, what = text.partition(": ")
        outcome.violations.append(Violation(name, what))
        tell(f"VIOLATION {text}")

    def unexpected(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, PlaneLost):  # what a killed worker still had to say
            violate(f"control plane: {error or context['message']!r}")

    loop.set_exception_handler(unexpected)
    with virtual_worker_clock(), _quiet_logs():
        try:
            loop.run_until_complete(_campaign(plan, outcome, violate, tell))
        except DeadlockError as error:
            violate(f"progress: {error}")
        finally:
            loop.set_exception_handler(lambda *_: None)
            _end(loop)
    return outcome


def run_seed(seed: int) -> Outcome:
    return run_plan(faults.draw(seed))


async def _campaign(plan: Plan, outcome: Outcome, violate: Any, tell: Any) -> None:
    loop = asyncio.get_running_loop()
    system = System(plan, violate, tell)
    evidence = Evidence(plan, system)
    await system.start()
    background = [loop.create_task(system.fetch_events())]
    for fault in plan.faults:
        background.append(loop.create_task(_inflict(fault, system, tell)))
    requests = load.load_of(plan)
    probes = load.probes_of(plan, len(requests))
    evidence.requests = {request.id: request for request in (*requests, *probes)}
    evidence.probes = {request.id for request in probes}

    def ended(record: RequestRecord) -> None:
        evidence.records.append(record)

    for part in (requests, probes):
        evidence.counts.append(
            await replay(part, system.serve, ended, origin_s=0.0, drain_s=DRAIN_S)
        )
    late = [record.id for record in evidence.records if record.failure == "cancelled"]
    settled_s = loop.time() + SETTLE_S
    while (left := system.busy()) and loop.time() < settled_s:  # noqa: ASYNC110 - no event says it
        await asyncio.sleep(0.25)
    if left:
        violate(f"progress: {left} {SETTLE_S:g} s after the last request")
    cancels = any(isinstance(fault, faults.Cancel) for fault in plan.faults)
    if late and not cancels:
        violate(f"progress: requests {late} had not ended after {DRAIN_S:g} s")
    for task in background:
        if task.done() and not task.cancelled() and task.exception() is not None:
            violate(f"control plane: {task.exception()!r}")
        task.cancel()
    for name, check in CHECKS.items():
        for text in check(evidence):
            violate(f"{name}: {text}")
    outcome.succeeded = sum(counts.succeeded for counts in evidence.counts)
    outcome.failed = sum(counts.failed for counts in evidence.counts)
    outcome.checks = sum(worker.runner.checks for worker in system.workers.values())
    await system.stop()


async def _inflict(fault: Fault, system: System, tell: Any) -> None:
    """One fault, from its beginning to its end."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(fault.at_s - loop.time())
    tell(
        f"{fault.kind}{fault._detail()} begins" if fault.for_s else f"{fault.kind}{fault._detail()}"
    )
    async with _lasting(fault, system) as at_end:
        await asyncio.sleep(fault.end_s - loop.time())
    if at_end is not None:
        await system.restart(at_end)
    if fault.for_s:
        tell(f"{fault.kind}{fault._detail()} ends")


@contextlib.asynccontextmanager
async def _lasting(fault: Fault, system: System) -> AsyncIterator[str | None]:
    """What is broken while the block runs; yields the name of a worker to start again after it."""
    match fault:
        case faults.Crash():
            yield fault.instance if system.crash(fault.instance) else None
        case faults.Slow():
            worker = system.workers.get(fault.instance)
            if worker is not None:
                worker.device.slow(fault.factor)
            yield None
            if worker is not None:
                worker.device.slow(1.0)
        case faults.Pause():
            worker = system.workers.get(fault.instance)
            if worker is not None:
                worker.freeze()
            yield None
            if worker is not None and not worker.dead:
                worker.thaw()
        case faults.Pressure():
            give_back = system.pressure(fault.instance, fault.share)
            yield None
            give_back()
        case faults.Outage():
            system.link_down()
            yield None
            system.link_up()
        case faults.Flap():
            loop = asyncio.get_running_loop()
            step_s = fault.for_s / fault.times
            for turn in range(fault.times):
                loop.call_later(turn * step_s, system.link_down)
                loop.call_later(turn * step_s, system.switch.cut_crossing)
                loop.call_later((turn + 0.5) * step_s, system.link_up)
            yield None
        case faults.Collapse():
            system.slow_link(fault.factor)
            yield None
            system.slow_link(1.0)
        case faults.Loss():
            system.lossy_link(fault.probability)
            yield None
            system.lossy_link(0.0)
        case faults.Noise():
            odds = system.odds
            odds.damage, odds.double, odds.cut = fault.damage, fault.double, fault.cut
            yield None
            calm = Odds()
            odds.damage, odds.double, odds.cut = calm.damage, calm.double, calm.cut
        case faults.DirectoryNoise():
            system.event_odds = (fault.lost, fault.doubled, fault.late)
            yield None
            system.event_odds = (0.0, 0.0, 0.0)
        case faults.Cancel():
            system.cancel_oldest(fault.count)
            yield None
        case faults.Convert():
            system.convert(fault.instance)
            yield None
        case faults.CrashInConversion():
            system.convert(fault.instance)
            await system.turned(fault.instance, fault.at_s + fault.for_s / 2, fault.after_s)
            yield fault.instance if system.crash(fault.instance) else None
        case faults.RouterRestart():
            system.restart_router()
            yield None
        case _:  # a burst is part of the load
            yield None


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """The worker logs each failed step; here that is a violation already."""
    log = logging.getLogger("engine")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def _end(loop: CampaignLoop) -> None:
    """Cancel what is left, as `harness.clock.run` does; a campaign that hangs is over too."""
    loop._until_s = float("inf")
    tasks = sorted(asyncio.all_tasks(loop), key=hash)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(DeadlockError):
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
