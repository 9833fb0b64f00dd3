"""The four-way comparison on a Ray cluster of three nodes on this machine, beside the local fleet.

The same experiment three times: on the local fleet; on Ray's own test cluster (a head that takes no
worker, two nodes that each could carry everything); and there once more, while the node with the
most workers is removed under the first configuration's load. Printed: each figure on both fleets,
and what the removal cost. Exit code 1 when a request is lost, tokens are wrong, nobody stood on the
node that went, or a figure differs by more than `--agreement`.

    python -m benchmarks.scale_out
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from ray.cluster_utils import Cluster

from harness.execution import Execution, Fleets, execute
from harness.experiment import ConfigurationSpec, Experiment, load_experiment, parse_override
from harness.fleets.ray import RayFleet, RayFleets, RayOptions
from harness.ray.cluster import NICENESS
from results.summary import ConfigurationSummary

#: Short windows of the main job, fewer real tokens, and half of the instances: each is a process
#: of its own that imports torch, and two cores carry them, Ray and the driver.
SETTINGS = (
    "measure.capacity_warmup_s=30",
    "measure.capacity_window_s=90",
    "measure.latency_warmup_s=20",
    "measure.latency_window_s=100",
    "emulate.token_scale=128",
    "configurations.homogeneous.n_prefill=4",
    "configurations.homogeneous.n_decode=2",
    "configurations.naive.n_prfaas=2",
    "configurations.naive.n_decode=4",
    "configurations.balanced.n_prfaas=2",
    "configurations.balanced.n_prefill=2",
    "configurations.balanced.n_decode=2",
    "configurations.prfaas.n_prfaas=2",
    "configurations.prfaas.n_prefill=2",
    "configurations.prfaas.n_decode=2",
)
#: Units of each cluster's resource on each of the two nodes: enough for everybody.
UNITS = {"prfaas": 8.0, "pd": 16.0}
#: The node goes so long after the second phase of a configuration began, seconds.
REMOVE_AFTER_S = 4.0
#: Printed and not judged: the local fleet reads the link's own counters, with every ping and
#: acknowledgement, and on Ray only what the data planes sent of caches is known.
METERED = "egress Gbit/s, as metered"
CROSSED = "latency: caches that crossed, MB"


class Opened(RayFleets):
    """Remembers the fleet that it opened last."""

    latest: RayFleet | None = None

    async def open(self, experiment: Experiment, configuration: ConfigurationSpec) -> RayFleet:
        self.latest = await super().open(experiment, configuration)
        return self.latest


class Removal:
    """Removes the node with the most workers, once, in the second phase of the run."""

    def __init__(self, cluster: Cluster) -> None:
        self.fleets: Opened | None = None
        self._cluster = cluster
        self._phases = 0
        self._timer: threading.Timer | None = None
        self.moved: list[str] = []

    def hear(self, line: str) -> None:
        """A line of the run's log; a phase begins with one."""
        print(line, file=sys.stderr, flush=True)
        if " req/s" in line:
            self._phases += 1
            if self._phases == 2:
                self._timer = threading.Timer(REMOVE_AFTER_S, self._remove)
                self._timer.start()

    def _remove(self) -> None:
        assert self.fleets is not None and self.fleets.latest is not None
        fleet = self.fleets.latest
        node_of = {name: fleet.place(name).node for name in fleet.instances}
        standing = Counter(node_of.values())
        doomed = max(self._cluster.worker_nodes, key=lambda node: standing[node.node_id])
        self.moved = [name for name, node in node_of.items() if node == doomed.node_id]
        print(f"removing the node of {', '.join(self.moved)}", file=sys.stderr, flush=True)
        self._cluster.remove_node(doomed, allow_graceful=False)


def figures(configuration: ConfigurationSummary) -> dict[str, float]:
    """What is compared, in units of the modelled system."""
    found: dict[str, float | None] = {"capacity req/s": configuration.capacity.paper}
    for phase in configuration.phases:
        found[f"{phase.name}: throughput req/s"] = phase.throughput.paper
        if phase.name == "capacity":
            continue
        found[f"{phase.name}: TTFT mean s"] = phase.ttft.mean.paper
        found[f"{phase.name}: TTFT P90 s"] = phase.ttft.p90.paper
        found[f"{phase.name}: TPOT P90 s"] = phase.tpot.p90.paper
        found[f"{phase.name}: offloaded share"] = phase.offloaded_share.paper
        found[f"{phase.name}: {METERED}"] = phase.egress.mean_gbps.paper
    return {name: value for name, value in found.items() if value is not None}


def cache_bytes(run: Execution) -> dict[str, float]:
    """Bytes of caches that crossed the link in the second phase, by configuration."""
    columns = ["configuration", "phase", "wire_bytes"]
    table = pq.read_table(run.directory / "requests.parquet", columns=columns).unify_dictionaries()
    table = table.filter(pc.equal(table["phase"], "latency"))
    sums = table.group_by("configuration").aggregate([("wire_bytes", "sum")])
    return dict(
        zip(sums["configuration"].to_pylist(), sums["wire_bytes_sum"].to_pylist(), strict=True)
    )


def compare(local: Execution, there: Execution, agreement: float) -> list[str]:
    """Print each figure on both fleets; what differs by more than `agreement` (a share)."""
    apart = []
    crossed, crossed_there = cache_bytes(local), cache_bytes(there)
    for here, far in zip(local.summary.configurations, there.summary.configurations, strict=True):
        others = figures(far) | {CROSSED: crossed_there[far.name] / 1e6}
        for name, value in (figures(here) | {CROSSED: crossed[here.name] / 1e6}).items():
            other = others.get(name)
            if other is None:
                apart.append(f"{here.name}: {name} is missing on Ray")
                continue
            off = abs(other - value) / value if value else float(other != 0.0)
            print(f"{here.name:12} {name:36} {value:10.4f} {other:10.4f} {off:7.1%}")
            if off > agreement and METERED not in name:
                apart.append(f"{here.name}: {name} differs by {off:.1%}")
    return apart


def lost(run: Execution) -> list[str]:
    """Requests that were offered and did not succeed, or whose tokens were wrong."""
    return [
        f"{each.name} {phase.name}: {phase.counts}"
        for each in run.summary.configurations
        for phase in each.phases
        if phase.counts.offered != phase.counts.succeeded or phase.counts.mismatched
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", default="bench")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--agreement", type=float, default=0.10)
    parser.add_argument("--skip-removal", action="store_true", help="only the figures")
    options = parser.parse_args()

    overrides = dict(parse_override(text) for text in (*SETTINGS, *options.set))
    experiment = load_experiment(options.experiment, overrides)
    if options.only:
        kept = tuple(each for each in experiment.configurations if each.name in options.only)
        experiment = experiment.model_copy(update={"configurations": kept})

    def run(name: str, fleets: Fleets | None, say: Any) -> Execution:
        began_s = time.monotonic()
        named = experiment.model_copy(update={"name": f"scale-out-{name}"})
        done = execute(named, options.out, "benchmarks.scale_out", say, fleets)
        print(f"{name}: {time.monotonic() - began_s:.0f} s, {done.directory}", flush=True)
        return done

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = []
    local = run("local", None, say)
    os.environ.setdefault(NICENESS, "0")
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources=UNITS)
    try:
        chosen = RayOptions(cluster.address, allow_plain=True)

        removal = Removal(cluster)

        def on_ray(experiment: Experiment, directory: Path) -> Opened:
            removal.fleets = Opened(experiment, directory, chosen)
            return removal.fleets

        there = run("ray", on_ray, say)
        print(f"{'':12} {'':36} {'local':>10} {'Ray':>10} {'apart':>7}")
        found += compare(local, there, options.agreement)
        found += [f"local, {each}" for each in lost(local)] + [
            f"Ray, {each}" for each in lost(there)
        ]
        if not options.skip_removal:
            survived = run("ray-removal", on_ray, removal.hear)
            found += [f"with a node removed, {each}" for each in lost(survived)]
            if not removal.moved:
                found.append("no worker stood on the node that was removed")
            counts = [
                phase.counts for each in survived.summary.configurations for phase in each.phases
            ]
            offered = sum(each.offered for each in counts)
            retried = sum(each.retried for each in counts)
            print(
                f"with a node of {len(removal.moved)} workers removed: {offered} requests, "
                f"{retried} tried again, {len(lost(survived))} phases with a loss"
            )
    finally:
        ray.shutdown()
        cluster.shutdown()
    for each in found:
        print(f"FAILED {each}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
