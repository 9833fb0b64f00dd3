"""Whether memory and descriptors of processes that die and come back are flat."""

import random
from collections.abc import Callable

import pytest

from harness.chaos.holdings import MIB, Holdings
from harness.chaos.processes import Held


def soak(
    leak_per_hour: float,
    *,
    lives: int = 8,
    life_s: float = 400.0,
    noise: float = 0.5 * MIB,
    descriptors_per_hour: float = 0.0,
    kept: Callable[[float], float] = lambda age_s: 0.0,
    says: bool = False,
) -> Holdings:
    """A process sampled every 5 s; each life begins small, warms up, and has a level of its own.
    `kept`: bytes that the allocator keeps of what was freed, at an age in seconds. `says`: it tells
    what it has in use, which is all the rest."""
    dice, holdings, now_s = random.Random(1), Holdings(warm_s=60.0), 0.0
    for pid in range(lives):
        level = 200 * MIB + dice.uniform(-20, 20) * MIB
        age_s = 0.0
        while age_s < life_s:
            warming = min(0.0, age_s - 60.0) / 60.0 * 80 * MIB
            heap = level + warming + leak_per_hour * age_s / 3600.0 + dice.gauss(0.0, noise)
            in_use = int(heap) if says else None
            heap += kept(age_s)
            fds = 40 + int(descriptors_per_hour * age_s / 3600.0)
            held = Held(int(heap), int(heap), fds, age_s / 10, 1, in_use)
            holdings.note(now_s, "pd-0", pid, held)
            age_s, now_s = age_s + 5.0, now_s + 5.0
    return holdings


def test_a_warm_up_and_new_lives_are_no_growth():
    holdings = soak(0.0)
    (trend,) = holdings.trends()
    assert trend.lives == 8
    assert trend.heap.per_hour == pytest.approx(0.0, abs=6 * MIB)
    assert list(holdings.violations(0)) == []
    assert trend.cpu_s == pytest.approx(8 * 39.5)


def test_a_leak_is_seen_through_deaths_and_levels():
    holdings = soak(120 * MIB)
    (trend,) = holdings.trends()
    assert trend.heap.per_hour == pytest.approx(120 * MIB, rel=0.1)
    (violation,) = holdings.violations(0)
    assert violation.startswith("memory grows: pd-0")


def test_noise_alone_convicts_nobody():
    assert list(soak(0.0, noise=20 * MIB).violations(0)) == []


@pytest.mark.parametrize("leak", [0.0, 60 * MIB])
def test_what_the_allocator_keeps_for_the_next_step_is_no_growth_and_hides_none(leak):
    """It keeps more the longer a process lives, but lets go of it between two steps."""

    def kept(age_s: float) -> float:
        return 0.0 if age_s % 30.0 < 5.0 else 8 * MIB * age_s / 400.0

    holdings = soak(leak, kept=kept)
    (trend,) = holdings.trends()
    assert trend.heap.per_hour == pytest.approx(leak, abs=6 * MIB)
    assert len(list(holdings.violations(0))) == (1 if leak else 0)


def fragments(age_s: float) -> float:
    return 9 * MIB * age_s / 3600.0


def test_fragments_that_an_allocator_keeps_are_no_growth_of_what_is_in_use():
    holdings = soak(0.0, noise=0.1 * MIB, kept=fragments, says=True)
    (trend,) = holdings.trends()
    assert trend.in_use is not None and trend.in_use.per_hour == pytest.approx(0.0, abs=MIB)
    assert trend.heap.per_hour == pytest.approx(9 * MIB, abs=MIB)
    assert "in use" in trend.line()
    assert list(holdings.violations(0)) == []


def test_a_leak_too_small_for_the_heap_is_seen_in_what_is_in_use():
    leak = 10 * MIB
    assert list(soak(leak, noise=0.1 * MIB, says=False).violations(0)) == []
    (violation,) = soak(leak, noise=0.1 * MIB, says=True).violations(0)
    assert violation.startswith("memory grows: pd-0")


def test_two_looks_at_what_is_in_use_are_no_line():
    """A process that was stopped, or that did not answer, between the two."""
    holdings = Holdings(warm_s=60.0)
    for at_s in range(0, 600, 5):
        in_use = {200: 50 * MIB, 590: 60 * MIB}.get(at_s)
        holdings.note(at_s, "pd-0", 1, Held(200 * MIB, 200 * MIB, 40, 1.0, 1, in_use))
    (trend,) = holdings.trends()
    assert trend.in_use is not None and trend.in_use.per_hour is None
    assert (trend.in_use.first, trend.in_use.last) == (50 * MIB, 60 * MIB)
    assert list(holdings.violations(0)) == []


def test_short_lives_give_no_verdict_on_memory():
    holdings = soak(900 * MIB, lives=20, life_s=250.0)
    (trend,) = holdings.trends()
    assert trend.heap.per_hour is None and "too short" in trend.line()
    assert list(holdings.violations(0)) == []


def test_descriptors_may_grow_by_connections_only():
    holdings = soak(0.0, descriptors_per_hour=300.0)
    assert list(holdings.violations(30)) == []
    assert all("descriptors of pd-0 grew" in each for each in holdings.violations(0))
    assert len(list(holdings.violations(0))) == 8
