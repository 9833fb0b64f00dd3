"""Everything that runs in one campaign, and what faults do to it.

Router, view, policies, directory, roles and remote instances are the control plane's own; workers
and transport are the engine's own (see `worker`, `plane`, `session`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.figures import CacheEvent, Group
from engine.cache.keys import block_keys, keys_of_ids
from engine.cache.pool import Lease, NeverFits, PoolFull
from harness.chaos.connection import Switch
from harness.chaos.content import PAGE_TOKENS, prompt_of
from harness.chaos.faults import Plan
from harness.chaos.session import ControlSession
from harness.chaos.sight import Counted, WatchedLink, Work
from harness.chaos.wire import Books, Odds, Wire
from harness.chaos.worker import CHECKPOINT_BLOCKS, VirtualWorker
from harness.directory import PrefixDirectory
from harness.instances.remote import DataAddress, RemoteInstance
from harness.policies.base import Policy
from harness.policies.prfaas import Controls, Prfaas
from harness.policies.static import Balanced, Homogeneous, Naive
from harness.ports import Instance, InstanceSpec, Link, Role, ServingError
from harness.prefixes import LearningKeeper
from harness.router import RetryRules, Router
from harness.schedulers.roles import Roles
from harness.topology import PD, PRFAAS, build_view
from results.records import RequestRecord, Status
from workloads.request import Request

RETRY = RetryRules(max_attempts=4, backoff_s=0.05, patience_s=4.0)
THRESHOLD_TOKENS = 16.0
CONVERSION_S = 0.2
#: How often cache events are fetched from the workers, and how late a late one is.
EVENTS_S = 0.1
LATE_S = 0.7
_DELAY_S = {True: 0.004, False: 0.0003}


class System:
    """Workers, wires and a router. `violate` hears of what must never happen."""

    def __init__(self, plan: Plan, violate: Callable[[str], None], tell: Callable[[str], None]):
        self.plan = plan
        self.violate = violate
        self.tell = tell
        self.dice = random.Random(plan.seed * 2 + 3)
        self.books = Books()
        self.odds = Odds()
        self.wires = self._wires()
        self.switch = Switch(self.wires, violate)
        ends = ((PRFAAS, PD), (PD, PRFAAS))
        self.links = {pair: WatchedLink(*pair, self.wires[pair]) for pair in ends}
        self.specs = _specs(plan)
        self.workers: dict[str, VirtualWorker] = {}
        self.remotes: dict[str, RemoteInstance] = {}
        self.sessions: dict[str, ControlSession] = {}
        self.losses = 0
        self.conversions = 0
        self.routings: dict[int, int] = {}
        self.in_flight: dict[asyncio.Task[Any], int] = {}
        self.event_odds = (0.0, 0.0, 0.0)
        self.errors: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._down = 0
        self._restarting: set[asyncio.Task[Any]] = set()
        self._conversions: dict[str, asyncio.Task[None]] = {}
        self._known_keys: dict[int, int] = {}
        self._prompts: dict[int, list[int]] = {}

    # --- coming up ---------------------------------------------------------------------------

    async def start(self) -> None:
        for spec in self.specs:
            await self._start_worker(spec)
        self._new_router()

    async def _start_worker(self, spec: InstanceSpec) -> None:
        plan, name, role = self.plan, spec.name, self.role(spec)
        worker = VirtualWorker(
            self.switch,
            name,
            spec.cluster,
            role.value,
            plan.pages,
            plan.slots,
            plan.discipline,
            self.violate,
        )
        await worker.begin()
        self.workers[name] = worker
        session = self.sessions[name] = ControlSession(worker)
        address = DataAddress(name, 1, worker.incarnation)
        client: Any = session
        remote = RemoteInstance(spec, client, address, address, self._engine_request, PAGE_TOKENS)
        remote.role = role
        self.remotes[name] = remote

    def role(self, spec: InstanceSpec) -> Role:
        """What the control plane believes, and starts a lost worker with."""
        remote = self.remotes.get(spec.name)
        return spec.role if remote is None else remote.role

    def _new_router(self) -> None:
        """A control plane that knows only which workers there are, and their roles."""
        specs = [
            InstanceSpec(spec.name, spec.cluster, self.role(spec), spec.profile)
            for spec in self.specs
        ]
        work = {PRFAAS: Work(), PD: Work()}
        self.view = build_view(
            specs, work, {pair: link.signals for pair, link in self.links.items()}
        )
        self.directory = PrefixDirectory(400)
        for spec in specs:
            self.directory.add_instance(spec.name, spec.cluster)
            if spec.name not in self.workers:
                self.view.set_lost(spec.name, True)
        self.view.directory = self.directory
        instances: dict[str, Instance] = self.remotes  # type: ignore[assignment]
        links: dict[tuple[str, str], Link] = self.links  # type: ignore[assignment]
        keeper = LearningKeeper(self.directory, CheckpointPolicy(CHECKPOINT_BLOCKS))
        policy = Counted(_policy(self.plan.policy), self.routings, self._chosen)
        self.router = Router(policy, self.view, instances, links, RETRY, prefixes=keeper)
        self.role_changes = Roles(self.view, instances, PD, CONVERSION_S)

    def _chosen(self, request: Request, name: str) -> None:
        """Work for a worker whose death was told is work for nobody."""
        if name not in self.workers:
            self.violate(f"routing: request {request.id} was given to {name}, which is lost")

    def _wires(self) -> dict[tuple[str, str], Wire]:
        def wire(source: str, sink: str) -> Wire:
            crossing = source != sink
            rate_bps = self.plan.rate_bps if crossing else 1e8
            return Wire(rate_bps, _DELAY_S[crossing], self.dice, self.odds, self.books)

        clusters = (PRFAAS, PD)
        return {(a, b): wire(a, b) for a in clusters for b in clusters}

    def _engine_request(self, request: Request) -> tuple[list[int], int]:
        prompt = self._prompts.get(request.id)
        if prompt is None:
            prompt = self._prompts[request.id] = prompt_of(request, self.plan.seed)
            engine_keys = block_keys(prompt, PAGE_TOKENS, request.tenant)
            known_as = keys_of_ids(request.block_ids, request.tenant)
            self._known_keys.update(zip(engine_keys, known_as, strict=False))
        return prompt, request.output_tokens

    # --- serving -----------------------------------------------------------------------------

    async def serve(self, request: Request, record: RequestRecord, origin_s: float) -> None:
        """One client: its request ends with the router's answer, or with the router."""
        task = asyncio.current_task()
        assert task is not None
        self.in_flight[task] = request.id
        try:
            await self.router.serve(request, record, origin_s)
        except asyncio.CancelledError:
            if task not in self._restarting:
                raise
            record.failure = "the router was restarted"
        finally:
            self._restarting.discard(task)
            del self.in_flight[task]
            verdict = record.status or Status.FAILED
            self.tell(
                f"request {request.id} {verdict.value} after {record.attempts} attempts"
                + (f": {record.failure}" if record.failure else "")
            )

    async def fetch_events(self) -> None:
        """Feed the directory with what the workers' pools say, as far as it gets through."""
        while True:
            await asyncio.sleep(EVENTS_S)
            for link in self.links.values():
                link.sample()
            lost, doubled, late = self.event_odds
            dice, directory = self.dice, self.directory
            for name, worker in self.workers.items():
                for group, stored, key in worker.events.take(worker.pool):
                    known = self._known_keys.get(int(key, 16))
                    if known is None or dice.random() < lost:
                        continue
                    event = CacheEvent(Group(group), stored, known)
                    if dice.random() < late:
                        self._loop.call_later(LATE_S, directory.event, name, event)
                    else:
                        directory.event(name, event)
                    if dice.random() < doubled:
                        self._loop.call_later(LATE_S / 2, directory.event, name, event)

    # --- faults ------------------------------------------------------------------------------

    def crash(self, name: str) -> bool:
        """Whether there was something to kill."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return False
        worker.crash()
        self.losses += 1
        self.sessions.pop(name).sever()
        self.remotes[name].mark_lost("killed")
        self.view.set_lost(name, True)
        self.directory.forget(name)
        return True

    async def restart(self, name: str) -> None:
        spec = next(spec for spec in self.specs if spec.name == name)
        await self._start_worker(spec)
        self.view.set_lost(name, False)

    def pressure(self, name: str, share: float) -> Callable[[], None]:
        """Take pages; returns what gives them back."""
        worker = self.workers.get(name)
        lease: Lease | None = None
        if worker is not None:
            kv = worker.pool.figures()[Group.KV]
            pages = int((kv.free + kv.cached - kv.pinned) * share)
            try:
                if pages:
                    lease = worker.pool.acquire([], pages * PAGE_TOKENS)
            except (PoolFull, NeverFits):
                pass

        def give_back() -> None:
            if lease is not None and worker is not None and not worker.dead:
                lease.release()
                worker._memory_freed()

        return give_back

    def link_down(self) -> None:
        self._down += 1
        for wire in self._crossing():
            wire.set_up(False)

    def link_up(self) -> None:
        self._down -= 1
        if not self._down:
            for wire in self._crossing():
                wire.set_up(True)

    def slow_link(self, factor: float) -> None:
        for wire in self._crossing():
            wire.set_slowdown(factor)

    def lossy_link(self, probability: float) -> None:
        for wire in self._crossing():
            wire.loss = probability

    def _crossing(self) -> list[Wire]:
        return [wire for (source, sink), wire in self.wires.items() if source != sink]

    def cancel_oldest(self, count: int) -> None:
        for task in list(self.in_flight)[:count]:
            task.cancel()

    def convert(self, name: str) -> None:
        """As the long-term scheduler does, unless it would leave a role without instances."""
        role, view = self.remotes[name].role, self.view
        pool = (view.prefill if role is Role.PREFILL else view.decode).get(PD)
        if PD not in view.prefill or pool is None or name in self._conversions:
            return
        if pool.n_usable() < 2 or name not in pool.key_of or not pool.usable(pool.key_of[name]):
            return
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        self.conversions += 1
        self._conversions[name] = self._loop.create_task(self._convert(name, other))

    async def _convert(self, name: str, role: Role) -> None:
        try:
            converted = await self.role_changes.convert(name, role)
            self.tell(f"{name} serves {role}" if converted else f"{name}: lost in its conversion")
        finally:
            self._conversions.pop(name, None)

    async def turned(self, name: str, until_s: float, after_s: float) -> None:
        """Returns `after_s` after the worker changed its role, and at `until_s` at the latest."""
        worker = self.workers.get(name)
        before = None if worker is None else worker.role
        while worker is not None and worker.role == before and self._loop.time() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(max(0.0, min(after_s, until_s - self._loop.time())))

    def restart_router(self) -> None:
        """All it had in hand ends. A worker left half converted is asked again."""
        for task in list(self.in_flight):
            self._restarting.add(task)
            task.cancel()
        for task in list(self._conversions.values()):
            task.cancel()
        for name, worker in self.workers.items():
            self.remotes[name].role = Role(worker.role)
        self._new_router()
        for name in list(self._conversions):
            if name in self.workers:
                self.view.leave(PD, name)
                self._loop.create_task(self._settle_role(name))

    async def _settle_role(self, name: str) -> None:
        """Finish what an earlier router began: the worker takes work in the role it has."""
        remote = self.remotes[name]
        with contextlib.suppress(ServingError):
            await remote.convert(remote.role)
        self.view.enter(PD, name, self.remotes[name].role)

    # --- the end -----------------------------------------------------------------------------

    def busy(self) -> str:
        """What is still under way anywhere; empty when nothing is."""
        if self._conversions:
            return f"conversion of {next(iter(self._conversions))}"
        for name, worker in self.workers.items():
            plane = worker.plane
            if worker.jobs or len(worker.scheduler) or len(worker.arrivals) or worker.pool.leases:
                return f"work at {name}"
            if plane.receiver.active or any(s.sender.active for s in plane.sessions.values()):
                return f"transfers at {name}"
        return ""

    async def stop(self) -> None:
        for worker in self.workers.values():
            worker.crash()


def _specs(plan: Plan) -> list[InstanceSpec]:
    remote = [InstanceSpec(f"prfaas-{i}", PRFAAS, Role.PREFILL, "") for i in range(plan.n_prfaas)]
    roles = [Role.PREFILL] * plan.n_prefill + [Role.DECODE] * plan.n_decode
    return remote + [InstanceSpec(f"pd-{i}", PD, role, "") for i, role in enumerate(roles)]


def _policy(name: str) -> Policy:
    match name:
        case "prfaas":
            return Prfaas(Controls(THRESHOLD_TOKENS))
        case "naive":
            return Naive()
        case "balanced":
            return Balanced()
        case _:
            return Homogeneous()
