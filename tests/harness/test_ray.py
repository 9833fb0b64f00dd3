# ruff: noqa: E402
"""Workers and sweeps on a Ray cluster of three nodes on this machine."""

from __future__ import annotations

import asyncio
import os
from itertools import islice
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ray = pytest.importorskip("ray")
pytest.importorskip("torch")

import aiohttp
from ray.cluster_utils import Cluster

from engine.transport.certificates import make_authority, make_certificate
from engine.transport.security import Security, client_context
from harness import realtime
from harness.chaos.emulate import experiment_of
from harness.fleets.ray import DRIVER, RayFleets, RayOptions
from harness.fleets.worker_words import ORACLE
from harness.measure import phase_requests
from harness.phases import Phase
from harness.policies.catalog import make_policy
from harness.ray.cluster import NICENESS
from harness.ray.sweep import on_ray
from harness.replay import replay
from harness.router import RetryRules, Router
from harness.sweep.execute import execute
from harness.sweep.study import Study, parse_axis
from harness.topology import instance_specs
from results.records import Status


@pytest.fixture
def cluster():
    """A head without resources, and two nodes that each could carry everything."""
    os.environ.setdefault(NICENESS, "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [
        made.add_node(num_cpus=1, resources={"prfaas": 2, "pd": 8}),
        made.add_node(num_cpus=1, resources={"prfaas": 2, "pd": 8}),
    ]
    try:
        yield made, nodes
    finally:
        ray.shutdown()
        made.shutdown()


def test_a_sweep_gives_the_same_parquet_as_here(cluster, tmp_path: Path):
    made, _ = cluster
    axis = parse_axis("link.rate_gbps=5,10,20,40,60,80")
    study = Study(name="rates", base="paper", mode="plan", axis=(axis,))
    here = execute(study, tmp_path / "here", 1)
    there = execute(study, tmp_path / "there", 1, evaluated=on_ray(made.address))
    assert here.computed == there.computed == 6
    assert here.dataset.read_bytes() == there.dataset.read_bytes()


def test_a_node_that_goes_takes_no_request_with_it(cluster, tmp_path: Path):
    made, nodes = cluster
    experiment, configuration = experiment_of(3)
    found = realtime.run(_run(made, nodes, experiment, configuration, tmp_path))
    records, facts, wrong, moved = found
    assert len(records) > 20
    assert [r.failure for r in records if r.status is not Status.SUCCEEDED] == []
    assert moved, "nobody stood on the node that went"
    assert facts["restarts"] >= len(moved)
    assert wrong == []


async def _run(made, nodes, experiment, configuration, folder):
    fleets = RayFleets(experiment, folder, RayOptions(made.address, allow_plain=True))
    fleet = await fleets.open(experiment, configuration)
    loop = asyncio.get_running_loop()
    try:
        standing = {name: fleet.place(name).node for name in fleet.instances}
        assert len(set(standing.values())) >= 2
        # The node of a decode instance, and not that of the engine that verifies.
        doomed = next(
            node
            for node in nodes
            if node.node_id in standing.values() and node.node_id != standing[ORACLE]
        )
        moved = [name for name, node in standing.items() if node == doomed.node_id]
        # The default's attempts: losses excuse those that they end.
        retry = RetryRules(patience_s=fleet.patience_s)
        policy = make_policy(configuration.policy, 0.0, {})
        router = Router(
            policy, fleet.view, fleet.instances, fleet.links, retry,
            prefixes=fleet.prefixes, copier=fleet.copier,
        )  # fmt: skip
        records, requests = [], {}
        phase = Phase("run", 0.4, 0.0, 25.0 * fleet.scale.time_scale)
        loop.call_later(8.0, lambda: asyncio.ensure_future(_remove(made, doomed)))
        await replay(
            phase_requests(experiment, phase, fleet.scale, lambda r: requests.update({r.id: r})),
            router.serve,
            records.append,
            origin_s=loop.time(),
            drain_s=120.0,
        )
        while any(fleet.instances[name].lost for name in moved):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        wrong = [
            record.id
            for record in records[::10]
            if record.status is Status.SUCCEEDED
            and not await fleet.verify(requests[record.id], record.token_ids)
        ]
        return records, fleet.facts(), wrong, moved
    finally:
        await fleet.close()


def test_with_certificates_nothing_is_plain(cluster, tmp_path: Path):
    """Driver and workers know each other by certificate; caches cross over TLS; a stranger, with a
    certificate of another authority or none, gets nowhere."""
    made, _ = cluster
    experiment, configuration = experiment_of(4)
    folder = tmp_path / "certs"
    specs = instance_specs(experiment, configuration)
    make_authority(folder, 1)
    for name in (DRIVER, ORACLE, *(spec.name for spec in specs)):
        make_certificate(folder, name, 1)
    make_authority(tmp_path / "other", 1)
    make_certificate(tmp_path / "other", DRIVER, 1)
    options = RayOptions(made.address, certificates=folder)
    served, right, plain, stranger = realtime.run(
        _serve_securely(experiment, configuration, options, tmp_path)
    )
    assert served == 8 and right
    assert plain is not None and stranger is not None


async def _serve_securely(experiment, configuration, options, folder):
    fleet = await RayFleets(experiment, folder / "run", options).open(experiment, configuration)
    loop = asyncio.get_running_loop()
    try:
        policy = make_policy("naive", 0.0, {})
        router = Router(policy, fleet.view, fleet.instances, fleet.links, RetryRules())
        phase = Phase("run", 0.4, 0.0, 20.0 * fleet.scale.time_scale)
        requests = list(islice(phase_requests(experiment, phase, fleet.scale), 8))
        records = []
        await replay(requests, router.serve, records.append, origin_s=loop.time(), drain_s=60.0)
        done = [record for record in records if record.status is Status.SUCCEEDED]
        by_id = {request.id: request for request in requests}
        right = await fleet.verify(by_id[done[0].id], done[0].token_ids)
        place = fleet.place("pd-0")
        other = folder / "other"
        paths = [str(other / name) for name in (f"{DRIVER}.pem", f"{DRIVER}.key", "ca.pem")]
        plain = await _refused(f"http://{place.host}:{place.port}/health", True)
        stranger = await _refused(
            f"https://{place.host}:{place.port}/health", client_context(Security(*paths))
        )
        return len(done), right, plain, stranger
    finally:
        await fleet.close()


async def _refused(url, context):
    """Why a client is turned away; None when it is not."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        try:
            async with session.get(url) as response:
                return None if response.status == 200 else response.status
        except aiohttp.ClientError as error:
            return error


async def _remove(made, node):
    await asyncio.to_thread(made.remove_node, node, False)
