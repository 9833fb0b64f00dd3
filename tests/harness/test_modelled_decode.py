"""Decode in macro-steps: equal to the step-by-step oracle, exact times, limits, and no leaks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import run
from harness.instances.modelled import DecodeRules, ModelledInstance
from harness.instances.modelled_batch import StepClock
from harness.instances.modelled_steps import token_times
from harness.ports import DecodeJob, InstanceLost, InstanceSpec, PrefillDone, RequestRejected, Role
from workloads.request import Request


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


@settings(max_examples=150, deadline=None)
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
