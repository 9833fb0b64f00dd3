"""Prefixes through the router: work counts one cache, bytes the other; copies only if sooner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.cache.checkpoints import CheckpointPolicy
from harness import clock
from harness.directory import PrefixDirectory
from harness.execution import execute
from harness.experiment import CacheSpec, Experiment, load_experiment
from harness.fleets.modelled import ModelledFleet, build_fleet, fluid_links
from harness.policies.base import Decision, Policy
from harness.policies.priced import Eft
from harness.policies.static import Homogeneous, Naive
from harness.ports import InstanceSpec, Role
from harness.prefixes import LearningKeeper
from harness.profiles import load_profile
from harness.router import Router
from harness.topology import PD, PRFAAS
from harness.view import View
from results import reader
from results.records import RequestRecord, Status
from workloads.request import Request
from workloads.reuse import PrefixCache
from workloads.spec import generate

H200, H20 = load_profile("1t-h200"), load_profile("1t-h20")
SPECS = [
    InstanceSpec("prfaas-0", PRFAAS, Role.PREFILL, ""),
    InstanceSpec("pd-0", PD, Role.PREFILL, ""),
    InstanceSpec("pd-1", PD, Role.DECODE, ""),
]
BLOCK = 512
CHAIN = tuple(range(1, 201))


def prompt(number: int, blocks: int, tail: int = 100) -> Request:
    tokens = blocks * BLOCK + tail
    return Request(number, 0.0, tokens, 8, (*CHAIN[:blocks], 1000 + number), BLOCK)


def fleet_of(cache: CacheSpec = CacheSpec()) -> ModelledFleet:
    links = fluid_links(load_experiment("paper").link)
    return build_fleet(SPECS, {PRFAAS: H200, PD: H20}, links, cache=cache)


async def serve(fleet: ModelledFleet, policy: Policy, request: Request) -> RequestRecord:
    router = Router(
        policy,
        fleet.view,
        fleet.instances,
        fleet.links,
        prefixes=fleet.prefixes,
        copier=fleet.copier,
    )
    record = RequestRecord(request.id, 0.0, request.input_tokens, request.output_tokens)
    await router.serve(request, record, asyncio.get_running_loop().time())
    assert record.status is Status.SUCCEEDED
    return record


def prefill_s(record: RequestRecord) -> float:
    return record.prefill_finished_s - record.prefill_started_s


def test_work_counts_the_prefill_clusters_cache_and_bytes_the_decode_clusters() -> None:
    async def scenario() -> None:
        fleet = fleet_of()
        first = await serve(fleet, Naive(), prompt(1, 40))
        assert first.cached_tokens == 0
        assert first.wire_bytes == round(H200.kv_bytes(first.input_tokens))
        again = await serve(fleet, Naive(), prompt(2, 60))
        assert again.cached_tokens == 40 * BLOCK
        assert prefill_s(again) == pytest.approx(H200.prefill_s(again.input_tokens, 40 * BLOCK))
        # The decode cluster has the blocks, so only the new ones cross, and the state always.
        sent = H200.fixed_bytes + H200.per_token_bytes * (20 * BLOCK + 100)
        assert again.wire_bytes == round(sent)
        # It has no state: a prefill there starts from the beginning.
        local = await serve(fleet, Homogeneous(), prompt(3, 60))
        assert (local.cached_tokens, local.wire_bytes) == (0, 0)

    clock.run(scenario())


def test_a_longer_prefix_is_fetched_when_that_is_sooner() -> None:
    async def scenario() -> None:
        fleet = fleet_of()
        await serve(fleet, Naive(), prompt(1, 100))
        fleet.view.prefill[PRFAAS].set_usable(0, False)
        decision = Eft().route(prompt(2, 120), fleet.view)
        assert decision.reason == "only usable cluster, with a prefix from prfaas"
        # Its blocks came with the first prompt; the state alone is missing.
        fetched = await serve(fleet, Eft(), prompt(2, 120))
        assert fetched.prefill_cluster == PD
        assert fetched.cached_tokens == 100 * BLOCK
        assert fetched.wire_bytes == round(H20.fixed_bytes)
        assert fleet.prefixes.pools[PD].usable_tokens(prompt(3, 121)) == 120 * BLOCK
        fleet.view.directory.forget(PD)
        for path in [fleet.view.path(PRFAAS, PD)]:
            path.signals.sampled_s, path.signals.rate_bps = 1.0, 1e6
            slow = await serve(fleet, Eft(), prompt(4, 120))
            assert (slow.cached_tokens, slow.wire_bytes) == (0, 0)

    clock.run(scenario())


def test_a_wrong_entry_costs_time_and_nothing_else() -> None:
    async def scenario() -> None:
        fleet = fleet_of(CacheSpec(blocks=50))
        await serve(fleet, Homogeneous(), prompt(1, 40))
        stale = fleet.view.directory
        fleet.view.directory = None
        other = Request(9, 0.0, 45 * BLOCK, 8, tuple(range(5000, 5045)), BLOCK)
        pool = fleet.prefixes.pools[PD]
        pool._on_event = lambda event: None  # its evictions are lost
        pool._pool._on_event = lambda event: None
        await serve(fleet, Homogeneous(), other)
        fleet.view.directory = stale
        asked = prompt(2, 41)
        assert stale.hit_tokens(PD, asked) == 40 * BLOCK
        record = await serve(fleet, Homogeneous(), asked)
        assert record.cached_tokens < 40 * BLOCK
        assert prefill_s(record) == pytest.approx(
            H20.prefill_s(asked.input_tokens, record.cached_tokens)
        )

    clock.run(scenario())


def test_a_failed_copy_costs_time_only() -> None:
    async def scenario() -> None:
        fleet = fleet_of()
        await serve(fleet, Naive(), prompt(1, 100))
        link = fleet.links[PRFAAS, PD]

        class CopyOnce:
            name = "copy-once"
            asked = 0

            def route(self, request: Request, view: View) -> Decision:
                self.asked += 1
                if self.asked == 1:
                    asyncio.get_running_loop().call_soon(link.fail_flows, "cable cut")
                return Eft().route(request, view)

        fleet.view.prefill[PRFAAS].set_usable(0, False)
        record = await serve(fleet, CopyOnce(), prompt(2, 120))
        assert (record.attempts, record.cached_tokens, record.wire_bytes) == (1, 0, 0)
        assert prefill_s(record) == pytest.approx(H20.prefill_s(record.input_tokens))
        assert fleet.view.path(PRFAAS, PD).outstanding_bytes == 0.0

    clock.run(scenario())


def test_a_learning_directory_follows_what_workers_report() -> None:
    directory = PrefixDirectory()
    for spec in SPECS:
        directory.add_instance(spec.name, spec.cluster)
    keeper = LearningKeeper(directory, CheckpointPolicy(8, junction=False))
    remote, _, decode = SPECS
    keeper.prefilled(prompt(1, 20), remote, decode, 0, 0)
    asked = prompt(2, 30)
    assert directory.instance_tokens("prfaas-0", asked) == 20 * BLOCK
    assert directory.instance_held_tokens("pd-1", asked) == 20 * BLOCK
    assert directory.instance_tokens("pd-1", asked) == 0
    # The worker had evicted the deeper state and says so.
    keeper.prefilled(asked, remote, decode, 20 * BLOCK, 8 * BLOCK)
    assert directory.instance_tokens("prfaas-0", prompt(3, 20, 1)) == 16 * BLOCK


def reuse_experiment(blocks: int | None) -> Experiment:
    """Requests far enough apart that none overlaps another."""
    experiment = load_experiment(
        "paper",
        {
            "name": "reuse",
            "workload": {"kind": "documents", "live_documents": 20, "output_tokens": 1},
            "arrivals": {"process": "constant"},
            "cache": {"interval_blocks": 1, "blocks": blocks} if blocks else {"interval_blocks": 1},
            "measure": {
                "capacity_rate": 0.01, "capacity_warmup_s": 1, "capacity_window_s": 30_000,
                "request_rate": 0.01, "latency_warmup_s": 1, "latency_window_s": 200,
                "sample_s": 1000,
            },
        },
    )  # fmt: skip
    only = tuple(row for row in experiment.configurations if row.name == "homogeneous")
    return experiment.model_copy(update={"configurations": only})


@pytest.mark.parametrize("blocks", [None, 400])
def test_a_run_hits_what_the_offline_computation_hits(blocks: int | None, tmp_path: Path) -> None:
    experiment = reuse_experiment(blocks)
    done = execute(experiment, tmp_path, "test")
    rows = reader.read(done.directory, "requests").to_pylist()
    found = {row["id"]: row["cached_tokens"] for row in rows if row["phase"] == "capacity"}
    offline = PrefixCache(blocks)
    expected = {
        request.id: offline.serve(request)
        for request in generate(
            experiment.workload, experiment.arrivals, 1, request_rate=0.01, duration_s=30_001
        )
    }
    assert found == expected and sum(expected.values()) > 0
    assert blocks is None or offline.evicted_blocks > 0


def test_schedulers_and_prefixes_leave_a_run_reproducible(tmp_path: Path) -> None:
    experiment = load_experiment(
        "documents",
        {
            "measure.capacity_warmup_s": 30, "measure.capacity_window_s": 150,
            "measure.latency_warmup_s": 10, "measure.latency_window_s": 30,
            "configurations.prfaas.n_prefill": 6, "configurations.prfaas.n_decode": 2,
            "configurations.prfaas.parameters": {"least_samples": 20, "plan_interval_s": 10.0},
        },
    )  # fmt: skip
    kept = tuple(row for row in experiment.configurations if row.name == "prfaas")
    experiment = experiment.model_copy(update={"configurations": kept})
    runs = [execute(experiment, tmp_path / str(i), "test") for i in range(2)]
    for table in ("requests", "decisions", "instances", "links", "tokens"):
        first, second = ((run.directory / f"{table}.parquet").read_bytes() for run in runs)
        assert first == second
    fleets = [run.summary.extra["fleets"]["prfaas"]["scheduling"] for run in runs]
    assert fleets[0] == fleets[1]
    assert any("serves decode" in what for _, what in fleets[0])
    states = set(reader.read(runs[0].directory, "instances")["state"].to_pylist())
    assert states == {"up", "draining"}
    copied = reader.read(runs[0].directory, "requests").to_pylist()
    assert any(row["wire_bytes"] and row["prefill_cluster"] == PD for row in copied)
