"""Accounting of the hybrid cache: hits, checkpoints, eviction, and random operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.figures import CacheEvent, Group
from engine.cache.keys import block_keys, keys_of_ids
from engine.cache.pool import HybridPool, Lease, NeverFits, Pin, PoolFull

BLOCK = 64


def serve(pool: HybridPool, tokens: list[int], tenant: str = "") -> tuple[int, Lease]:
    """Compute a prompt as the engine would; returns the tokens it reused, and its lease."""
    lease = pool.acquire(block_keys(tokens, pool.block_tokens, tenant), len(tokens))
    reused = lease.hit.tokens
    for boundary in pool.policy.boundaries(
        reused, lease.hit.kv_tokens, len(tokens), pool.block_tokens
    ):
        lease.reserve_checkpoint(boundary)
    lease.copied()
    lease.commit(len(tokens))
    return reused, lease


def test_keys_name_the_whole_chain_and_the_tenant():
    tokens = list(range(1000))
    keys = block_keys(tokens, BLOCK, "a")
    assert len(keys) == 15
    assert keys[:7] == block_keys(tokens[: 7 * BLOCK + 5], BLOCK, "a")
    other = block_keys([1, *tokens[1:]], BLOCK, "a")
    assert not set(keys) & set(other)
    assert not set(keys) & set(block_keys(tokens, BLOCK, "b"))
    assert keys == block_keys(tokens, BLOCK, "a", after=keys[:4])
    assert not set(keys_of_ids([1, 2], "a")) & set(keys_of_ids([1, 2], "b"))


def test_boundaries_of_each_rule():
    policy = CheckpointPolicy(interval_blocks=4)
    assert policy.boundaries(0, 0, 700, 64) == [256, 512, 640]
    assert policy.boundaries(256, 448, 700, 64) == [448, 512, 640]
    assert CheckpointPolicy(0, False, False).boundaries(0, 64, 700, 64) == []
    assert policy.boundaries(640, 640, 700, 64) == []


def test_a_hit_needs_the_state_and_leaves_a_token_to_compute():
    pool = HybridPool(64, 8, BLOCK, policy=CheckpointPolicy(interval_blocks=0))
    prompt = list(range(640))
    reused, first = serve(pool, prompt)
    first.release()
    assert reused == 0
    # All ten blocks match, but the state at 640 would leave nothing to compute.
    assert pool.match(block_keys(prompt, BLOCK), 640).tokens == 0
    assert pool.match(block_keys(prompt, BLOCK), 640).kv_tokens == 640
    assert pool.match(block_keys([*prompt, 7], BLOCK), 641).tokens == 640
    reused, again = serve(pool, [*prompt, 7])
    assert reused == 640 and again.copy_from == -1
    again.release()


def test_prefix_reuse_when_the_checkpoint_lay_in_the_unique_suffix():
    """1,500 shared tokens + 700 own, then 1,600 + 600: the junction makes the third one hit."""
    pool = HybridPool(256, 16, BLOCK, policy=CheckpointPolicy(interval_blocks=0))
    shared = list(range(1600))
    hits = []
    for own, length in enumerate((1500, 1500, 1500, 1600, 1600)):
        prompt = shared[:length] + [10_000 * (own + 1) + i for i in range(2200 - length)]
        reused, lease = serve(pool, prompt)
        lease.release()
        hits.append(reused)
    # 1,500 is 23 blocks, 1,472 tokens. The second prompt finds blocks but no state, and leaves one.
    assert hits == [0, 0, 1472, 1472, 1472]
    figures = pool.figures()
    assert figures[Group.STATE].hit_tokens == 3 * 1472
    assert figures[Group.KV].hit_tokens == 3 * 1472 + 1600
    assert figures[Group.KV].lookup_tokens == 5 * 34 * BLOCK
    assert 0 < figures[Group.STATE].hit_rate < figures[Group.KV].hit_rate < 1


def test_an_arriving_cache_reuses_blocks_without_their_state():
    pool = HybridPool(64, 8, BLOCK, policy=CheckpointPolicy(0, False, False))
    prompt = list(range(640))
    _, first = serve(pool, prompt)
    first.release()
    lease = pool.acquire(block_keys(prompt, BLOCK), 640, arriving=True)
    assert lease.hit.kv_tokens == 640 and lease.copy_from == -1
    assert len(lease.pages) == 10 == len(set(lease.pages))
    lease.release()


def test_eviction_takes_the_end_of_the_oldest_chain_first_and_its_state_with_it():
    events: list[CacheEvent] = []
    pool = HybridPool(4, 8, BLOCK, on_event=events.append)
    _, lease = serve(pool, list(range(256)))
    lease.release()
    keys = block_keys(list(range(256)), BLOCK)
    other = pool.acquire(block_keys([9] * 64, BLOCK), 64)
    gone = [event.key for event in events if not event.stored and event.group is Group.KV]
    states = [event.key for event in events if not event.stored and event.group is Group.STATE]
    assert gone == [keys[3]] == states
    assert pool.match(keys, 300).kv_tokens == 192
    other.release()


def test_a_checkpoint_being_copied_is_not_evicted():
    pool = HybridPool(64, 3, BLOCK)
    prompt = list(range(100))
    _, first = serve(pool, prompt)
    first.release()
    second = pool.acquire(block_keys([*prompt, 1, 2], BLOCK), 102)
    source = second.copy_from
    assert source >= 0
    third = pool.acquire(block_keys([5] * 80, BLOCK), 80)
    with pytest.raises(PoolFull):
        pool.acquire(block_keys([6] * 80, BLOCK), 80)
    second.copied()
    fourth = pool.acquire(block_keys([6] * 80, BLOCK), 80)
    assert fourth.slot == source
    for lease in (second, third, fourth):
        lease.release()


def test_a_pinned_prefix_outlives_pressure_and_is_whole_or_not_to_be_had():
    pool = HybridPool(6, 3, BLOCK, policy=CheckpointPolicy(interval_blocks=0))
    prompt = list(range(4 * BLOCK))
    keys = block_keys(prompt, BLOCK)
    assert pool.pin(keys) is None
    _, lease = serve(pool, prompt)
    pages = lease.pages
    lease.release()
    assert pool.pin(keys[:3]) is None, "no state lies at its end"
    assert pool.pin(block_keys(prompt, BLOCK, "another tenant")) is None
    pin = pool.pin(keys)
    assert pin is not None and pin.pages == pages
    with pytest.raises(PoolFull):
        pool.acquire(block_keys([9] * 3 * BLOCK, BLOCK), 3 * BLOCK)
    others = [pool.acquire(block_keys([n] * BLOCK, BLOCK), BLOCK) for n in (8, 9)]
    assert pin.slot not in [other.slot for other in others]
    with pytest.raises(PoolFull, match="slot"):
        pool.acquire([], 0)
    pin.release()
    pool.acquire([], 0).release()
    assert pool.pin(keys) is None, "its state was evicted"
    for other in others:
        other.release()
    figures = pool.figures()
    assert pool.leases == figures[Group.KV].pinned == figures[Group.STATE].pinned == 0


def test_a_received_state_becomes_the_checkpoint_of_its_prefix():
    events: list[CacheEvent] = []
    pool = HybridPool(8, 3, BLOCK, on_event=events.append)
    prompt = list(range(3 * BLOCK))
    keys = block_keys(prompt, BLOCK)
    for _ in range(2):  # the second finds it there, and nothing is kept twice
        lease = pool.acquire(keys, len(prompt), arriving=True)
        lease.keep_state(len(prompt))
        lease.commit(len(prompt))
        lease.release()
    assert pool.match([*keys, 1], len(prompt) + 1).tokens == len(prompt)
    assert [event.key for event in events if event.group is Group.STATE] == [keys[-1]]
    figures = pool.figures()
    assert (figures[Group.KV].cached, figures[Group.STATE].cached) == (3, 1)
    assert figures[Group.KV].owned == figures[Group.STATE].owned == 0


def test_the_last_slot_is_taken_over_when_it_is_the_hit_itself():
    pool = HybridPool(64, 1, BLOCK)
    lease = pool.acquire(block_keys(list(range(64)), BLOCK), 64)
    lease.commit(64)
    lease.release()
    pool = HybridPool(64, 2, BLOCK)
    _, first = serve(pool, list(range(100)))
    first.release()
    blocker = pool.acquire([], 5)
    second = pool.acquire(block_keys(list(range(101)), BLOCK), 101)
    assert second.hit.tokens == 64 and second.copy_from == -1 and second.slot >= 0
    assert pool.figures()[Group.STATE].cached == 0
    second.release()
    blocker.release()


def test_what_can_never_fit_is_told_apart_from_what_must_wait():
    pool = HybridPool(4, 2, BLOCK)
    with pytest.raises(NeverFits, match="300 tokens need 5 pages of 64; the pool has 4"):
        pool.acquire([], 300)
    lease = pool.acquire([], 200)
    with pytest.raises(PoolFull):
        pool.acquire([], 65)
    lease.extend(256)
    with pytest.raises(NeverFits):
        lease.extend(257)
    lease.release()
    with pytest.raises(AssertionError):
        lease.release()


def test_a_prefix_computed_twice_at_once_is_stored_once():
    pool = HybridPool(12, 8, BLOCK)
    prompt = list(range(300))
    first = pool.acquire(block_keys(prompt[:200], BLOCK), 200)
    second = pool.acquire(block_keys(prompt, BLOCK), 300)
    first.commit(200)
    table = list(second.pages)
    second.commit(300)
    # The second keeps its own copies, and its fourth block too: its chain is not pinned whole.
    assert second.pages == table
    assert pool.figures()[Group.KV].cached == 3
    second.release()
    assert pool.figures()[Group.KV].free == 8
    others = pool.acquire([], 8 * BLOCK)
    assert not set(others.pages) & set(first.pages[:3])
    others.release()
    first.release()


class PoolMachine(RuleBasedStateMachine):
    """Random operations on a small pool; a shadow map knows what each page and slot holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HybridPool(
            12,
            5,
            4,
            policy=CheckpointPolicy(2),
            first_page=1,
            first_slot=1,
            on_freed=self.freed,
            on_event=self.event,
        )
        self.pins: list[tuple[Pin, str, list[int]]] = []
        self.live: list[tuple[Lease, str, list[int]]] = []
        self.places: dict[Lease, tuple[int, list[int]]] = {}
        self.content: dict[tuple[Group, int], tuple[str, tuple[int, ...]]] = {}
        self.free = {(Group.KV, n) for n in range(1, 13)} | {(Group.STATE, n) for n in range(1, 6)}
        self.cached: set[tuple[Group, int]] = set()

    def freed(self, group: Group, number: int) -> None:
        assert (group, number) not in self.free, "freed twice"
        self.free.add((group, number))
        self.content.pop((group, number), None)

    def event(self, event: CacheEvent) -> None:
        entry = (event.group, event.key)
        assert (entry in self.cached) != event.stored
        (self.cached.add if event.stored else self.cached.remove)(entry)

    def owns(self, group: Group, number: int) -> None:
        self.free.discard((group, number))

    @rule(
        tenant=st.sampled_from("ab"),
        branch=st.integers(0, 2),
        length=st.integers(1, 40),
        arriving=st.booleans(),
    )
    def acquire(self, tenant: str, branch: int, length: int, arriving: bool) -> None:
        tokens = ([7] * 6 + [branch] * 40)[:length]
        keys = block_keys(tokens, 4, tenant)
        expected = self.pool.match(keys, length)
        try:
            lease = self.pool.acquire(keys, length, arriving=arriving)
        except PoolFull:
            return
        assert lease.hit == expected
        reused = lease.reused_tokens
        assert reused == (lease.hit.kv_tokens if arriving else lease.hit.tokens)
        if not arriving:
            assert reused < length
        for index in range(reused // 4):
            owner, held = self.content[Group.KV, lease.pages[index]]
            assert owner == tenant and held == tuple(tokens[: (index + 1) * 4])
        if lease.copy_from >= 0:
            assert self.content[Group.STATE, lease.copy_from] == (tenant, tuple(tokens[:reused]))
        for page in lease.pages[reused // 4 :]:
            assert (Group.KV, page) in self.free, "handed out twice"
            self.owns(Group.KV, page)
        if (Group.STATE, lease.slot) in self.free:
            self.owns(Group.STATE, lease.slot)
        else:  # taken over from its own checkpoint
            assert self.content.pop((Group.STATE, lease.slot)) == (tenant, tuple(tokens[:reused]))
        if not arriving:
            for boundary in self.pool.policy.boundaries(reused, lease.hit.kv_tokens, length, 4):
                slot = lease.reserve_checkpoint(boundary)
                if slot >= 0:
                    assert (Group.STATE, slot) in self.free
                    self.owns(Group.STATE, slot)
                    self.content[Group.STATE, slot] = (tenant, tuple(tokens[:boundary]))
        for index in range(reused // 4, len(keys)):
            self.content[Group.KV, lease.pages[index]] = (tenant, tuple(tokens[: (index + 1) * 4]))
        self.live.append((lease, tenant, tokens))

    @rule(tenant=st.sampled_from("ab"), branch=st.integers(0, 2), blocks=st.integers(1, 10))
    def receive(self, tenant: str, branch: int, blocks: int) -> None:
        tokens = ([7] * 6 + [branch] * 40)[: 4 * blocks]
        keys = block_keys(tokens, 4, tenant)
        try:
            lease = self.pool.acquire(keys, len(tokens), arriving=True)
        except PoolFull:
            return
        self.owns(Group.STATE, lease.slot)
        self.content[Group.STATE, lease.slot] = (tenant, tuple(tokens))
        for index in range(lease.reused_tokens // 4, len(keys)):
            self.owns(Group.KV, lease.pages[index])
            self.content[Group.KV, lease.pages[index]] = (tenant, tuple(tokens[: (index + 1) * 4]))
        lease.keep_state(len(tokens))
        self.live.append((lease, tenant, tokens))

    @rule(tenant=st.sampled_from("ab"), branch=st.integers(0, 2), blocks=st.integers(1, 10))
    def pin(self, tenant: str, branch: int, blocks: int) -> None:
        tokens = ([7] * 6 + [branch] * 40)[: 4 * blocks]
        keys = block_keys(tokens, 4, tenant)
        whole = all((Group.KV, key) in self.cached for key in keys)
        pin = self.pool.pin(keys)
        assert (pin is not None) == (whole and (Group.STATE, keys[-1]) in self.cached)
        if pin is not None:
            self.pins.append((pin, tenant, tokens))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.pins) - 1))
        self.pins.pop(index)[0].release()

    @invariant()
    def what_is_pinned_stays(self) -> None:
        for pin, tenant, tokens in self.pins:
            assert self.content[Group.STATE, pin.slot] == (tenant, tuple(tokens))
            for index, page in enumerate(pin.pages):
                held = (tenant, tuple(tokens[: (index + 1) * 4]))
                assert self.content[Group.KV, page] == held

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        lease, _, tokens = data.draw(st.sampled_from(self.live))
        lease.copied()
        lease.commit(data.draw(st.integers(0, len(tokens))))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(1, 20))
    def extend(self, data: st.DataObject, more: int) -> None:
        lease, _, tokens = data.draw(st.sampled_from(self.live))
        before = len(lease.pages)
        try:
            lease.extend(min(len(tokens) + more, 48))
        except PoolFull:
            assert len(lease.pages) == before
        for page in lease.pages[before:]:
            assert (Group.KV, page) in self.free
            self.owns(Group.KV, page)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.live.pop(index)[0].release()

    @invariant()
    def what_is_leased_stays_where_it_was(self) -> None:
        """A transfer knows pages and slots by number from its admission on."""
        places = {lease: (lease.slot, list(lease.pages)) for lease, _, _ in self.live}
        for lease, (slot, pages) in places.items():
            was_slot, was_pages = self.places.get(lease, (slot, pages))
            assert slot == was_slot and pages[: len(was_pages)] == was_pages
        self.places = places

    @invariant()
    def nothing_leaks(self) -> None:
        figures = self.pool.figures()
        for group, figure in figures.items():
            assert figure.free == sum(1 for kind, _ in self.free if kind is group)
            assert figure.capacity == figure.free + figure.owned + figure.cached
            assert figure.cached == sum(1 for kind, _ in self.cached if kind is group)
            assert 0 <= figure.pinned <= figure.cached
        if not self.live:
            assert figures[Group.KV].owned == figures[Group.STATE].owned == 0
        if not self.live and not self.pins:
            assert figures[Group.KV].pinned == figures[Group.STATE].pinned == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
