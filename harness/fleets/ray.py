"""Worker processes on the hosts of a Ray cluster: the fleet of `prfaas run --fleet ray`.

Ray places (an actor a worker, pinned to its cluster by a custom resource) and tells when a node is
gone. Control goes to each worker's HTTP API; caches go straight from worker to worker on the
project's own transport, never through Ray's object store. A worker that is lost is started again
wherever its resource is still offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from engine.transport.security import Security, client_context
from harness.errors import BadInput, NotReady
from harness.experiment import ConfigurationSpec, Experiment
from harness.fleets.worker_fleet import WorkerFleet, WorkerFleets
from harness.fleets.worker_words import ORACLE, pacing_of, worker_words
from harness.instances.remote import DataAddress
from harness.ports import InstanceLost, InstanceSpec, Role
from harness.ray.cluster import check_offers, join
from harness.ray.host import Place, WorkerHost
from harness.ray.link import DirectLink
from harness.topology import PD, PRFAAS, instance_specs
from workloads.request import Request

#: Importing torch on a busy host, behind the placement of the actor.
PLACE_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 180.0
#: A worker that stood on a node that is gone starts again elsewhere in a fraction of this.
PATIENCE_S = 180.0
#: Between tries to start a lost worker again.
RETRY_S = 0.5
SAMPLE_S = 0.5
#: Between looks at a worker that starts: importing torch takes seconds.
POLL_S = 0.25
#: Name of the driver's own identity in a directory of `prfaas certs`.
DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class RayOptions:
    """`address` of the cluster (None: this machine alone). `certificates`: a directory of
    `prfaas certs` with an identity for each worker and one for the driver; without it
    `allow_plain` must be asked for, by name."""

    address: str | None = None
    certificates: Path | None = None
    allow_plain: bool = False

    def check(self) -> None:
        """Raises BadInput: traffic between hosts is encrypted unless that is waived by name."""
        if self.certificates is None and not self.allow_plain:
            raise BadInput(
                "--fleet ray sends control and KV traffic between hosts: give --certs DIR "
                "(prfaas certs makes one), or --allow-plain for a network you trust"
            )


class RayFleets(WorkerFleets["RayFleet"]):
    """Opens a fleet for each configuration of one experiment on one Ray cluster."""

    def __init__(self, experiment: Experiment, directory: Path, options: RayOptions) -> None:
        options.check()
        super().__init__(experiment, directory)
        self.options = options
        self.ray = join(options.address)

    def _fleet(self, configuration: ConfigurationSpec, logs: Path) -> RayFleet:
        return RayFleet(self, configuration, logs)


@dataclass(slots=True)
class _Host:
    """One life of one worker."""

    spec: InstanceSpec
    actor: Any
    session: aiohttp.ClientSession
    place: Place
    #: To the other cluster.
    sent_bytes: int = 0


class RayFleet(WorkerFleet):
    """Its workers are actors of a Ray cluster; one that is lost is started again, as often as it
    takes."""

    def __init__(self, owner: RayFleets, configuration: ConfigurationSpec, logs: Path) -> None:
        super().__init__(owner, configuration, logs)
        self._options = owner.options
        self._ray = owner.ray
        self._hosts: dict[str, _Host] = {}
        self._sent_before = {PRFAAS: 0, PD: 0}
        self._restarts = 0
        self.patience_s = PATIENCE_S
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        began_s = time.monotonic()
        experiment, scale = self._owner.experiment, self.scale
        specs = instance_specs(experiment, self._configuration)
        oracle = InstanceSpec(ORACLE, PD, Role.DECODE, "")
        wanted = {
            cluster: sum(spec.cluster == cluster for spec in [*specs, oracle])
            for cluster in (PRFAAS, PD)
        }
        await asyncio.to_thread(check_offers, self._ray, wanted)
        await self._spawn_all([*specs, oracle])
        if self._configuration.n_prfaas:
            link = experiment.link.scaled(scale.byte_scale / scale.time_scale, scale.time_scale)
            rate_bps, rtt_s = link.rate_gbps * 1e9, link.rtt_ms / 1e3
            self.links = {
                ends: DirectLink(*ends, rate_bps, rtt_s, partial(self._crossed_bytes, ends[0]))
                for ends in ((PRFAAS, PD), (PD, PRFAAS))
            }
        self.view = self._build_view(specs)
        self.prefixes = self._directory(specs)
        self._watchers = [
            asyncio.ensure_future(self._watch(self._remote(name))) for name in self._hosts
        ]
        self._keep(self._sample())
        self._stalls.watch()
        self._start_s = time.monotonic() - began_s

    async def close(self) -> None:
        """Workers end, their logs are gathered, their actors go. Idempotent."""
        self._closing = True
        self._stalls.close()
        self._end_instances()
        for task in (*self._watchers, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._watchers, *self._tasks, return_exceptions=True)
        await self._close_prefixes()
        hosts, self._hosts = self._hosts, {}
        await asyncio.gather(*(self._end(host) for host in hosts.values()))

    async def restart(self, name: str) -> None:
        """See `WorkerFleet.restart`; the new worker may stand on another node."""
        host, instance = self._hosts[name], self._remote(name)
        assert instance.lost
        await self._end(host)
        self._sent_before[host.spec.cluster] += host.sent_bytes
        host.sent_bytes = 0
        await self._spawn(replace(host.spec, role=instance.role))
        self._restarts += 1
        self._back(name)

    def place(self, name: str) -> Place:
        """Where a worker stands now."""
        return self._hosts[name].place

    def facts(self) -> dict[str, Any]:
        return {
            "link_backend": "direct",
            "link": "none: the hosts' own network, not shaped",
            **super().facts(),
            "restarts": self._restarts,
            "nodes": {name: host.place.node for name, host in sorted(self._hosts.items())},
        }

    # --- workers -----------------------------------------------------------------------------

    async def _spawn_all(self, specs: list[InstanceSpec]) -> None:
        """All or, when one does not come up, none."""
        starting = [asyncio.ensure_future(self._spawn(spec)) for spec in specs]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            raise

    async def _spawn(self, spec: InstanceSpec, data_port: int = 0) -> None:
        emulate = self._owner.experiment.emulate
        remote = self._ray.remote(WorkerHost).options(
            resources={spec.cluster: 1},
            num_gpus=1 if emulate.device.startswith("cuda") else 0,
            num_cpus=0,
            max_restarts=0,
            # A node that goes should take as few instances of a role with it as can be.
            scheduling_strategy="SPREAD",
        )
        words, flags, files = self._start_words(spec)
        actor = remote.remote(words, flags, files)
        try:
            place = await self._ask(actor.place.remote(), PLACE_TIMEOUT_S)
        except BaseException as error:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
            if not isinstance(error, (self._ray.exceptions.RayError, TimeoutError)):
                raise
            why = type(error).__name__
            raise NotReady(
                f"worker {spec.name} found no place: no live node offers {spec.cluster!r} ({why})"
            ) from error
        context = self._client_context()
        scheme = "http" if context is None else "https"
        connector = aiohttp.TCPConnector(limit=0, ssl=context if context is not None else True)
        base = f"{scheme}://{place.host}:{place.port}"
        session = aiohttp.ClientSession(base, connector=connector)
        host = _Host(spec, actor, session, place)
        try:
            health = await self._healthy(host)
        except BaseException:
            await self._end(host)
            raise
        self._hosts[spec.name] = host
        data = health["data"]
        address = DataAddress(data["host"], data["port"], health["incarnation"])
        self._stands(spec, session, address, address)

    def _start_words(self, spec: InstanceSpec) -> tuple[dict[str, str], list[str], dict[str, str]]:
        """The worker's arguments by name, its flags, and the files they name."""
        owner = self._owner
        pacing, files = "none", {}
        if spec.name != ORACLE:
            pacing = "file:pacing.json"
            files["pacing.json"] = json.dumps(pacing_of(owner.profiles[spec.cluster], self.scale))
        words = worker_words(
            owner.experiment, self._configuration, spec, self.scale, owner.pages, pacing
        )
        folder = self._options.certificates
        if folder is None:
            return words, ["--allow-plain"], files
        for key, name in (
            ("certificate", f"{spec.name}.pem"),
            ("key", f"{spec.name}.key"),
            ("authority", "ca.pem"),
        ):
            try:
                files[name] = (folder / name).read_text()
            except OSError as error:
                raise NotReady(f"--certs {folder}: no {name} ({error.strerror})") from error
            words[key] = f"file:{name}"
        return words, [], files

    def _client_context(self) -> ssl.SSLContext | None:
        folder = self._options.certificates
        if folder is None:
            return None
        return client_context(
            Security(
                str(folder / f"{DRIVER}.pem"),
                str(folder / f"{DRIVER}.key"),
                str(folder / "ca.pem"),
            )
        )

    async def _healthy(self, host: _Host) -> dict[str, Any]:
        name, deadline_s = host.spec.name, time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with host.session.get("/health") as response:
                    health: dict[str, Any] = await response.json()
                    if response.status == 200 and health["state"] == "ready":
                        return health
            try:
                status = await self._ask(host.actor.status.remote(), PLACE_TIMEOUT_S)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                raise NotReady(f"worker {name} was lost at its start") from error
            if status is not None:
                log = await self._ask(host.actor.log.remote(), PLACE_TIMEOUT_S)
                last = (log.strip().splitlines() or ["it wrote nothing"])[-1]
                raise NotReady(f"worker {name} died at start on {host.place.host}: {last}")
            await asyncio.sleep(POLL_S)
        raise NotReady(f"worker {name} was not ready after {READY_TIMEOUT_S:.0f} s")

    async def _end(self, host: _Host) -> None:
        """Gather its log and end it; a node that is gone has neither."""
        await host.session.close()
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            log = await self._ask(host.actor.log.remote(), 5.0)
            with (self._logs / f"{host.spec.name}.log").open("a") as file:
                file.write(log)
            await self._ask(host.actor.stop.remote(), 10.0)
        with contextlib.suppress(Exception):
            self._ray.kill(host.actor)

    async def _ask(self, reference: Any, timeout_s: float) -> Any:
        """A result of an actor. Raises RayError (its node is gone, say), TimeoutError."""
        try:
            return await asyncio.to_thread(self._ray.get, reference, timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise TimeoutError from error

    # --- watching ----------------------------------------------------------------------------

    async def _verify(self, request: Request, token_ids: list[int]) -> bool:
        """As the local fleet's; an engine that is lost meanwhile is waited for. Raises
        InstanceLost when it does not come back."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await super()._verify(request, token_ids)
            except InstanceLost:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(RETRY_S)

    def _lost(self, spec: InstanceSpec, why: str) -> None:
        if self._closing or self._remote(spec.name).lost:
            return
        super()._lost(spec, why)
        self._keep(self._supervise(spec.name))

    async def _supervise(self, name: str) -> None:
        """Start a lost worker again, as often as it takes."""
        while not self._closing and self._remote(name).lost:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(NotReady):
                await self.restart(name)

    async def _sample(self) -> None:
        """Refresh what is known of the link."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            for name, host in list(self._hosts.items()):
                remote = self._remote(name)
                if not remote.lost:
                    with contextlib.suppress(
                        aiohttp.ClientError, TimeoutError, OSError, InstanceLost
                    ):
                        stats = await remote.stats()
                        crossed = stats if host.spec.cluster == PRFAAS else stats["prefixes"]
                        host.sent_bytes = crossed["sent_bytes"]
            for link in self.links.values():
                assert isinstance(link, DirectLink)
                link.sample()

    def _crossed_bytes(self, cluster: str) -> int:
        """What the workers of `cluster` sent to the other one: caches go to decode, which is in one
        cluster, and prefixes either way."""
        return self._sent_before[cluster] + sum(
            host.sent_bytes for host in self._hosts.values() if host.spec.cluster == cluster
        )

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
