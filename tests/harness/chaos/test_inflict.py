"""Faults on processes that stand for workers, of a fleet that notices their ends late or never."""

from __future__ import annotations

import asyncio
import math
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from harness.chaos import inflict
from harness.chaos.inflict import Faults


class Sleepers:
    """A fleet of processes that do nothing; an end is noticed `notice_s` after it was asked for
    first."""

    link = None

    def __init__(self, *names: str, notice_s: float = 0.0) -> None:
        self.processes = {name: self._sleeper() for name in names}
        self.restarted: list[str] = []
        self._notice_s = notice_s
        self._seen_s: dict[str, float] = {}

    def _sleeper(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"])

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def exit_status(self, name: str) -> int | None:
        status = self.processes[name].poll()
        now_s = asyncio.get_running_loop().time()
        if status is None or now_s - self._seen_s.setdefault(name, now_s) < self._notice_s:
            return None
        return status

    def lost(self, name: str) -> bool:
        return self.exit_status(name) is not None

    async def restart(self, name: str) -> None:
        assert self.processes[name].poll() is not None
        self._seen_s.pop(name)
        self.restarted.append(name)
        self.processes[name] = self._sleeper()


class Script:
    """Dice that fall as they are told: the name of a kind of fault, or of a worker."""

    def __init__(self, *choices: str) -> None:
        self._choices = iter(choices)

    def uniform(self, least: float, most: float) -> float:
        return least

    def choice(self, among: Sequence[Any]) -> Any:
        chosen = next(self._choices)
        return next(each for each in among if getattr(each, "__name__", each) == chosen)


@pytest.fixture
def fleets() -> Iterator[list[Sleepers]]:
    made: list[Sleepers] = []
    yield made
    for fleet in made:
        for process in fleet.processes.values():
            process.kill()
            process.wait()


async def inflicted(fleet: Sleepers, *choices: str) -> Faults:
    """What came of these faults, after which the dice have no more."""
    dice: Any = Script(*choices)
    faults = Faults(fleet, list(fleet.processes), lambda: None, dice, lambda line: None)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await faults.inflict(math.inf, calm_s=(0.0, 0.0))
    return faults


async def test_a_kill_ends_when_its_victim_stands_again_however_late_that_is_noticed(
    fleets: list[Sleepers],
) -> None:
    fleet = Sleepers("a", "b", notice_s=0.6)
    fleets.append(fleet)
    faults = await inflicted(fleet, "_kill", "a", "_stop", "a", "_cancel")
    assert fleet.restarted == ["a"]
    assert faults.done == {"kill": 1, "stop": 1, "cancel": 1}
    assert faults.violations == []
    assert all(process.poll() is None for process in fleet.processes.values())


async def test_a_worker_that_ended_by_itself_is_a_finding_and_is_started_again(
    fleets: list[Sleepers],
) -> None:
    fleet = Sleepers("a", "b")
    fleets.append(fleet)
    fleet.processes["b"].terminate()
    fleet.processes["b"].wait()
    faults = await inflicted(fleet, "_cancel")
    assert faults.violations == ["b ended by itself, with status -15"]
    assert fleet.restarted == ["b"]


async def test_an_end_that_nobody_notices_is_a_finding(
    fleets: list[Sleepers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inflict, "SETTLE_S", 0.2)
    fleet = Sleepers("a", notice_s=math.inf)
    fleets.append(fleet)
    faults = await inflicted(fleet, "_kill", "a")
    assert faults.violations == ["a: its end was not noticed for 0 s"]
