"""Decode in macro-steps: equal to the step-by-step oracle, exact times, limits, and no leaks."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.clock import run
from harness.instances import modelled
from harness.instances.modelled import DecodeRules, ModelledInstance
from harness.instances.modelled_batch import StepClock, StepTimes
from harness.instances.modelled_macro import MacroBatch as PythonBatch
from harness.ports import DecodeJob, InstanceLost, InstanceSpec, PrefillDone, RequestRejected, Role
from native import require
from workloads.request import Request

try:
    require("harness.instances._modelled_macro")
    from harness.instances._modelled_macro import MacroBatch as CBatch
except ImportError:
    CBatch = None

not_built = pytest.mark.skipif(
    CBatch is None, reason="harness.instances._modelled_macro is not built"
)


@pytest.fixture(
    params=[pytest.param(PythonBatch, id="python"), pytest.param(CBatch, id="c", marks=not_built)],
    autouse=True,
)
def batch_class(request, monkeypatch):
    """Each test runs with either batch."""
    monkeypatch.setattr(modelled, "MacroBatch", request.param)
    return request.param


@dataclass(frozen=True)
class Device:
    """A step is base + per_sequence x batch + per_context x context; a token is a byte of cache."""

    base_s: float = 0.025
    per_sequence_s: float = 0.0
    per_context_s: float = 0.0
    max_batch: int = 4
    kv_memory_bytes: float | None = None
    n_layers: int = 4

    def prefill_s(self, input_tokens, cached_tokens=0):
        return 0.001 * (input_tokens - cached_tokens)

    def kv_bytes(self, tokens, held_tokens=0):
        return float(tokens - held_tokens)

    def decode_step_s(self, batch, context_tokens):
        return self.base_s + self.per_sequence_s * batch + self.per_context_s * context_tokens


class Sender:
    def __init__(self):
        self.granted = 0
        self.error = None

    def memory_granted(self):
        self.granted += 1

    def destination_lost(self, error):
        self.error = error


def decode_instance(device: Device, rules: DecodeRules = DecodeRules()) -> ModelledInstance:
    return ModelledInstance(InstanceSpec("d-0", "pd", Role.DECODE, "test"), device, decode=rules)


def put_cache(instance: ModelledInstance, request: Request) -> DecodeJob:
    stage = instance.decode_stage()
    assert stage.memory.ask(stage.expect(request, (request.id, 1), Sender()))
    stage.arrived((request.id, 1))
    return DecodeJob(request, 1, PrefillDone(0.0, 0.0, 0.0, 0))


def request(number: int, arrival_s: float, output_tokens: int, input_tokens: int = 10) -> Request:
    return Request(number, arrival_s, input_tokens, output_tokens)


def token_times(runs):
    """The times that runs stand for."""
    return [start_s + i * step_s for start_s, step_s, count in runs for i in range(count)]


def play(device, requests, cancel_after_s, events, rules):
    """Token times and end of each request, by id; None for those cancelled or lost."""

    async def main():
        loop = asyncio.get_running_loop()
        instance = decode_instance(device, rules)
        outcome = {}

        async def one(item):
            await asyncio.sleep(item.arrival_s)
            try:
                async with asyncio.timeout(cancel_after_s.get(item.id)):
                    done = await instance.decode(put_cache(instance, item))
                outcome[item.id] = (token_times(done.runs), loop.time(), done.admitted_s)
            except (TimeoutError, InstanceLost):
                outcome[item.id] = None

        for at_s, name, arguments in events:
            loop.call_at(at_s, getattr(instance, name), *arguments)
        await asyncio.gather(*(one(item) for item in requests))
        assert set(vars_of(instance.load()).values()) == {0}
        return outcome

    return run(main(), until_s=1e6)


def vars_of(load):
    return {name: getattr(load, name) for name in load.__slots__}


def assert_equal_outcomes(macro, stepped):
    assert macro.keys() == stepped.keys()
    for number, expected in stepped.items():
        found = macro[number]
        assert (found is None) == (expected is None), number
        if expected is not None:
            assert found[0] == pytest.approx(expected[0], abs=1e-9, rel=0), number
            assert found[1] == pytest.approx(expected[1], abs=1e-9, rel=0)
            assert found[2] == pytest.approx(expected[2], abs=1e-9, rel=0)


# No sum of step durations is a multiple of this, so nothing falls on a step boundary by chance.
arrivals = st.integers(0, 400).map(lambda k: k * 0.01371717133937 + 0.000123)
devices = st.builds(
    Device,
    base_s=st.sampled_from([0.025, 0.0311]),
    per_sequence_s=st.sampled_from([0.0, 0.0017]),
    per_context_s=st.sampled_from([0.0, 0.00003]),
    max_batch=st.integers(1, 5),
)


@st.composite
def campaigns(draw):
    n = draw(st.integers(1, 14))
    requests = [
        request(i, draw(arrivals), draw(st.integers(1, 60)), draw(st.integers(1, 40)))
        for i in range(n)
    ]
    cancel = {
        i: draw(st.integers(1, 120)) * 0.01717391133471 + 0.000057
        for i in draw(st.sets(st.integers(0, n - 1), max_size=4))
    }
    events = []
    if draw(st.booleans()):
        events.append((draw(arrivals) + 0.0007, "slow", (draw(st.sampled_from([0.5, 3.0])),)))
    if draw(st.booleans()):
        at_s = draw(arrivals) + 0.0013
        events.append((at_s, "pause", ()))
        events.append((at_s + draw(st.integers(1, 30)) * 0.0191, "resume", ()))
    if draw(st.booleans()):
        at_s = draw(arrivals) + 0.0029
        events.append((at_s, "crash", ()))
        events.append((at_s + 0.0031, "restart", ()))
    return requests, cancel, events


# The fixture chooses a batch for all examples.
either = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@either
@given(devices, campaigns())
def test_macro_steps_equal_step_by_step(device, campaign):
    rules = DecodeRules(context_bucket_tokens=32)
    stepped_rules = DecodeRules(context_bucket_tokens=32, step_by_step=True)
    macro = play(device, *campaign, rules)
    stepped = play(device, *campaign, stepped_rules)
    assert_equal_outcomes(macro, stepped)


def test_one_request_has_one_exact_run():
    async def main():
        instance = decode_instance(Device())
        await asyncio.sleep(3.0)
        return await instance.decode(put_cache(instance, request(1, 0.0, 1024)))

    done = run(main())
    assert done.admitted_s == 3.0
    assert done.runs == [(3.0, 0.025, 1024)]


def test_second_request_waits_for_the_boundary_and_slows_both():
    device = Device(base_s=0.0, per_sequence_s=0.1)
    outcome = play(device, [request(1, 0.0, 4), request(2, 0.05, 3)], {}, [], DecodeRules())
    assert outcome[1][0] == pytest.approx([0.0, 0.1, 0.3, 0.5], abs=1e-12)
    assert outcome[2][0] == pytest.approx([0.1, 0.3, 0.5], abs=1e-12)


def test_batch_limit_makes_the_next_one_wait_for_a_place():
    outcome = play(
        Device(base_s=1.0, max_batch=2),
        [request(1, 0.0, 3), request(2, 0.0, 5), request(3, 0.5, 2)],
        {},
        [],
        DecodeRules(),
    )
    assert outcome[3][0] == [2.0, 3.0]


def test_equal_steps_make_one_run_whatever_the_batch_does():
    async def main():
        instance = decode_instance(Device(max_batch=8))

        async def one(i):
            await asyncio.sleep(i * 0.3)
            return await instance.decode(put_cache(instance, request(i, 0.0, 200)))

        return await asyncio.gather(*(one(i) for i in range(20)))

    assert [len(done.runs) for done in run(main())] == [1] * 20


def test_steps_take_the_middle_of_the_context_bucket():
    device = Device(base_s=0.0, per_context_s=0.001)
    rules = DecodeRules(context_bucket_tokens=100)
    outcome = play(device, [request(1, 0.0, 4, input_tokens=97)], {}, [], rules)
    # Contexts 98, 99, 100 of the three steps lie in buckets 0, 0 and 1, of middles 50 and 150.
    assert outcome[1][0] == pytest.approx([0.0, 0.05, 0.1, 0.25], abs=1e-12)


def test_crash_fails_all_and_frees_all_then_serves_again():
    async def main():
        loop = asyncio.get_running_loop()
        instance = decode_instance(Device(max_batch=1))
        works = [instance.decode(put_cache(instance, request(i, 0.0, 100))) for i in range(3)]
        sender = Sender()
        stage = instance.decode_stage()
        stage.memory.ask(stage.expect(request(9, 0.0, 5), (9, 1), sender))
        loop.call_at(0.7, instance.crash, "killed")
        results = await asyncio.gather(*works, return_exceptions=True)
        assert [str(error) for error in results] == ["d-0: killed"] * 3
        assert loop.time() == 0.7
        assert isinstance(sender.error, InstanceLost)
        assert set(vars_of(instance.load()).values()) == {0}
        with pytest.raises(InstanceLost, match="killed"):
            instance.decode_stage()
        instance.restart()
        with pytest.raises(InstanceLost, match="holds no cache of request 9"):
            instance.decode(DecodeJob(request(9, 0.0, 5), 1, PrefillDone(0, 0, 0, 0)))
        await asyncio.sleep(1.0)
        return await instance.decode(put_cache(instance, request(10, 0.0, 2)))

    assert run(main()).runs == [(1.7, 0.025, 2)]


def test_memory_is_granted_in_order_and_never_overbooked():
    async def main():
        instance = decode_instance(Device(kv_memory_bytes=100.0))
        stage = instance.decode_stage()
        senders = [Sender() for _ in range(3)]
        sizes = [60, 50, 20]
        for i, (size, sender) in enumerate(zip(sizes, senders, strict=True)):
            memory = stage.expect(request(i, 0.0, 10, size - 10), (i, 1), sender)
            assert stage.memory.ask(memory) == (i == 0)
        # The third would fit beside the first, but the second asked before it.
        assert stage.memory.used_bytes == 60 and stage.memory.waiting == 2
        instance.abandon(request(0, 0.0, 10), 1)
        instance.abandon(request(0, 0.0, 10), 1)
        assert [sender.granted for sender in senders] == [0, 1, 1]
        assert stage.memory.used_bytes == 70 and stage.memory.peak_bytes == 70
        instance.abandon(request(1, 0.0, 10), 1)
        instance.abandon(request(2, 0.0, 10), 1)
        assert set(vars_of(instance.load()).values()) == {0}
        with pytest.raises(RequestRejected, match="needs 101 bytes"):
            stage.expect(request(4, 0.0, 91), (4, 1), Sender())

    run(main())


def test_drain_waits_for_the_work_in_hand_and_refuses_new_work():
    async def main():
        loop = asyncio.get_running_loop()
        instance = decode_instance(Device())
        work = instance.decode(put_cache(instance, request(1, 0.0, 41)))
        draining = asyncio.create_task(instance.drain())
        await asyncio.sleep(0)
        with pytest.raises(InstanceLost, match="draining"):
            instance.decode_stage()
        await draining
        assert loop.time() == 1.0 and work.done()

    run(main())


def test_convert_changes_the_role_after_drain_and_conversion():
    async def main():
        loop = asyncio.get_running_loop()
        instance = ModelledInstance(
            InstanceSpec("d-0", "pd", Role.DECODE, "test"), Device(), conversion_s=5.0
        )
        instance.decode(put_cache(instance, request(1, 0.0, 41)))
        await instance.convert(Role.PREFILL)
        assert loop.time() == 6.0 and instance.role is Role.PREFILL
        with pytest.raises(InstanceLost, match="serves prefill"):
            instance.decode_stage()
        await instance.convert(Role.DECODE)
        instance.decode_stage()

    run(main())


def test_old_segments_are_forgotten():
    clock = StepClock(0.0)
    for boundary in range(0, 5000, 2):
        clock.change_step(boundary, 0.5 + boundary % 4)
        if clock.crowded:
            clock.forget_before(boundary - 40)
    assert len(clock._ends) < 1200
    runs = clock.runs(4970, 4996)
    assert sum(count for _, _, count in runs) == 27
    times = token_times(runs)
    assert all(a < b for a, b in pairwise(times))


@dataclass(eq=False)
class Member:
    """Of a batch alone; `end(member)` is called when its tokens are out."""

    output_tokens: int
    input_tokens: int = 10
    end: object = None
    admitted_at: int = -1
    removed: bool = False
    runs: object = None

    def done(self):
        return self.removed or self.runs is not None

    def finish(self, runs):
        self.runs = runs
        if self.end is not None:
            self.end(self)


def new_batch(batch_class, device: Device = Device()):
    return batch_class(asyncio.get_running_loop(), StepTimes(device, 32), device.max_batch)


programs = st.lists(
    st.tuples(
        st.sampled_from(["add"] * 6 + ["remove", "remove", "slow", "pause", "resume", "clear"]),
        st.integers(0, 9),
        st.sampled_from([0.0, 0.0, 0.003, 0.025, 0.1, 0.6371]),
    ),
    max_size=60,
)


def follow(batch_class, device, program):
    """What a program does to a batch, as far as can be seen, to the last bit."""

    async def main():
        batch = new_batch(batch_class, device)
        members, seen = [], []
        for number, (action, choice, wait_s) in enumerate(program):
            if action == "add":
                members.append(Member(1 + choice * 7 % 40, 3 + 5 * choice))
                batch.add(members[-1])
            elif action == "remove":
                living = [member for member in members if not member.done()]
                if living:
                    member = living[choice % len(living)]
                    member.removed = True
                    batch.remove(member)
            elif action == "clear":
                ended = batch.clear()
                seen.append([members.index(member) for member in ended])
                for member in ended:
                    member.removed = True
            else:
                getattr(batch, action)(*((1.0 + choice / 3,) if action == "slow" else ()))
            seen.append((number, batch.active, batch.waiting, batch._segments))
            await asyncio.sleep(wait_s)
        batch.resume()
        await asyncio.sleep(1e4)
        assert batch.active == batch.waiting == 0
        return seen, [member.runs for member in members]

    return run(main())


@not_built
@either
@given(devices, programs)
def test_both_twins_give_the_same_to_the_last_bit(device, program):
    assert follow(CBatch, device, program) == follow(PythonBatch, device, program)


def test_a_batch_forgets_segments_of_which_nobody_has_tokens(batch_class):
    async def main():
        batch = new_batch(batch_class, Device(per_context_s=1e-6))
        sizes = []

        def again(member):
            sizes.append(batch._segments)
            if len(sizes) < 40:
                batch.add(Member(2000, end=again))

        batch.add(Member(2000, end=again))
        await asyncio.sleep(1e5)
        return sizes

    sizes = run(main())
    assert len(sizes) == 40 and max(sizes) < 700


def test_one_that_finishes_may_change_the_batch(batch_class):
    async def main():
        batch = new_batch(batch_class, Device(base_s=1.0, max_batch=20))
        late = Member(3)
        others = [Member(9) for _ in range(4)]

        def change(member):
            batch.add(late)
            for other in others:
                other.removed = True
                batch.remove(other)

        # More leave together than few.
        together = [Member(5) for _ in range(11)]
        together[0].end = change
        for member in together + others:
            batch.add(member)
        await asyncio.sleep(100.0)
        assert batch.active == batch.waiting == 0
        return together, late, others

    together, late, others = run(main())
    assert [member.runs for member in together] == [[(0.0, 1.0, 5)]] * 11
    assert late.runs == [(4.0, 1.0, 3)] and not any(other.runs for other in others)


def test_what_a_member_raises_goes_to_the_loop_and_the_batch_goes_on(batch_class):
    async def main():
        reported = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: reported.append(context["exception"])
        )
        batch = new_batch(batch_class)
        batch.add(Member(3, end=lambda member: 1 / 0))
        after = Member(5)
        batch.add(after)
        await asyncio.sleep(1.0)
        assert [type(error) for error in reported] == [ZeroDivisionError]
        return after.runs

    assert run(main()) == [(0.0, 0.025, 5)]


def test_a_member_that_is_not_there_cannot_be_removed(batch_class):
    async def main():
        batch = new_batch(batch_class)
        batch.add(Member(3))
        with pytest.raises(ValueError):
            batch.remove(Member(3))

    run(main())


def test_a_batch_that_is_given_up_gives_up_its_members(batch_class):
    async def main():
        batch = new_batch(batch_class, Device(max_batch=1))
        members = [Member(3), Member(3)]
        members[0].end = members[1].end = batch  # a cycle
        found = [weakref.ref(member) for member in members]
        for member in members:
            batch.add(member)
        asyncio.get_running_loop()._forget()
        del batch, members, member
        gc.collect()
        assert [each() for each in found] == [None, None]

    run(main())


@not_built
@pytest.mark.parametrize("tokens", ["7", 7.0, None, -1, 1 << 41, 1 << 80])
def test_the_twin_in_c_refuses_members_whose_tokens_it_cannot_count(tokens):
    async def main():
        batch = new_batch(CBatch)
        with pytest.raises((TypeError, OverflowError)):
            batch.add(Member(tokens))
        with pytest.raises((TypeError, OverflowError)):
            batch.add(Member(3, tokens))
        with pytest.raises(AttributeError):
            batch.add(7)
        assert batch.active == batch.waiting == 0

    run(main())


@not_built
def test_the_twin_in_c_survives_a_hostile_loop_and_hostile_step_times():
    class Loop:
        now, batch, left = 0.0, None, 0

        def time(self):
            if self.left:
                self.left -= 1
                self.batch.clear()
                self.batch.add(Member(4))
            return self.now

        def call_at(self, when, callback):
            return self if when < math.inf else None

        def cancel(self):
            self.batch.clear()

    class Times:
        bucket_tokens = 8
        by_batch = ()

        def step_s(self, batch, context):
            loop.batch.clear()
            return 0.5

    for times in (Times(), StepTimes(Device(max_batch=64), 32)):
        loop = Loop()
        if not isinstance(times.by_batch, list):
            with pytest.raises(TypeError):
                CBatch(loop, times, 64)
            Times.by_batch = []
        loop.batch = batch = CBatch(loop, times, 64)
        for step in range(300):
            loop.left = step % 5
            loop.now = step * 0.7
            member = Member(1 + step % 9)
            batch.add(member)
            batch()
            if step % 3 == 0:
                with pytest.raises((ValueError, TypeError)):
                    batch.remove(member)
                    batch.remove(member)
            if step % 7 == 0:
                batch.pause()
                batch.slow(2.0)
            batch.resume()
    with pytest.raises(TypeError):
        batch(1)
    with pytest.raises(TypeError):
        batch.slow("fast")
    times.by_batch.clear()
    batch.clear()
    with pytest.raises(IndexError):
        batch.add(Member(3))
    loop.now = math.nan
    with pytest.raises(OverflowError):
        batch.add(Member(3))
        batch.add(Member(3))
