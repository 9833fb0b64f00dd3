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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from harness.errors import NotReady
from harness.experiment import ConfigurationSpec
from harness.fleets.nursery import Nursery, last_line
from harness.fleets.senders import listen_to_senders
from harness.fleets.worker_fleet import WorkerFleet, WorkerFleets
from harness.fleets.worker_words import ORACLE, pacing_of, worker_words
from harness.instances.remote import DataAddress, RemoteInstance
from harness.links.base import ShapedLink
from harness.links.factory import open_link
from harness.ports import InstanceSpec, Role
from harness.topology import PD, PRFAAS, instance_specs

#: By device; on CUDA a worker compiles its kernels before it is ready.
START_TIMEOUT_S = {"cpu": 30.0, "cuda": 600.0}
POLL_S = 0.02


class LocalFleets(WorkerFleets["LocalFleet"]):
    """On this host, one fleet at a time."""

    def _fleet(self, configuration: ConfigurationSpec, logs: Path) -> LocalFleet:
        return LocalFleet(self, configuration, Path(tempfile.mkdtemp(prefix="prfaas-")), logs)


@dataclass(slots=True)
class _Worker:
    spec: InstanceSpec
    socket: Path
    session: aiohttp.ClientSession
    pid: int = 0
    exit_status: int | None = None
    health: dict[str, Any] = field(default_factory=dict)


class LocalFleet(WorkerFleet):
    """Sockets of its workers and what they are told lie in `folder`, which goes with the fleet."""

    def __init__(
        self, owner: LocalFleets, configuration: ConfigurationSpec, folder: Path, logs: Path
    ) -> None:
        super().__init__(owner, configuration, logs)
        self._folder = folder
        self._nursery: Nursery | None = None
        self._shaped: ShapedLink | None = None
        self._workers: dict[str, _Worker] = {}

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

    async def restart(self, name: str) -> None:
        """See `WorkerFleet.restart`; the new worker has the old one's address."""
        old, instance = self._workers[name], self._remote(name)
        assert instance.lost
        if old.exit_status is None:
            # It was given up for its silence: a stopped process must not come back beside its heir.
            os.kill(old.pid, signal.SIGKILL)
            while old.exit_status is None:  # noqa: ASYNC110 - the nursery sets it
                await asyncio.sleep(POLL_S)
        await old.session.close()
        old.socket.unlink(missing_ok=True)
        await self._spawn(replace(old.spec, role=instance.role), instance.local_data.port)
        self._back(name)

    def facts(self) -> dict[str, Any]:
        return {
            "link_backend": self._shaped.backend if self._shaped else "",
            "link": self._shaped.description if self._shaped else "none: one cluster",
            **super().facts(),
        }

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
