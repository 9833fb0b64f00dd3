"""A loop that stood still takes nobody for silent, and says that it did. On a clock that jumps."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from harness.errors import ExitCode
from harness.experiment import Experiment
from harness.replay import replay
from harness.stalls import KEPT, OwnStalls
from harness.verdict import faults
from results.records import RequestRecord, Status
from results.summary import ConfigurationSummary
from workloads.request import Request


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its time is what a test says. To its timers a jump is time in which it did not run."""

    ahead_s = 0.0

    def time(self) -> float:
        return self.ahead_s

    async def runs(self, seconds: float) -> None:
        """Time passes, and the loop runs all along."""
        for _ in range(round(seconds / 0.1)):
            self.ahead_s += 0.1
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def run(test: Callable[[JumpingLoop, OwnStalls], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        stalls = OwnStalls()
        stalls.watch()
        try:
            await test(loop, stalls)
        finally:
            stalls.close()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


async def waits(stalls: OwnStalls, seconds: float, answer: asyncio.Future[None]) -> str:
    try:
        async with stalls.timeout(seconds):
            await answer
    except TimeoutError:
        return "silent"
    return "answered"


def test_whoever_is_silent_while_the_loop_runs_is_out_of_time():
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        waiting = loop.create_task(waits(stalls, 3.0, loop.create_future()))
        await loop.runs(2.7)
        assert not waiting.done()
        await loop.runs(0.6)
        assert await waiting == "silent"
        assert (stalls.n, stalls.total_s) == (0, 0.0)

    run(test)


@pytest.mark.parametrize("before_s", [0.0, 0.1, 1.5, 2.9])
def test_after_a_stall_everybody_has_the_whole_of_the_time_again(before_s: float):
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        waiting = loop.create_task(waits(stalls, 3.0, loop.create_future()))
        await asyncio.sleep(0)
        await loop.runs(before_s)
        loop.ahead_s += 7.0
        await loop.runs(2.7)
        assert not waiting.done()
        await loop.runs(0.6)
        assert await waiting == "silent"
        assert stalls.n == 1
        assert stalls.total_s == pytest.approx(7.0, abs=0.4)
        (stall,) = stalls.last
        assert stall.ended_s - stall.began_s == pytest.approx(7.0, abs=0.5)

    run(test)


def test_an_answer_that_came_during_the_stall_counts():
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        answer = loop.create_future()
        waiting = loop.create_task(waits(stalls, 3.0, answer))
        await loop.runs(0.2)
        loop.ahead_s += 7.0
        # The timers are due before the answer is read.
        loop.call_later(0.05, answer.set_result, None)
        await loop.runs(0.3)
        assert await waiting == "answered"

    run(test)


def test_a_deadline_that_begins_after_a_stall_is_as_long_as_ever():
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        await loop.runs(1.0)
        loop.ahead_s += 7.0
        await loop.runs(2.0)
        waiting = loop.create_task(waits(stalls, 3.0, loop.create_future()))
        await loop.runs(2.7)
        assert not waiting.done()
        await loop.runs(0.6)
        assert await waiting == "silent"

    run(test)


def test_a_slow_beat_is_no_stall_and_each_stall_counts_once():
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        for _ in range(10):
            loop.ahead_s += 0.9
            await loop.runs(0.3)
        assert stalls.n == 0
        for _ in range(2):
            loop.ahead_s += 2.0
            await loop.runs(1.0)
        assert stalls.n == 2
        assert stalls.total_s == pytest.approx(4.0, abs=0.6)

    run(test)


def test_nothing_is_noted_before_and_after():
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        stalls.close()
        loop.ahead_s += 7.0
        await loop.runs(1.0)
        assert await waits(stalls, 0.0, loop.create_future()) == "silent"
        assert stalls.n == 0

    run(test)


def test_a_cancelled_wait_is_cancelled_and_leaves_no_timer():
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        waiting = loop.create_task(waits(stalls, 3.0, loop.create_future()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await loop.runs(4.0)

    run(test)


def test_facts_say_when_and_the_last_are_kept():
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        assert stalls.facts() == {"stalled_s": 0.0, "stalls": []}
        await loop.runs(5.0)
        loop.ahead_s += 7.0
        await loop.runs(0.3)
        facts = stalls.facts()
        (told,) = facts["stalls"]
        assert told["at_s"] == pytest.approx(5.0, abs=0.3)
        assert told["seconds"] == pytest.approx(7.0, abs=0.5)
        assert facts["stalled_s"] == pytest.approx(7.0, abs=0.4)
        for _ in range(KEPT + 5):
            loop.ahead_s += 2.0
            await loop.runs(0.2)
        assert stalls.n == KEPT + 6 and len(stalls.facts()["stalls"]) == KEPT

    run(test)


@pytest.mark.parametrize(("stalled_s", "codes"), [(0.0, []), (6.5, [ExitCode.CLIENT_LIMITED])])
def test_a_run_during_which_the_harness_stood_still_is_not_to_be_trusted(stalled_s, codes):
    experiment = Experiment.model_validate(
        {
            "name": "x",
            "workload": {"kind": "lognormal", "mu": 8.0, "sigma": 0.5},
            "configurations": [
                {"name": "pd", "policy": "homogeneous", "n_prefill": 1, "n_decode": 1}
            ],
        }
    )
    found = list(faults(experiment, [ConfigurationSummary("pd", stalled_s=stalled_s)], {}, False))
    assert [each.exit_code for each in found] == codes
    assert all("stood still for 6.5 s" in each.text for each in found)


def test_what_ends_after_a_stall_in_the_drain_has_not_failed():
    async def test(loop: JumpingLoop, stalls: OwnStalls) -> None:
        answer = loop.create_future()

        async def serve(request: Request, record: RequestRecord, origin_s: float) -> None:
            await answer
            record.status = Status.SUCCEEDED

        drained = loop.create_task(
            replay(
                [Request(0, 0.0, 10, 1)],
                serve,
                lambda record: None,
                origin_s=loop.time(),
                drain_s=3.0,
                timeout=stalls.timeout,
            )
        )
        await loop.runs(0.5)
        loop.ahead_s += 7.0
        await loop.runs(2.7)
        answer.set_result(None)
        counts = await drained
        assert (counts.succeeded, counts.failed) == (1, 0)

    run(test)
