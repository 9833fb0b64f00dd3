"""Scheduling over a fake memory that knows which tokens each page and state stands for."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.figures import Group
from engine.cache.pool import HybridPool, NeverFits
from engine.disciplines import (
    DISCIPLINES,
    FIFO,
    Discipline,
    LeastSlack,
    ShortestFirst,
    make_discipline,
)
from engine.scheduler import Limits, Scheduler, Step
from engine.sequence import Sequence

PAGE = 4


def answer(tokens: list[int]) -> int:
    """The fake model: the next token depends on every token before it."""
    return hash(tuple(tokens)) % 97


class FakeEngine:
    """Runs steps on pages and slots that hold token tuples; wrong content is an assertion."""

    def __init__(
        self,
        pages: int,
        slots: int,
        limits: Limits,
        interval_blocks: int = 2,
        discipline: Discipline = FIFO,
    ) -> None:
        self.pages: dict[int, list[int]] = {}
        self.states: dict[int, tuple[int, ...] | None] = {}
        self.pool = HybridPool(
            pages,
            slots,
            PAGE,
            policy=CheckpointPolicy(interval_blocks),
            first_page=1,
            first_slot=1,
            on_freed=self.poison,
        )
        self.scheduler = Scheduler(self.pool, limits, discipline)
        self.tick = 0

    def poison(self, group: Group, number: int) -> None:
        if group is Group.KV:
            self.pages[number] = [-1] * PAGE
        else:
            self.states[number] = None

    def step(self, cancel: Sequence | None = None) -> tuple[Step, list[Sequence]]:
        step = self.scheduler.schedule(self.tick)
        self.tick += 1
        sampled = []
        for item in step.items:
            tokens, lease = item.sequence.tokens, item.sequence.lease
            assert lease is not None
            source = item.source_slot if item.source_slot >= 0 else lease.slot
            state = self.states[source] if item.start else ()
            assert state == tuple(tokens[: item.start]), "stale state"
            for position in range(item.start):
                held = self.pages[lease.pages[position // PAGE]][position % PAGE]
                assert held == tokens[position], "wrong page"
            for position in range(item.start, item.stop):
                page = self.pages.setdefault(lease.pages[position // PAGE], [-1] * PAGE)
                page[position % PAGE] = tokens[position]
            for position, slot in item.checkpoints:
                assert item.start < position <= item.stop
                self.states[slot] = tuple(tokens[:position])
            self.states[lease.slot] = tuple(tokens[: item.stop])
            if item.samples:
                sampled.append(answer(tokens))
        if cancel is not None:
            self.scheduler.cancel(cancel)
        return step, self.scheduler.complete(step, sampled)

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not len(self.scheduler):
                break
            self.step()
        assert not len(self.scheduler), "sequences are stuck"
        figures = self.pool.figures()
        assert self.pool.leases == 0
        assert figures[Group.KV].owned == figures[Group.STATE].owned == 0
        assert figures[Group.KV].pinned == 0


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(tokens))
    return tokens


def test_chunks_end_on_pages_and_decode_goes_first():
    engine = FakeEngine(64, 8, Limits(step_tokens=10))
    first = Sequence("a", list(range(5)), 4)
    engine.scheduler.add(first)
    engine.step()
    second = Sequence("b", list(range(100, 123)), 2)
    engine.scheduler.add(second)
    step, _ = engine.step()
    assert [(i.sequence.id, i.start, i.stop) for i in step.items] == [("a", 5, 6), ("b", 0, 8)]
    step, _ = engine.step()
    assert [(i.start, i.stop) for i in step.items] == [(6, 7), (8, 16)]
    engine.drain()
    assert first.tokens == expected(list(range(5)), 4)
    assert second.tokens == expected(list(range(100, 123)), 2)
    assert (first.finish, second.finish) == ("length", "length")


def test_whole_prompts_are_computed_one_a_step_in_order():
    engine = FakeEngine(64, 8, Limits(step_tokens=8, one_prompt=True))
    for name, start in (("a", 0), ("b", 100)):
        engine.scheduler.add(Sequence(name, list(range(start, start + 30)), 1, hand_over=True))
    step, fed = engine.step()
    assert [(i.sequence.id, i.start, i.stop) for i in step.items] == [("a", 0, 30)]
    assert fed[0].lease is not None and fed[0].computed == 30
    step, fed_b = engine.step()
    assert [i.sequence.id for i in step.items] == ["b"]
    for sequence in (*fed, *fed_b):
        sequence.drop_memory()
    engine.drain()


def test_an_arrived_cache_starts_by_feeding_its_first_token():
    engine = FakeEngine(64, 8, Limits())
    prompt = list(range(9))
    lease = engine.pool.acquire([], 9, arriving=True)
    for position, token in enumerate(prompt):
        page = engine.pages.setdefault(lease.pages[position // PAGE], [-1] * PAGE)
        page[position % PAGE] = token
    engine.states[lease.slot] = tuple(prompt)
    sequence = Sequence("a", list(prompt), 3)
    sequence.arrive(lease, answer(prompt))
    engine.scheduler.add(sequence)
    step, fed = engine.step()
    assert [(i.start, i.stop) for i in step.items] == [(9, 10)]
    assert step.admitted == fed == [sequence]
    engine.drain()
    assert sequence.tokens == expected(prompt, 3)


def test_a_stop_token_ends_it_unless_ignored():
    prompt = [1, 2, 3]
    second = expected(prompt, 2)[-1]
    engine = FakeEngine(16, 4, Limits())
    stops = Sequence("a", list(prompt), 10, stop_tokens=frozenset({second}))
    engine.scheduler.add(stops)
    engine.drain()
    assert stops.finish == "stop" and stops.generated == 2


def test_preemption_resumes_to_the_same_tokens():
    engine = FakeEngine(9, 8, Limits(), interval_blocks=0)
    sequences = [Sequence(str(n), [n] * 8, 12) for n in range(3)]
    for sequence in sequences:
        engine.scheduler.add(sequence)
    engine.drain()
    assert engine.scheduler.preemptions > 0
    for n, sequence in enumerate(sequences):
        assert sequence.tokens == expected([n] * 8, 12)


def test_a_sequence_resumed_right_behind_its_checkpoint_copies_the_state():
    engine = FakeEngine(32, 8, Limits(), interval_blocks=1)
    sequence = Sequence("a", list(range(8)), 4)
    engine.scheduler.add(sequence)
    engine.step()
    engine.scheduler._preempt(sequence)
    step, _ = engine.step()
    assert [(i.start, i.stop) for i in step.items] == [(8, 9)]
    assert step.items[0].source_slot not in (-1, sequence.lease.slot)
    engine.drain()
    assert sequence.tokens == expected(list(range(8)), 4)


def test_what_holds_memory_passes_what_waits_for_it():
    engine = FakeEngine(4, 4, Limits())
    lease = engine.pool.acquire([], 8, arriving=True)
    for position in range(8):
        engine.pages.setdefault(lease.pages[position // PAGE], [-1] * PAGE)[position % PAGE] = 5
    engine.states[lease.slot] = (5,) * 8
    blocked = Sequence("blocked", list(range(12)), 2)
    engine.scheduler.add(blocked)
    arrived = Sequence("arrived", [5] * 8, 2)
    arrived.arrive(lease, answer([5] * 8))
    engine.scheduler.add(arrived)
    step, _ = engine.step()
    assert [i.sequence.id for i in step.items] == ["arrived"]
    engine.drain()
    assert blocked.finish == arrived.finish == "length"


def test_phases_spread_a_decode_step():
    engine = FakeEngine(64, 16, Limits(phases=4))
    waits = []
    for arrival in range(3):
        prompt = [arrival] * 5
        lease = engine.pool.acquire([], 5, arriving=True)
        for position, token in enumerate(prompt):
            page = engine.pages.setdefault(lease.pages[position // PAGE], [-1] * PAGE)
            page[position % PAGE] = token
        engine.states[lease.slot] = tuple(prompt)
        sequence = Sequence(str(arrival), prompt, 3)
        sequence.arrive(lease, answer(prompt))
        engine.scheduler.add(sequence)
        waits.append(sequence)
        step, _ = engine.step()
        assert step.admitted == [sequence]
    ends, batches = {}, []
    for _ in range(12):
        tick = engine.tick
        step, fed = engine.step()
        batches += [len(step.items)] if step.items else []
        for sequence in fed:
            ends.setdefault(sequence.id, []).append(tick + 1)
    # Admitted at ticks 0, 1, 2: a token every four ticks from there, computed a tick ahead at
    # the latest, together with those of others.
    assert ends == {"0": [4, 8], "1": [5, 9], "2": [6, 10]}
    assert batches == [2, 2]


def test_what_can_never_fit_is_refused_at_once():
    engine = FakeEngine(4, 4, Limits())
    with pytest.raises(NeverFits, match="10 prompt \\+ 8 output tokens do not fit in 4 pages"):
        engine.scheduler.add(Sequence("a", [1] * 10, 8))


def test_a_failed_step_ends_its_sequences_and_shares_nothing():
    engine = FakeEngine(16, 4, Limits())
    sequence = Sequence("a", list(range(8)), 4, hand_over=True)
    engine.scheduler.add(sequence)
    engine.scheduler.abort(engine.scheduler.schedule())
    assert sequence.finish == "error"
    assert engine.pool.figures()[Group.KV].cached == 0
    engine.drain()


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    pages=st.integers(8, 20),
    slots=st.integers(2, 6),
    step_tokens=st.integers(4, 24),
    max_batch=st.integers(1, 5),
    one_prompt=st.booleans(),
    phases=st.integers(1, 3),
    name=st.sampled_from(DISCIPLINES),
)
def test_any_mix_ends_with_the_right_tokens_and_no_leak(
    data, pages, slots, step_tokens, max_batch, one_prompt, phases, name
):
    limits = Limits(max_batch, step_tokens, one_prompt, phases)
    engine = FakeEngine(pages, slots, limits, discipline=make_discipline(name, 0.5, 10.0))
    sequences = []
    for number in range(data.draw(st.integers(1, 7))):
        shared = data.draw(st.integers(0, 12))
        own = data.draw(st.integers(1, 8))
        sequence = Sequence(
            str(number),
            [1] * shared + [number % 3 + 2] * own,
            data.draw(st.integers(1, 8)),
            tenant=data.draw(st.sampled_from("ab")),
            arrived_s=float(engine.tick),
        )
        engine.scheduler.add(sequence)
        sequences.append(sequence)
        for _ in range(data.draw(st.integers(0, 3))):
            chosen = data.draw(st.sampled_from([None, None, *sequences]))
            engine.step(cancel=chosen)
    engine.drain()
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.prompt_tokens]
        assert sequence.tokens == expected(prompt, sequence.generated)
        assert sequence.finish == "cancelled" or sequence.generated == sequence.max_tokens


# Queue disciplines -----------------------------------------------------------------------------


def prompt_of(name: str, tokens: int, arrived_s: float = 0.0) -> Sequence:
    """One prompt like no other, whose cache is handed over."""
    own = Random(name).choices(range(1 << 16), k=tokens)
    return Sequence(name, own, 1, hand_over=True, arrived_s=arrived_s)


def computed(step: Step) -> list[tuple[str, int, int]]:
    return [(item.sequence.id, item.start, item.stop) for item in step.items]


def until_empty(engine: FakeEngine) -> list[tuple[str, int, int]]:
    """All that is computed from here on, in order; what ends gives its memory back."""
    done = []
    while len(engine.scheduler):
        step, fed = engine.step()
        done += computed(step)
        give_back(fed)
    return done


def give_back(fed: list[Sequence]) -> None:
    """What the owner of a cache does with it once it has been handed over."""
    for sequence in fed:
        if sequence.finish:
            sequence.drop_memory()


def test_the_shortest_takes_over_between_even_chunks():
    engine = FakeEngine(64, 8, Limits(step_tokens=16, one_prompt=True), discipline=SHORTEST)
    engine.scheduler.add(prompt_of("long", 36))
    step, _ = engine.step()
    # Three chunks of twelve rather than 16, 16 and 4.
    assert computed(step) == [("long", 0, 12)]
    engine.scheduler.add(prompt_of("middle", 20))
    engine.scheduler.add(prompt_of("short", 6))
    engine.scheduler.add(prompt_of("as short", 6))
    assert until_empty(engine) == [
        ("short", 0, 6),
        ("as short", 0, 6),
        ("middle", 0, 12),
        ("middle", 12, 20),
        ("long", 12, 24),
        ("long", 24, 36),
    ]


def test_what_is_computed_counts_as_done():
    engine = FakeEngine(64, 8, Limits(step_tokens=16, one_prompt=True), discipline=SHORTEST)
    engine.scheduler.add(prompt_of("begun", 32))
    engine.step()
    engine.scheduler.add(prompt_of("shorter than all of it", 20))
    assert until_empty(engine)[0] == ("begun", 16, 32)


def test_age_is_worth_work():
    order = []
    for ageing in (0.01, 1.0):
        limits = Limits(step_tokens=64, one_prompt=True)
        engine = FakeEngine(64, 8, limits, discipline=ShortestFirst(ageing))
        engine.scheduler.add(prompt_of("old and long", 40, arrived_s=0.0))
        engine.scheduler.add(prompt_of("young and short", 10, arrived_s=31.0))
        order.append([name for name, _, _ in until_empty(engine)])
    assert order == [["young and short", "old and long"], ["old and long", "young and short"]]


def test_least_slack_goes_by_the_arrival_of_the_request_and_its_length():
    limits = Limits(step_tokens=64, one_prompt=True)
    engine = FakeEngine(64, 8, limits, discipline=LeastSlack(50.0))
    engine.scheduler.add(prompt_of("just in time", 10, arrived_s=20.0))
    engine.scheduler.add(prompt_of("long", 40, arrived_s=20.0))
    engine.scheduler.add(prompt_of("tried again", 10, arrived_s=-15.0))
    assert [name for name, _, _ in until_empty(engine)] == ["tried again", "long", "just in time"]


def test_in_steps_that_mix_tokens_and_prompts_the_shortest_gets_what_the_tokens_leave():
    engine = FakeEngine(64, 8, Limits(step_tokens=13), discipline=SHORTEST)
    engine.scheduler.add(Sequence("decodes", [7] * 5, 9))
    engine.step()
    engine.scheduler.add(prompt_of("long", 30))
    step, _ = engine.step()
    assert computed(step) == [("decodes", 5, 6), ("long", 0, 12)]
    engine.scheduler.add(prompt_of("short", 7))
    step, fed = engine.step()
    assert computed(step) == [("decodes", 6, 7), ("short", 0, 7), ("long", 12, 16)]
    give_back(fed)
    until_empty(engine)


def test_one_that_lost_its_memory_goes_first_whatever_the_discipline():
    engine = FakeEngine(16, 4, Limits(max_batch=1), discipline=SHORTEST)
    long = Sequence("long", list(range(20)), 4)
    engine.scheduler.add(long)
    engine.step()
    engine.scheduler._preempt(long)
    engine.scheduler.add(prompt_of("short", 3))
    assert engine.scheduler.starved
    step, _ = engine.step()
    assert step.admitted == [long]
    assert [name for name, _, _ in until_empty(engine)][-1] == "short"
    assert long.tokens == expected(list(range(20)), 4)


def test_one_that_finds_no_memory_lets_those_go_on_that_hold_it():
    limits = Limits(step_tokens=8, one_prompt=True)
    engine = FakeEngine(9, 8, limits, interval_blocks=0, discipline=SHORTEST)
    engine.scheduler.add(prompt_of("long", 32))
    engine.step()
    engine.scheduler.add(prompt_of("does not fit", 6))
    engine.scheduler.add(prompt_of("worse but small", 28))
    engine.scheduler.add(prompt_of("fits", 3))
    # The only free page is for the best; then the next has none, and nobody passes it.
    done = until_empty(engine)
    assert [done[0], done[-1][0]] == [("fits", 0, 3), "worse but small"]
    assert [name for name, _, _ in done[1:]].index("long") == 0
    assert [name for name, _, _ in done].index("does not fit") > done.index(("long", 24, 32))


def test_a_prompt_that_others_passed_can_be_cancelled():
    engine = FakeEngine(64, 8, Limits(step_tokens=16, one_prompt=True), discipline=SHORTEST)
    long = prompt_of("long", 48)
    engine.scheduler.add(long)
    engine.step()
    engine.scheduler.add(prompt_of("short", 8))
    engine.step(cancel=long)
    assert long.finish == "cancelled" and long.lease is None
    assert until_empty(engine) == []
    for sequence in engine.scheduler.running:
        sequence.drop_memory()


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=40),
    gaps=st.lists(st.integers(0, 12), min_size=40, max_size=40),
    pages=st.integers(11, 40),
    step_tokens=st.integers(4, 24),
    one_prompt=st.booleans(),
    ageing=st.sampled_from([0.25, 1.0, 4.0]),
)
def test_nobody_starves(lengths, gaps, pages, step_tokens, one_prompt, ageing):
    """A token takes a second. Nothing that arrives more than w / ageing after a prompt of w is
    computed while that waits for its turn, so its wait is bounded whatever comes."""
    limits = Limits(8, step_tokens, one_prompt)
    engine = FakeEngine(pages, 8, limits, discipline=ShortestFirst(ageing))
    now_s = 0.0
    coming, at_s = [], 0.0
    for number, (tokens, gap_s) in enumerate(zip(lengths, gaps, strict=False)):
        at_s += gap_s
        coming.append(prompt_of(str(number), tokens, at_s))
    here: list[Sequence] = []
    while coming or len(engine.scheduler):
        while coming and coming[0].arrived_s <= now_s:
            here.append(coming.pop(0))
            engine.scheduler.add(here[-1])
        step, fed = engine.step()
        for item in step.items:
            latest_s = item.sequence.arrived_s
            passed = [s for s in here if s.computed == 0 and s is not item.sequence]
            assert all(s.arrived_s + s.prompt_tokens / ageing >= latest_s for s in passed)
        for sequence in fed:
            sequence.drop_memory()
            here.remove(sequence)
        now_s += max(1, sum(item.stop - item.start for item in step.items))
    assert not here


SHORTEST = ShortestFirst(ageing=0.001)
