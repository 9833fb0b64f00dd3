"""Fleets of real workers, wherever those stand: the link aside, what a router meets is the same.

Here are a worker's lives as the control plane sees them, and the view, prefixes and facts that come
of them. Where workers run, how they are started and what joins them differs between `local` and
`ray`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp

from engine.model.config import ModelConfig, shape
from harness.directory import PrefixDirectory
from harness.experiment import ConfigurationSpec, Experiment
from harness.fleets.audit import AuditTrail
from harness.fleets.page_names import PageNames
from harness.fleets.worker_copier import WorkerCopier
from harness.fleets.worker_keeper import RECENT, WorkerKeeper
from harness.fleets.worker_words import DTYPE, ORACLE
from harness.instances.remote import DataAddress, RemoteInstance
from harness.planner import decode_batch
from harness.ports import Instance, InstanceSpec, Link
from harness.prediction import Planned, peak_rate, plan_experiment
from harness.prefixes import PrefixKeeper
from harness.profiles import load_profile
from harness.scale import Scale
from harness.stalls import OwnStalls
from harness.topology import PD, PRFAAS, build_view
from harness.view import View
from results.rows import AuditRow
from workloads.prompts import prompt_tokens
from workloads.request import Request
from workloads.scaling import TokenScale

HEARTBEAT_S = 0.5
PAGES = 16_384


def emulation_scale(experiment: Experiment, model: ModelConfig, planned: list[Planned]) -> Scale:
    """Bytes scale so that a request of mean length has the payload that the profile gives it; time
    runs no faster than that the control plane and workers of this host keep up with the requests.
    """
    emulate = experiment.emulate
    profile = load_profile(experiment.profiles.prfaas)
    tokens = round(planned[0].prediction.deployment.lengths.mean())
    engine_tokens = TokenScale(emulate.token_scale).tokens(tokens)
    engine_bytes = model.request_bytes(engine_tokens, DTYPE)
    time_scale = min(emulate.time_scale, emulate.max_request_rate / peak_rate(planned))
    return Scale(time_scale, emulate.token_scale, profile.kv_bytes(tokens) / engine_bytes)


F = TypeVar("F", bound="WorkerFleet")


class WorkerFleets(ABC, Generic[F]):
    """Opens a fleet for each configuration of one experiment."""

    def __init__(self, experiment: Experiment, directory: Path, pages: int = PAGES) -> None:
        """`pages`: of the cache of each worker."""
        self.experiment = experiment
        self.pages = pages
        self.model = shape(experiment.emulate.model)
        planned = plan_experiment(experiment)
        self.scale = emulation_scale(experiment, self.model, planned)
        batch = decode_batch(planned[0].prediction.deployment)
        self.profiles = {
            PRFAAS: load_profile(experiment.profiles.prfaas),
            PD: replace(load_profile(experiment.profiles.pd), max_batch=batch),
        }
        self._logs = directory / "workers"

    async def open(self, experiment: Experiment, configuration: ConfigurationSpec) -> F:
        """Raises NotReady when a worker or the link does not come up; nothing is left then."""
        logs = self._logs / configuration.name
        logs.mkdir(parents=True, exist_ok=True)
        fleet = self._fleet(configuration, logs)
        try:
            await fleet.start()
        except BaseException:
            await fleet.close()
            raise
        return fleet

    @abstractmethod
    def _fleet(self, configuration: ConfigurationSpec, logs: Path) -> F:
        """To be started; its workers log into `logs`."""


class WorkerFleet(ABC):
    """One configuration's workers and view (harness.fleets.base.Fleet)."""

    def __init__(
        self, owner: WorkerFleets[Any], configuration: ConfigurationSpec, logs: Path
    ) -> None:
        self.scale = owner.scale
        self.instances: dict[str, Instance] = {}
        self._trail = AuditTrail(self.instances)
        self.links: Mapping[tuple[str, str], Link] = {}
        self.view = View(0.0, {}, {}, {})
        self.verify = self._verify
        self.prefixes: PrefixKeeper | None = None
        self.copier: WorkerCopier | None = None
        self._names: PageNames | None = None
        self._keeper: WorkerKeeper | None = None
        self.patience_s = 0.0
        self._owner = owner
        self._configuration = configuration
        self._logs = logs
        self._watchers: list[asyncio.Future[None]] = []
        self._start_s = 0.0
        self._stalls = OwnStalls()
        self.timeout = self._stalls.timeout
        self._closing = False

    @abstractmethod
    async def start(self) -> None:
        """Raises NotReady; `close` then ends what has started."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def restart(self, name: str) -> None:
        """Start a lost worker again, empty and in the role it had. Raises NotReady, and then it is
        still lost."""

    def lost(self, name: str) -> bool:
        """Whether the worker ended or fell silent, and has not been started again."""
        return self._remote(name).lost

    async def audit(self) -> list[AuditRow]:
        return await self._trail.collect()

    def facts(self) -> dict[str, Any]:
        remote = [each for each in self.instances.values() if isinstance(each, RemoteInstance)]
        return {
            "model": self._owner.model.name,
            "device": self._owner.experiment.emulate.device,
            "start_s": round(self._start_s, 3),
            "workers": len(remote),
            "queue_discipline": self._configuration.queue.discipline,
            "lost_workers": sorted(each.spec.name for each in remote if each.lost),
            "paced_steps": sum(each.paced_jobs for each in remote),
            "pacing_overruns": sum(each.overruns for each in remote),
            **self._stalls.facts(),
            **(self.copier.facts() if self.copier else {}),
        }

    # --- lives of workers --------------------------------------------------------------------

    def _stands(
        self,
        spec: InstanceSpec,
        session: aiohttp.ClientSession,
        local: DataAddress,
        across: DataAddress | None,
    ) -> None:
        """A life of a worker begins."""
        self._trail.joined(spec, local.incarnation)
        self.instances[spec.name] = RemoteInstance(
            spec,
            session,
            local,
            across,
            self._engine_request,
            self._page_tokens(),
            partial(self._lost, spec),
            self.timeout,
        )

    def _lost(self, spec: InstanceSpec, why: str) -> None:
        """A worker ended or fell silent: fail what it had in hand and route around it. Once for
        each of its lives."""
        instance = self.instances.get(spec.name)
        if self._closing or not isinstance(instance, RemoteInstance) or instance.lost:
            return
        instance.mark_lost(why)
        self.view.set_lost(spec.name, True)

    def _back(self, name: str) -> None:
        """A lost worker stands again: it holds nothing, and may be chosen."""
        if self._keeper is not None and name != ORACLE:
            self._keeper.forget(name)
        self._watchers = [watcher for watcher in self._watchers if not watcher.done()]
        self._watchers.append(asyncio.ensure_future(self._watch(self._remote(name))))
        self.view.set_lost(name, False)

    def _end_instances(self) -> None:
        """What is in flight fails now, not at a connection that closes under it."""
        for instance in self.instances.values():
            if isinstance(instance, RemoteInstance):
                instance.mark_lost("the fleet is closed")

    def _remote(self, name: str) -> RemoteInstance:
        instance = self.instances[name]
        assert isinstance(instance, RemoteInstance)
        return instance

    async def _watch(self, instance: RemoteInstance) -> None:
        """A worker that is stopped, not dead, answers nothing and ends nothing: it is lost too."""
        while not instance.lost:
            await asyncio.sleep(HEARTBEAT_S)
            await instance.look()

    # --- what the router sees ----------------------------------------------------------------

    def _build_view(self, specs: list[InstanceSpec]) -> View:
        scale = self.scale
        view = build_view(
            specs,
            {name: each.scaled(scale.time_scale) for name, each in self._owner.profiles.items()},
            {pair: link.signals for pair, link in self.links.items()},
        )
        view.byte_scale = scale.byte_scale
        return view

    def _directory(self, specs: list[InstanceSpec]) -> PrefixKeeper | None:
        """A directory of the workers' own pools, fed by their events; where there is a link,
        prefixes are fetched across it."""
        cache, emulate = self._owner.experiment.cache, self._owner.experiment.emulate
        if not cache.enabled:
            return None
        directory = PrefixDirectory(cache.directory_entries)
        for spec in specs:
            directory.add_instance(spec.name, spec.cluster)
        self.view.directory = directory
        most = cache.directory_entries
        self._names = PageNames(emulate.page_tokens, self._page_tokens(), most)
        self._keeper = WorkerKeeper(directory, self._names, self._cache_events, min(RECENT, most))
        if self.links:
            self.view.copies = True
            self.copier = WorkerCopier(self.view, directory, self.instances, self.timeout)
        return self._keeper

    async def _cache_events(self, name: str) -> list[list[Any]]:
        return await self._remote(name).cache_events()

    async def _close_prefixes(self) -> None:
        for part in (self.copier, self._keeper):
            if part is not None:
                await part.close()

    async def _verify(self, request: Request, token_ids: list[int]) -> bool:
        """Whether one monolithic engine generates the same tokens for `request`."""
        return await self._remote(ORACLE).generate(request) == token_ids

    def _page_tokens(self) -> int:
        emulate = self._owner.experiment.emulate
        return emulate.page_tokens * emulate.token_scale

    def _engine_request(self, request: Request) -> tuple[list[int], int]:
        scaled = TokenScale(self.scale.token_scale).request(request)
        ids = prompt_tokens(scaled, self._owner.model.vocab, self._owner.experiment.seed).tolist()
        if self._names is not None:
            self._names.learn(request, ids)
        return ids, scaled.output_tokens
