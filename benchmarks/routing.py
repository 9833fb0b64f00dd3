"""What a routing decision costs: 1,250 instances, 100,000 directory entries, every policy.

    python benchmarks/routing.py [--decisions 2000] [--json]

Each decision is made and accounted for as the router does, against a view with queues, a link that
has been measured, and a directory in which every instance has a pool of its own (the dearest case).
Prints microseconds of CPU a decision: the median and the 99th percentile over batches of 20.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from engine.cache.keys import keys_of_ids
from engine.cache.pool import CacheEvent, Group
from harness.accounts import DecodePool, PrefillPool
from harness.directory import PrefixDirectory
from harness.policies.catalog import make_policy, policy_names
from harness.ports import LinkSignals
from harness.profiles import load_profile
from harness.topology import PD, PRFAAS
from harness.view import View
from workloads.lengths import TruncatedLogNormal
from workloads.request import Request

BLOCK = 512
N_REMOTE, N_LOCAL, N_DECODE = 450, 300, 500
ENTRIES = 100_000
BATCH = 20
BOUND_US = 50.0


def build_view() -> tuple[View, PrefixDirectory]:
    remote = PrefillPool(PRFAAS, load_profile("1t-h200"))
    local, decode = PrefillPool(PD, load_profile("1t-h20")), DecodePool(PD)
    directory = PrefixDirectory()
    for count, pool, cluster in ((N_REMOTE, remote, PRFAAS), (N_LOCAL, local, PD)):
        for i in range(count):
            pool.add(f"{cluster}-{i}")
            directory.add_instance(f"{cluster}-{i}", cluster)
    for i in range(N_DECODE):
        decode.add(f"{PD}-{N_LOCAL + i}")
        directory.add_instance(f"{PD}-{N_LOCAL + i}", PD)
    signals = LinkSignals(1.0, 90e9, 0.5, 45e9, 1e6, 0.001, 0.0005)
    view = View(0.0, {PRFAAS: remote, PD: local}, {PD: decode}, {(PRFAAS, PD): signals})
    view.directory = directory
    view.copies = True
    return view, directory


def fill(directory: PrefixDirectory, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Chains of blocks, all behind one system prompt that many hold, spread over the instances."""
    holders = [f"{PRFAAS}-{i}" for i in range(N_REMOTE)] + [f"{PD}-{i}" for i in range(N_LOCAL)]
    system = (1, 2)
    chains: list[tuple[int, ...]] = []
    fresh = 10
    while len(directory) < ENTRIES:
        blocks = int(rng.integers(10, 120))
        chain = system + tuple(range(fresh, fresh + blocks))
        fresh += blocks
        chains.append(chain)
        keys = keys_of_ids(chain)
        for holder in rng.choice(len(holders), 3, replace=False):
            for depth, key in enumerate(keys):
                directory.event(holders[holder], CacheEvent(Group.KV, True, key))
                if depth % 8 == 1 or depth == len(keys) - 1:
                    directory.event(holders[holder], CacheEvent(Group.STATE, True, key))
    return chains


def requests(chains: list[tuple[int, ...]], count: int, rng: np.random.Generator) -> list[Request]:
    """Half go on from a known chain, half are new, with the paper's lengths."""
    lengths = TruncatedLogNormal().sample(rng, count).tolist()
    made = []
    for number, tokens in enumerate(lengths):
        full = tokens // BLOCK
        own = tuple(10_000_000 + number * 1000 + i for i in range(full))
        known = chains[int(rng.integers(len(chains)))] if number % 2 else (1, 2)
        made.append(Request(number, 0.0, tokens, 1024, (known + own)[:full], BLOCK))
    return made


def measure(name: str, decisions: int) -> tuple[float, float]:
    rng = np.random.default_rng(1)
    view, directory = build_view()
    asked = requests(fill(directory, rng), decisions, rng)
    policy = make_policy(name, 19_400, {})
    costs = []
    rate = N_DECODE * 0.6
    for start in range(0, decisions - BATCH + 1, BATCH):
        began = time.process_time_ns()
        for request in asked[start : start + BATCH]:
            view.now_s = request.id / rate
            decision = policy.route(request, view)
            view.prefill[decision.prefill_cluster].assign(
                decision.prefill_key, view.now_s, decision.predicted_work_s
            )
            tokens = request.input_tokens + request.output_tokens
            view.decode[decision.decode_cluster].assign(decision.decode_key, tokens)
        costs.append((time.process_time_ns() - began) / BATCH / 1e3)
    return statistics.median(costs), sorted(costs)[int(0.99 * len(costs))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {name: measure(name, options.decisions) for name in policy_names()}
    if options.json:
        print(json.dumps({name: {"median_us": m, "p99_us": p} for name, (m, p) in found.items()}))
    else:
        print(f"{N_REMOTE + N_LOCAL + N_DECODE} instances, {ENTRIES:,} entries; us a decision")
        for name, (median, p99) in found.items():
            print(f"{name:20}{median:8.1f}{p99:8.1f}")
    return int(any(median > BOUND_US for median, _ in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
