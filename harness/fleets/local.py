"""Worker processes on this host, joined by a shaped link: the fleet of `emulate`.

Control runs over unix sockets, which network namespaces do not separate, so that KV traffic alone
crosses the shaped link. Every worker is a child of one nursery, which ends with this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from engine.model.config import ModelConfig, shape
from harness.directory import PrefixDirectory
from harness.errors import NotReady
from harness.experiment import ConfigurationSpec, Experiment
from harness.fleets.audit import AuditTrail
from harness.fleets.nursery import Nursery, last_line
from harness.fleets.page_names import PageNames
from harness.fleets.senders import listen_to_senders
from harness.fleets.worker_copier import WorkerCopier
from harness.fleets.worker_keeper import RECENT, WorkerKeeper
from harness.fleets.worker_words import DTYPE, ORACLE, pacing_of, worker_words
from harness.instances.remote import DataAddress, RemoteInstance
from harness.links.base import ShapedLink
from harness.links.factory import open_link
from harness.ports import Instance, InstanceSpec, Link, Role
from harness.prediction import peak_rate, plan_experiment
from harness.prefixes import PrefixKeeper
from harness.profiles import load_profile
from harness.scale import Scale
from harness.stalls import OwnStalls
from harness.topology import PD, PRFAAS, build_view, instance_specs
from harness.view import View
from results.rows import AuditRow
from workloads.prompts import prompt_tokens
from workloads.request import Request
from workloads.scaling import TokenScale

#: By device; on CUDA a worker compiles its kernels before it is ready.
START_TIMEOUT_S = {"cpu": 30.0, "cuda": 600.0}
POLL_S = 0.02
HEARTBEAT_S = 0.5
PAGES = 16_384


def emulation_scale(experiment: Experiment, model: ModelConfig) -> Scale:
    """Bytes scale so that a request of mean length has the payload that the profile gives it; time
    runs no faster than that the control plane and workers of this host keep up with the requests.
    """
    emulate = experiment.emulate
    profile = load_profile(experiment.profiles.prfaas)
    planned = plan_experiment(experiment)
    tokens = round(planned[0].prediction.deployment.lengths.mean())
    engine_tokens = TokenScale(emulate.token_scale).tokens(tokens)
    engine_bytes = model.request_bytes(engine_tokens, DTYPE)
    time_scale = min(emulate.time_scale, emulate.max_request_rate / peak_rate(planned))
    return Scale(time_scale, emulate.token_scale, profile.kv_bytes(tokens) / engine_bytes)


class LocalFleets:
    """Opens a fleet for each configuration of one experiment; shares a nursery between them."""

    def __init__(self, experiment: Experiment, directory: Path, pages: int = PAGES) -> None:
        """`pages`: of the cache of each worker."""
        self.experiment = experiment
        self.pages = pages
        self.model = shape(experiment.emulate.model)
        self.scale = emulation_scale(experiment, self.model)
        self.profiles = {
            PRFAAS: load_profile(experiment.profiles.prfaas),
            PD: load_profile(experiment.profiles.pd),
        }
        self._logs = directory / "workers"

    async def open(self, experiment: Experiment, configuration: ConfigurationSpec) -> LocalFleet:
        """Raises NotReady when a worker or the link does not come up; nothing is left then."""
        logs = self._logs / configuration.name
        logs.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="prfaas-"))
        fleet = LocalFleet(self, configuration, folder, logs)
        try:
            await fleet.start()
        except BaseException:
            await fleet.close()
            raise
        return fleet


@dataclass(slots=True)
class _Worker:
    spec: InstanceSpec
    socket: Path
    session: aiohttp.ClientSession
    pid: int = 0
    exit_status: int | None = None
    health: dict[str, Any] = field(default_factory=dict)


class LocalFleet:
    """One configuration's workers, link and view (harness.fleets.base.Fleet)."""

    def __init__(
        self, owner: LocalFleets, configuration: ConfigurationSpec, folder: Path, logs: Path
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
        self._folder = folder
        self._logs = logs
        self._nursery: Nursery | None = None
        self._shaped: ShapedLink | None = None
        self._workers: dict[str, _Worker] = {}
        self._watchers: list[asyncio.Future[None]] = []
        self._start_s = 0.0
        self._stalls = OwnStalls()
        self._closing = False

    async def start(self) -> None:
        began_s = time.monotonic()
        experiment, scale = self._owner.experiment, self.scale
        specs = instance_specs(experiment, self._configuration)
        if self._configuration.n_prfaas:
            spec = experiment.link.scaled(scale.byte_scale / scale.time_scale, scale.time_scale)
            self._shaped = await open_link(spec, (PRFAAS, PD))
            self.links = {
                ends: self._shaped.direction(*ends) for ends in ((PRFAAS, PD), (PD, PRFAAS))
            }
        self._write_pacing()
        self._nursery = await Nursery.start(self._folder)
        oracle = InstanceSpec(ORACLE, PD, Role.DECODE, "")
        await asyncio.gather(*(self._spawn(spec) for spec in [*specs, oracle]))
        self.view = self._build_view(specs)
        for each in self._workers.values():
            if each.exit_status is not None:
                self.view.set_lost(each.spec.name, True)
        self.prefixes = self._directory(specs)
        self._watchers = [
            asyncio.ensure_future(self._watch(each))
            for each in self.instances.values()
            if isinstance(each, RemoteInstance)
        ]
        if self._shaped is not None:
            self._shaped.start_schedule()
            self._listen(PRFAAS, PD)
            if self.copier is not None:  # nothing else crosses that way
                self._listen(PD, PRFAAS)
        self._stalls.watch()
        self._start_s = time.monotonic() - began_s

    async def close(self) -> None:
        self._closing = True
        self._stalls.close()
        self._end_instances()
        for watcher in self._watchers:
            watcher.cancel()
        await self._close_prefixes()
        for worker in self._workers.values():
            await worker.session.close()
        if self._nursery is not None:
            await self._nursery.close()
        if self._shaped is not None:
            await self._shaped.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def link(self) -> ShapedLink | None:
        """The shaped link itself (fault injection); None in one cluster."""
        return self._shaped

    def pid(self, name: str) -> int:
        """Of the worker's process, in its present life."""
        return self._workers[name].pid

    def exit_status(self, name: str) -> int | None:
        """Of the worker's process, negative for a signal; None while it lives."""
        return self._workers[name].exit_status

    def lost(self, name: str) -> bool:
        """Whether the worker ended or fell silent, and has not been started again."""
        instance = self.instances[name]
        assert isinstance(instance, RemoteInstance)
        return instance.lost

    async def restart(self, name: str) -> None:
        """Start a lost worker again, empty, at its address and in the role it had. Raises NotReady,
        and then it is still lost."""
        old, instance = self._workers[name], self.instances[name]
        assert isinstance(instance, RemoteInstance) and instance.lost
        if old.exit_status is None:
            # It was given up for its silence: a stopped process must not come back beside its heir.
            os.kill(old.pid, signal.SIGKILL)
            while old.exit_status is None:  # noqa: ASYNC110 - the nursery sets it
                await asyncio.sleep(POLL_S)
        await old.session.close()
        old.socket.unlink(missing_ok=True)
        await self._spawn(replace(old.spec, role=instance.role), instance.local_data.port)
        self._back(name)

    def _back(self, name: str) -> None:
        """A lost worker stands again: it holds nothing, and may be chosen."""
        if self._keeper is not None and name != ORACLE:
            self._keeper.forget(name)
        self._watchers = [watcher for watcher in self._watchers if not watcher.done()]
        self._watchers.append(asyncio.ensure_future(self._watch(self._remote(name))))
        self.view.set_lost(name, False)

    def _build_view(self, specs: list[InstanceSpec]) -> View:
        scale = self.scale
        view = build_view(
            specs,
            {name: each.scaled(scale.time_scale) for name, each in self._owner.profiles.items()},
            {pair: link.signals for pair, link in self.links.items()},
        )
        view.byte_scale = scale.byte_scale
        return view

    def _listen(self, source: str, sink: str) -> None:
        """Let the direction from `source` to `sink` know what the transport sees of it."""
        assert self._shaped is not None

        def sessions() -> dict[str, aiohttp.ClientSession]:
            return {
                name: worker.session
                for name, worker in self._workers.items()
                if worker.spec.cluster == source and worker.exit_status is None
            }

        def across() -> set[tuple[str, int]]:
            remotes = [each for each in self.instances.values() if isinstance(each, RemoteInstance)]
            return {
                (each.across_link.host, each.across_link.port)
                for each in remotes
                if each.spec.cluster == sink and each.across_link is not None
            }

        hearer = self._shaped.direction(source, sink)
        self._watchers.append(asyncio.ensure_future(listen_to_senders(sessions, across, hearer)))

    def _end_instances(self) -> None:
        """What is in flight fails now, not at a connection that closes under it."""
        for instance in self.instances.values():
            if isinstance(instance, RemoteInstance):
                instance.mark_lost("the fleet is closed")

    def _remote(self, name: str) -> RemoteInstance:
        instance = self.instances[name]
        assert isinstance(instance, RemoteInstance)
        return instance

    async def audit(self) -> list[AuditRow]:
        return await self._trail.collect()

    def facts(self) -> dict[str, Any]:
        remote = [each for each in self.instances.values() if isinstance(each, RemoteInstance)]
        return {
            "link_backend": self._shaped.backend if self._shaped else "",
            "link": self._shaped.description if self._shaped else "none: one cluster",
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
            self.copier = WorkerCopier(self.view, directory, self.instances, self._stalls.timeout)
        return self._keeper

    async def _cache_events(self, name: str) -> list[list[Any]]:
        return await self._remote(name).cache_events()

    async def _close_prefixes(self) -> None:
        for part in (self.copier, self._keeper):
            if part is not None:
                await part.close()

    async def _verify(self, request: Request, token_ids: list[int]) -> bool:
        """Whether one monolithic engine generates the same tokens for `request`."""
        oracle = self.instances[ORACLE]
        assert isinstance(oracle, RemoteInstance)
        return await oracle.generate(request) == token_ids

    async def _watch(self, instance: RemoteInstance) -> None:
        """A worker that is stopped, not dead, answers nothing and ends nothing: it is lost too."""
        while not instance.lost:
            await asyncio.sleep(HEARTBEAT_S)
            await instance.look()

    def _page_tokens(self) -> int:
        emulate = self._owner.experiment.emulate
        return emulate.page_tokens * emulate.token_scale

    def _write_pacing(self) -> None:
        for cluster, profile in self._owner.profiles.items():
            path = self._folder / f"{cluster}.json"
            path.write_text(json.dumps(pacing_of(profile, self.scale)))

    async def _spawn(self, spec: InstanceSpec, data_port: int = 0) -> None:
        assert self._nursery is not None
        socket = self._folder / f"{spec.name}.sock"
        connector = aiohttp.UnixConnector(str(socket), limit=0)
        worker = _Worker(spec, socket, aiohttp.ClientSession("http://worker", connector=connector))
        self._workers[spec.name] = worker
        log = self._logs / f"{spec.name}.log"
        netns = self._shaped.netns(spec.cluster) if self._shaped else None

        def exited(status: int) -> None:
            worker.exit_status = status
            self._lost(spec, f"its process ended with status {status}")

        worker.pid = await self._nursery.fork(
            self._argv(spec, socket, data_port), log, netns, exited
        )
        await self._ready(worker, log)
        data = worker.health["data"]
        local = DataAddress(data["host"], data["port"], worker.health["incarnation"])
        across = None
        if self._shaped is not None:
            host, port = await self._shaped.expose(spec.cluster, local.host, local.port)
            across = DataAddress(host, port, local.incarnation)
        self._stands(spec, worker.session, local, across)

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
            self._stalls.timeout,
        )

    def _argv(self, spec: InstanceSpec, socket: Path, data_port: int) -> list[str]:
        owner = self._owner
        pacing = "none" if spec.name == ORACLE else str(self._folder / f"{spec.cluster}.json")
        host = self._shaped.bind_host(spec.cluster) if self._shaped else "127.0.0.1"
        words = {
            "socket": str(socket),
            **worker_words(
                owner.experiment, self._configuration, spec, self.scale, owner.pages, pacing
            ),
            "data-host": host,
            "data-port": str(data_port),
        }
        argv = [word for key, value in words.items() for word in (f"--{key}", value)]
        # The link's own namespaces hold nobody but this run's workers.
        return [*argv, "--allow-plain"] if self._shaped else argv

    async def _ready(self, worker: _Worker, log: Path) -> None:
        name = worker.spec.name
        patience_s = START_TIMEOUT_S[self._owner.experiment.emulate.device]
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            if worker.exit_status is not None:
                raise NotReady(f"worker {name} died at start: {last_line(log)} (log: {log})")
            try:
                async with worker.session.get("/health") as response:
                    health = await response.json()
                    if response.status == 200 and health["state"] == "ready":
                        worker.health = health
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(POLL_S)
        raise NotReady(f"worker {name} was not ready after {patience_s:.0f} s (log: {log})")

    def _engine_request(self, request: Request) -> tuple[list[int], int]:
        scaled = TokenScale(self.scale.token_scale).request(request)
        ids = prompt_tokens(scaled, self._owner.model.vocab, self._owner.experiment.seed).tolist()
        if self._names is not None:
            self._names.learn(request, ids)
        return ids, scaled.output_tokens

    def _lost(self, spec: InstanceSpec, why: str) -> None:
        """A worker ended or fell silent: fail what it had in hand and route around it. Once for
        each of its lives."""
        instance = self.instances.get(spec.name)
        if self._closing or not isinstance(instance, RemoteInstance) or instance.lost:
            return
        instance.mark_lost(why)
        self.view.set_lost(spec.name, True)
