"""How fast `simulate` is: requests per CPU-second, memory, and growth with the fleet.

`make bench-speed` runs all; each measurement is a process of its own, so that peak memory is its
own too. CPU time counts everything from the first request's generation to the closed Parquet
files (requests and tokens, with exact token times). A short run goes before each, because the first
file that pyarrow writes costs 0.2 s of imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.clock import run
from harness.fleets.modelled import build_fleet, fluid_links
from harness.host import native
from harness.links.fluid import FlowLimits
from harness.links.spec import LinkSpec
from harness.policies.static import PrfaasStatic
from harness.ports import InstanceSpec, Role
from harness.profiles import load_profile
from harness.replay import ReplayCounts, replay
from harness.router import Router
from harness.topology import PD, PRFAAS
from results.recorder import Recorder
from results.records import RequestRecord
from workloads.spec import generate, parse_arrivals, parse_workload

#: The case study: 4 remote prefill, 3 local prefill and 5 decode instances, 3.19 requests/s.
N_PRFAAS, N_PREFILL, N_DECODE, CAPACITY = 4, 3, 5, 3.187
LOAD = 0.95
THRESHOLD_TOKENS = 19_400
WORKLOAD = {
    "kind": "lognormal",
    "mu": 9.90,
    "sigma": 1.00,
    "min_tokens": 128,
    "max_tokens": 131072,
    "output_tokens": 1024,
}


@dataclass(frozen=True, slots=True)
class Case:
    """`size` case studies side by side: all counts, the rate and the link are multiplied by it."""

    name: str
    instances: int
    requests: int | None = None
    duration_s: float | None = None
    load: float = LOAD

    @property
    def size(self) -> float:
        return self.instances / (N_PRFAAS + N_PREFILL + N_DECODE)


@dataclass(frozen=True, slots=True)
class Cost:
    requests: int
    failed: int
    simulated_s: float
    cpu_s: float
    wall_s: float
    peak_mib: float
    grown_mib: float

    @property
    def per_cpu_s(self) -> float:
        return self.requests / self.cpu_s


CASES = (
    Case("12 instances, 100,000 requests", 12, requests=100_000),
    Case("1,250 instances, one hour", 1250, duration_s=3600.0),
)


def instance_specs(case: Case) -> list[InstanceSpec]:
    remote = round(N_PRFAAS * case.size)
    prefill = round(N_PREFILL * case.size)
    decode = case.instances - remote - prefill
    specs = [InstanceSpec(f"prfaas-{i}", PRFAAS, Role.PREFILL, "") for i in range(remote)]
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    return specs + [InstanceSpec(f"pd-{i}", PD, role, "") for i, role in enumerate(roles)]


async def simulate(case: Case, on_record: Callable[[RequestRecord], None]) -> ReplayCounts:
    """The case's requests through the router and the modelled fleet."""
    profiles = {PRFAAS: load_profile("1t-h200"), PD: load_profile("1t-h20")}
    link = LinkSpec(rate_gbps=100.0, rtt_ms=0.5)
    one_sender = FlowLimits(interface_bps=link.rate_gbps * 1e9)
    links = fluid_links(link, limits=one_sender, rate_factor=case.size)
    fleet = build_fleet(instance_specs(case), profiles, links)
    router = Router(PrfaasStatic(THRESHOLD_TOKENS), fleet.view, fleet.instances, fleet.links)
    requests = generate(
        parse_workload(WORKLOAD),
        parse_arrivals({"process": "poisson"}),
        1,
        request_rate=case.load * CAPACITY * case.size,
        duration_s=case.duration_s,
        count=case.requests,
    )
    return await replay(requests, router.serve, on_record, origin_s=0.0)


def measure(case: Case, directory: Path) -> Cost:
    """Run `case` here, writing Parquet to new directories under `directory`."""
    _run(replace(case, requests=10), directory / "warm-up")
    return _run(case, directory / "run")


def _run(case: Case, directory: Path) -> Cost:
    directory.mkdir()
    before_mib = _peak_mib()
    simulated_s = 0.0
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    recorder = Recorder(directory, {"case": case.name})

    def on_record(record: RequestRecord) -> None:
        nonlocal simulated_s
        simulated_s = record.ended_s or simulated_s
        recorder.request(record, "prfaas", "speed")

    counts = run(simulate(case, on_record))
    recorder.close()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return Cost(
        requests=counts.offered,
        failed=counts.offered - counts.succeeded,
        simulated_s=simulated_s,
        cpu_s=cpu_s,
        wall_s=wall_s,
        peak_mib=_peak_mib(),
        grown_mib=_peak_mib() - before_mib,
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_apart(case: Case) -> Cost:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(**json.loads(done.stdout))


def report(costs: list[tuple[Case, Cost]]) -> str:
    lines = [
        f"{'case':<34}{'requests':>10}{'simulated':>11}{'CPU':>9}{'wall':>9}"
        f"{'req/CPU-s':>11}{'us/req':>8}{'peak RSS':>11}"
    ]
    for case, cost in costs:
        lines.append(
            f"{case.name:<34}{cost.requests:>10,}{cost.simulated_s:>9,.0f} s{cost.cpu_s:>7.1f} s"
            f"{cost.wall_s:>7.1f} s{cost.per_cpu_s:>11,.0f}{1e6 / cost.per_cpu_s:>8.1f}"
            f"{cost.peak_mib:>7.0f} MiB"
        )
    small, large = costs[0][1], costs[-1][1]
    lines.append(
        f"cost per request, {costs[-1][0].instances:,} against {costs[0][0].instances} instances: "
        f"{small.per_cpu_s / large.per_cpu_s:.2f}x"
    )
    lines.append(f"modules in C: {native()}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args()
    if options.case:
        with tempfile.TemporaryDirectory() as folder:
            cost = measure(Case(**json.loads(options.case)), Path(folder))
        print(json.dumps(asdict(cost)))
        return 0
    costs = [(case, measure_apart(case)) for case in CASES]
    if options.json:
        print(json.dumps([asdict(case) | asdict(cost) for case, cost in costs], indent=2))
    else:
        print(report(costs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
