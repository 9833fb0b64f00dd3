"""The fleet of `simulate` end to end: same seed, same bytes; faults leave nothing behind."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from engine.disciplines import ShortestFirst
from harness.clock import run
from harness.experiment import ConfigurationSpec, QueueSpec, load_experiment
from harness.fleets.modelled import fluid_links, open_modelled
from harness.links.shape import GOODPUT_SHARE
from harness.links.spec import parse_link
from harness.policies.static import PrfaasStatic
from harness.replay import replay
from harness.router import RetryRules, Router
from results.recorder import Recorder
from results.records import RequestRecord, Status
from workloads.spec import generate

CONFIGURATION = ConfigurationSpec(
    name="prfaas", policy="prfaas-static", n_prfaas=4, n_prefill=3, n_decode=5
)


def simulate(count: int, disturb=None, request_rate: float = 2.8) -> list[RequestRecord]:
    """Records of `count` requests of the paper's workload; `disturb(fleet)` may plan faults."""
    experiment = load_experiment("paper")
    records: list[RequestRecord] = []

    async def main():
        fleet = await open_modelled(experiment, CONFIGURATION)
        router = Router(
            PrfaasStatic(19_400),
            fleet.view,
            fleet.instances,
            fleet.links,
            retry=RetryRules(max_attempts=8),
        )
        if disturb is not None:
            disturb(fleet)
        requests = generate(
            experiment.workload, experiment.arrivals, 7, request_rate=request_rate, count=count
        )
        counts = await replay(requests, router.serve, records.append, origin_s=0.0, drain_s=1e5)
        assert counts.offered == count == counts.succeeded + counts.failed
        for instance in fleet.instances.values():
            load = instance.load()
            assert {getattr(load, name) for name in load.__slots__} == {0}, instance.spec.name
        assert all(link.open_flows() == 0 for link in fleet.links.values())
        await fleet.close()

    run(main(), until_s=1e7)
    return records


def faults(fleet) -> None:
    """Crashes, restarts, pauses, slow devices and broken connections, some at equal times."""
    loop = asyncio.get_running_loop()
    instances, link = fleet.instances, fleet.links["prfaas", "pd"]
    for k in range(6):
        at_s = 40.0 + 50.0 * k
        for name in (f"prfaas-{k % 4}", f"pd-{k % 3}", f"pd-{3 + k % 5}"):
            loop.call_at(at_s, instances[name].crash, "killed")
            loop.call_at(at_s + 10.0, instances[name].restart)
        loop.call_at(at_s + 5.0, link.fail_flows, "connection reset")
        loop.call_at(at_s + 20.0, instances["pd-4"].pause)
        loop.call_at(at_s + 24.0, instances["pd-4"].resume)
        loop.call_at(at_s + 25.0, instances["pd-1"].slow, 2.0)
        loop.call_at(at_s + 35.0, instances["pd-1"].slow, 1.0)


def write(directory: Path) -> dict[str, str]:
    """Runs the disturbed simulation and returns the digest of each file that it wrote."""
    recorder = Recorder(directory, {"seed": "7"})
    for record in simulate(900, faults):
        recorder.request(record, "prfaas", "latency")
    recorder.close()
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.glob("*.parquet"))
    }


def written_apart(directory: Path, environment: dict[str, str]) -> str:
    """`write` in a process of its own: the digests as it prints them."""
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, __file__, str(directory)],
        env={"PYTHONPATH": str(Path(__file__).parents[2])} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "requests.parquet" in done.stdout and "tokens.parquet" in done.stdout
    return done.stdout


def test_same_seed_same_bytes_whatever_the_hash_seed(tmp_path):
    first, second = (written_apart(tmp_path / each, {"PYTHONHASHSEED": each}) for each in "12")
    assert first == second


def test_the_command_writes_the_same_bytes_whatever_the_hash_seed(tmp_path):
    settings = {
        "measure.capacity_warmup_s": 30,
        "measure.capacity_window_s": 60,
        "measure.latency_warmup_s": 0,
        "measure.latency_window_s": 60,
        "measure.load_fractions": [],
        "measure.unloaded": "false",
        "measure.slo_search": "false",
        "measure.flow_rates": "true",
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    written = []
    for seed in "12":
        command = [sys.executable, "-m", "harness", "run", "paper", *sets]
        subprocess.run(
            [*command, "--out", str(tmp_path / seed)],
            env={"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        files = sorted((tmp_path / seed).glob("*/*.parquet"))
        written.append({path.name: path.read_bytes() for path in files})
    assert written[0] == written[1]
    tables = {"requests", "tokens", "gaps", "links", "instances", "decisions", "flows"}
    assert written[0].keys() == {f"{name}.parquet" for name in tables}


@pytest.mark.parametrize(
    "module",
    [
        "harness.clock._timeline",
        "harness.instances._modelled_macro",
        "harness._ordering",
        "results._request_rows",
    ],
)
def test_same_bytes_with_the_modules_in_c_and_without(tmp_path, module):
    pytest.importorskip(module, reason=f"{module} is not built")
    with_c = written_apart(tmp_path / "c", {})
    assert with_c == written_apart(tmp_path / "python", {"PRFAAS_PURE_PYTHON": "1"})


def test_every_request_survives_the_faults_or_says_why():
    records = simulate(900, faults)
    assert len({record.id for record in records}) == 900
    retried = [record for record in records if record.attempts > 1]
    assert retried
    for record in records:
        if record.status is Status.SUCCEEDED:
            assert record.tokens_received == record.output_tokens == 1024
            order = (
                record.scheduled_s,
                record.prefill_started_s,
                record.prefill_finished_s,
                record.delivered_s,
                record.admitted_s,
                record.last_token_s,
            )
            assert list(order) == sorted(order)
            assert record.first_token_s == record.admitted_s
        else:
            assert record.failure
    assert sum(record.status is Status.SUCCEEDED for record in records) > 895


def test_unloaded_ttft_is_prefill_and_the_last_layer_across_the_link():
    records = simulate(50, request_rate=1 / 60)
    layers = 57
    for record in records:
        assert record.prefill_started_s == pytest.approx(record.scheduled_s, abs=1e-9)
        if record.prefill_cluster == "prfaas":
            assert record.input_tokens > 19_400
            payload_bps = 100e9 * GOODPUT_SHARE
            last_s = record.wire_bytes / layers * 8 / payload_bps + 0.00025
            transfer_s = record.delivered_s - record.prefill_finished_s
            assert transfer_s == pytest.approx(last_s, rel=1e-4)
        else:
            assert record.delivered_s == record.prefill_finished_s
            assert record.wire_bytes == 0
        [(start_s, step_s, count)] = record.token_runs
        assert (step_s, count) == (0.025, 1024)
        assert record.last_token_s == pytest.approx(start_s + 1023 * 0.025)


def test_link_schedule_becomes_states_of_payload_rate():
    async def main():
        spec = parse_link(
            {
                "rate_gbps": 10.0,
                "rtt_ms": 4.0,
                "schedule": [
                    {"at_s": 5.0, "rate_gbps": 2.0},
                    {"at_s": 8.0, "down": True},
                    {"at_s": 9.0, "down": False},
                ],
            }
        )
        link = fluid_links(spec)["prfaas", "pd"]
        seen = []
        for wait_s in (1.0, 5.0, 2.5, 1.0):
            await asyncio.sleep(wait_s)
            seen.append(link._rate * 8 / GOODPUT_SHARE)
        return seen

    assert run(main()) == pytest.approx([10e9, 2e9, 0.0, 2e9])


def test_each_direction_of_a_link_is_its_own():
    async def main():
        spec = parse_link(
            {
                "rate_gbps": 10.0,
                "rtt_ms": 10.0,
                "loss": {"model": "independent", "probability": 0.01},
                "reverse": {
                    "rate_gbps": 2.0,
                    "delay_ms": 7.0,
                    "loss": {"model": "independent", "probability": 0.02},
                },
            }
        )
        return [
            (link._rate * 8 / GOODPUT_SHARE, link._delay_s, link._rtt_s, link._loss)
            for link in fluid_links(spec).values()
        ]

    there, back = run(main())
    assert there == pytest.approx((10e9, 0.003, 0.010, 0.01))
    assert back == pytest.approx((2e9, 0.007, 0.010, 0.02))


def test_several_links_of_one_specification_are_one_of_their_rate():
    async def main():
        link = fluid_links(parse_link({"rate_gbps": 10.0}), rate_factor=3.0)["prfaas", "pd"]
        return link._rate * 8 / GOODPUT_SHARE

    assert run(main()) == pytest.approx(30e9)


def test_the_queue_of_a_configuration_is_that_of_its_instances():
    async def main():
        queue = QueueSpec(discipline="shortest-first", ageing=0.25, chunk_tokens=4096)
        configuration = CONFIGURATION.model_copy(update={"queue": queue})
        fleet = await open_modelled(load_experiment("paper"), configuration)
        return {one._prefill.rules for one in fleet.instances.values()}

    [rules] = run(main())
    assert (rules.chunk_tokens, rules.discipline) == (4096, ShortestFirst(ageing=0.25))


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
