"""Prefixes that cross between real workers, either way, under the router; and one whose source is
dead. Which way each request goes is forced, so that no timing decides what is fetched.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")

from harness import realtime
from harness.experiment import Experiment, load_experiment
from harness.fleets.local import LocalFleet, LocalFleets
from harness.instances.remote import RemoteInstance
from harness.policies.priced import Eft
from harness.router import Router
from harness.topology import PD, PRFAAS
from results.records import RequestRecord, Status
from workloads.request import Request

EXPERIMENT = """
name = "shared"
seed = 3
mode = "emulate"

[workload]
kind = "documents"
reuse = 0.8
document = 12000
live_documents = 4
skew = 0.0
output_tokens = 128

[measure]
# Both clusters prefill, and queues are short: what one has computed the other soon wants.
capacity_rate = 2.0
capacity_warmup_s = 5
capacity_window_s = 35
request_rate = 1.5
latency_warmup_s = 5
latency_window_s = 20

[cache]
interval_blocks = 8

[emulate]
time_scale = 5
verify_share = 0.5
# Two busy cores miss deadlines; a timing never decides a test.
overrun_limit = 1.0

[[configurations]]
name = "eft"
policy = "eft"
n_prfaas = 1
n_prefill = 2
n_decode = 1
"""
BLOCK = 512


@pytest.fixture
def shared_file(tmp_path: Path) -> Path:
    path = tmp_path / "shared.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.mark.parametrize("backend", ["auto", "relay"])
def test_a_prefix_is_fetched_from_whoever_holds_it(shared_file: Path, backend: str) -> None:
    experiment = load_experiment(str(shared_file), {"link.backend": backend})
    realtime.run(_forced(experiment, shared_file.parent / "run"))


async def _forced(experiment: Experiment, folder: Path) -> None:
    fleet = await LocalFleets(experiment, folder).open(experiment, experiment.configurations[0])
    try:
        await _either_way(fleet)
        await _dead_source(fleet)
        await _nothing_held(fleet)
    finally:
        await fleet.close()


async def _either_way(fleet: LocalFleet) -> None:
    for number, (source, sink) in enumerate(((PRFAAS, PD), (PD, PRFAAS))):
        start = 100 * number
        cold = await _serve(fleet, question(start, 20), source)
        assert cold.cached_tokens == 0
        # Whole blocks of the document are shared, and the state kept last before its end is at 16.
        before, n_bytes = sent_bytes(fleet, source, sink), copied_bytes(fleet)
        fetched = await _serve(fleet, question(start + 1, 20, start), sink)
        assert fetched.prefill_cluster == sink
        assert fetched.cached_tokens == 16 * BLOCK
        crossed = sent_bytes(fleet, source, sink) - before
        copies = fleet.facts()["prefix_copies"]
        assert (copies["fetched"], copies["failed"]) == (number + 1, 0)
        assert copies["tokens"] == (number + 1) * 16 * BLOCK
        n_bytes = copies["bytes"] - n_bytes
        assert n_bytes > 0
        # Bytes of this direction: to the decode cluster a cache crosses too, of a prompt from
        # the other one.
        assert crossed >= n_bytes and fetched.wire_bytes >= n_bytes
        assert sink == PRFAAS or fetched.wire_bytes == n_bytes
        # What was fetched is there for the next: nothing crosses towards it.
        again = await _serve(fleet, question(start + 2, 20, start), sink)
        assert again.cached_tokens >= 16 * BLOCK
        assert fleet.facts()["prefix_copies"]["fetched"] == number + 1


async def _dead_source(fleet: LocalFleet) -> None:
    await _serve(fleet, question(300, 20), PRFAAS)
    os.kill(fleet.pid("prfaas-0"), signal.SIGKILL)
    request = question(301, 20, 300)
    record = await _serve(fleet, request, PD)
    assert (record.cached_tokens, record.wire_bytes) == (0, 0)


def sent_bytes(fleet: LocalFleet, source: str, sink: str) -> int:
    assert fleet.link is not None
    fleet.link.sample()
    return fleet.links[source, sink].sent_bytes()


def copied_bytes(fleet: LocalFleet) -> int:
    return int(fleet.facts()["prefix_copies"]["bytes"])


def question(number: int, blocks: int, document: int | None = None) -> Request:
    """About a document of `blocks` blocks, whose number is the first question's."""
    about = number if document is None else document
    ids = tuple(range(1000 * (about + 1), 1000 * (about + 1) + blocks))
    return Request(number, 0.0, blocks * BLOCK + 700, 128, (*ids, 900_000 + number), BLOCK)


async def _serve(fleet: LocalFleet, request: Request, cluster: str) -> RequestRecord:
    """Prefill in `cluster`; tokens are those of one engine, and the directory has heard of it."""
    for name, pool in fleet.view.prefill.items():
        for key in range(len(pool.names)):
            pool.set_usable(key, name == cluster)
    router = Router(
        Eft(), fleet.view, fleet.instances, fleet.links,
        prefixes=fleet.prefixes, copier=fleet.copier,
    )  # fmt: skip
    record = RequestRecord(request.id, 0.0, request.input_tokens, request.output_tokens)
    await router.serve(request, record, asyncio.get_running_loop().time())
    assert record.status is Status.SUCCEEDED, record.failure
    assert record.token_ids is not None
    assert await fleet.verify(request, record.token_ids)
    while fleet._keeper is not None and fleet._keeper._asking:  # noqa: ASYNC110 - polled
        await asyncio.sleep(0.01)
    return record


async def _nothing_held(fleet: LocalFleet) -> None:
    for instance in fleet.instances.values():
        assert isinstance(instance, RemoteInstance)
        if instance.lost:
            continue
        stats = await instance.stats()
        assert stats["leases"] == stats["arrivals"] == stats["prefixes"]["in_hand"] == 0
        for figures in stats["cache"].values():
            assert figures["owned"] == figures["pinned"] == 0


def test_a_run_fetches_prefixes_and_its_tokens_are_verified(cli, shared_file: Path) -> None:
    summary = cli.run_whole(str(shared_file), timeout_s=110)
    for phase in summary["configurations"][0]["phases"]:
        counts = phase["counts"]
        assert (counts["failed"], counts["unsent"], counts["mismatched"]) == (0, 0, 0)
        assert counts["verified"] > 0
    copies = summary["extra"]["fleets"]["eft"]["prefix_copies"]
    assert copies["fetched"] > 0 and copies["tokens"] > 0
    (directory,) = (cli.folder / "runs").iterdir()
    table = pq.read_table(directory / "requests.parquet").to_pandas()
    decided = pq.read_table(directory / "decisions.parquet").to_pandas()
    asked = decided[decided.reason.str.contains(", with a prefix from ")]
    assert len(asked) == copies["fetched"] + copies["shared"] + copies["failed"]
    local = table[table.prefill_cluster == PD]
    # Inside its cluster nothing of a request crosses the link but what was fetched for it.
    assert 0 <= local.wire_bytes.sum() <= copies["bytes"]
    assert copies["bytes"] <= table.wire_bytes.sum()
