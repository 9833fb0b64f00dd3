"""The directory is a hint that is exact while events arrive, bounded always, and never needed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.keys import keys_of_ids
from engine.cache.pool import CacheEvent, Group
from harness.directory import PrefixDirectory
from harness.instances.prefix_pool import PrefixPool
from workloads.request import Request
from workloads.reuse import PrefixCache
from workloads.spec import generate, parse_arrivals, parse_workload
from workloads.traces.readers import open_trace

EVERYWHERE = CheckpointPolicy(interval_blocks=1)


def prompt(*ids: int, tokens: int | None = None, size: int = 10) -> Request:
    return Request(0, 0.0, tokens or len(ids) * size, 1, ids, size)


def store(directory: PrefixDirectory, holder: str, request: Request, *states: int) -> None:
    """Blocks of the prompt, and states at the ends of blocks `states` (from 1)."""
    keys = keys_of_ids(request.block_ids, request.tenant)
    for key in keys:
        directory.event(holder, CacheEvent(Group.KV, True, key))
    for depth in states:
        directory.event(holder, CacheEvent(Group.STATE, True, keys[depth - 1]))


def two_clusters() -> PrefixDirectory:
    directory = PrefixDirectory()
    directory.add_cluster("prfaas", ["prfaas-0"])
    directory.add_cluster("pd", ["pd-0", "pd-1"])
    return directory


def test_a_hit_is_the_deepest_state_and_held_counts_blocks_alone() -> None:
    directory = two_clusters()
    store(directory, "prfaas", prompt(1, 2, 3), 2)
    store(directory, "pd", prompt(1, 2, 3, 4))
    asked = prompt(1, 2, 3, 4, 5)
    assert directory.hit_tokens("prfaas", asked) == 20
    assert directory.held_tokens("prfaas", asked) == 30
    assert directory.hit_tokens("pd", asked) == 0
    assert directory.held_tokens("pd", asked) == 40
    assert directory.instance_tokens("prfaas-0", asked) == 20
    assert directory.instance_held_tokens("pd-1", asked) == 40
    assert directory.holders("prfaas", asked, 8) == []


def test_the_last_token_is_always_computed() -> None:
    directory = two_clusters()
    store(directory, "pd", prompt(1, 2), 1, 2)
    assert directory.hit_tokens("pd", prompt(1, 2)) == 10
    assert directory.hit_tokens("pd", prompt(1, 2, tokens=21)) == 20
    assert directory.held_tokens("pd", prompt(1, 2)) == 20


def test_tenants_share_nothing() -> None:
    directory = two_clusters()
    store(directory, "pd", prompt(1, 2, 3), 1, 2, 3)
    assert directory.hit_tokens("pd", Request(0, 0.0, 30, 1, (1, 2, 3), 10, tenant="b")) == 0


def test_instances_with_pools_of_their_own_are_told_apart() -> None:
    directory = PrefixDirectory()
    for name in ("pd-0", "pd-1", "pd-2"):
        directory.add_instance(name, "pd")
    store(directory, "pd-0", prompt(1, 2, 3), 1)
    store(directory, "pd-2", prompt(1, 2, 3), 2)
    asked = prompt(1, 2, 3, 4)
    assert directory.holders("pd", asked, 8) == [("pd-2", 20), ("pd-0", 10)]
    assert directory.holders("pd", asked, 1) == [("pd-2", 20)]
    assert directory.hit_tokens("pd", asked) == 20
    assert directory.instance_tokens("pd-1", asked) == 0
    directory.forget("pd-2")
    assert directory.holders("pd", asked, 8) == [("pd-0", 10)]


def test_a_wrong_entry_is_corrected_by_what_was_reused() -> None:
    directory = two_clusters()
    asked = prompt(1, 2, 3, 4)
    store(directory, "pd", asked, 1, 2, 3)
    directory.correct("pd", asked, 10)
    assert directory.hit_tokens("pd", asked) == 10


@pytest.mark.parametrize("max_blocks", [None, 300])
def test_hits_equal_the_offline_computation(max_blocks: int | None) -> None:
    """With a state at every block, a pool and its directory hit what an LRU of blocks hits."""
    workload = parse_workload(
        {"kind": "documents", "document": {"mu": 7.0, "sigma": 1.0, "max_tokens": 8192},
         "block_tokens": 64, "live_documents": 40, "reuse": 0.7}
    )  # fmt: skip
    directory = PrefixDirectory()
    directory.add_cluster("pd", ["pd-0"])
    pool = PrefixPool(lambda event: directory.event("pd", event), max_blocks, policy=EVERYWHERE)
    offline = PrefixCache(max_blocks)
    total = 0
    for request in generate(workload, parse_arrivals({}), 3, request_rate=1.0, count=1500):
        expected = offline.serve(request)
        assert directory.hit_tokens("pd", request) == pool.usable_tokens(request) == expected
        pool.keep_computed(request, expected)
        total += expected
    assert total > 0 and (max_blocks is None or offline.evicted_blocks > 0)


TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


@pytest.mark.skipif(not TRACE.is_file(), reason="the trace is not part of this checkout")
@pytest.mark.parametrize(("max_blocks", "share"), [(None, 0.373), (20_000, 0.299)])
def test_hits_of_the_mooncake_trace_equal_the_offline_computation(
    max_blocks: int | None, share: float
) -> None:
    directory = PrefixDirectory()
    directory.add_cluster("pd", ["pd-0"])
    pool = PrefixPool(lambda event: directory.event("pd", event), max_blocks, policy=EVERYWHERE)
    offline = PrefixCache(max_blocks)
    hits = total = 0
    for request in open_trace(str(TRACE)):
        expected = offline.serve(request)
        assert directory.hit_tokens("pd", request) == expected
        pool.keep_computed(request, expected)
        hits += expected
        total += request.input_tokens
    assert hits / total == pytest.approx(share, abs=0.001)


@given(st.integers(0, 2**32), st.sampled_from(["lost", "late", "doubled"]))
@settings(max_examples=30, deadline=None)
def test_bad_events_never_break_it(seed: int, fault: str) -> None:
    """Whatever happens to events, answers stay whole blocks within the prompt, and bounded."""
    draw = random.Random(seed)
    directory = PrefixDirectory(max_entries=32)
    directory.add_cluster("pd", ["pd-0"])
    waiting: list[CacheEvent] = []

    def hear(event: CacheEvent) -> None:
        if fault == "lost" and draw.random() < 0.3:
            return
        waiting.append(event)
        if fault == "doubled":
            waiting.append(event)
        if fault != "late" or draw.random() < 0.3:
            draw.shuffle(waiting)
            while waiting:
                directory.event("pd", waiting.pop())

    pool = PrefixPool(hear, max_blocks=12, max_states=6)
    for _ in range(40):
        n = draw.randint(1, 6)
        chain = tuple(100 * draw.randint(0, 3) + i for i in range(n))
        request = prompt(*chain, tokens=n * 10 - draw.randint(0, 9))
        hit, held = directory.hit_tokens("pd", request), directory.held_tokens("pd", request)
        assert 0 <= hit <= held + 9 and hit < request.input_tokens and hit % 10 == 0
        assert held <= request.input_tokens and held % 10 == 0
        pool.keep_computed(request, min(hit, pool.usable_tokens(request)))
    assert len(directory) <= 2 * 32


def test_it_remembers_what_is_used_within_its_bound() -> None:
    directory = PrefixDirectory(max_entries=64)
    directory.add_cluster("pd", ["pd-0"])
    system = prompt(1, 2)
    store(directory, "pd", system, 2)
    for i in range(10, 500):
        store(directory, "pd", prompt(i))
        if i % 8 == 0:
            assert directory.hit_tokens("pd", prompt(1, 2, 3)) == 20
    assert len(directory) <= 128
