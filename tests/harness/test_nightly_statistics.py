"""Gate and drift against noise like a shared machine's, seeded: what they find and what they leave.

The noise model follows CPU seconds of one piece of work repeated on two shared cores: heavy tails,
neighbouring samples alike, and now and then a sample that a neighbour slowed a lot.
"""

from __future__ import annotations

import numpy as np
import pytest

from results.drift import DriftRules, Shift, shifts
from results.figures import Better
from results.gate import GateRules, Outcome, judge, log_ratios, screen
from results.statistics import trimmed_pairs

#: Figures that a night judges.
FIGURES = 8
PAIRS, CONFIRM = 8, 16
RULES = GateRules()


def noise(rng: np.random.Generator, count: int) -> np.ndarray:
    """Log noise of `count` samples taken one after the other."""
    kicks = rng.standard_t(4, count) * 0.025 / 2**0.5 * (1 - 0.3**2) ** 0.5
    levels = np.zeros(count)
    level = 0.0
    for at, kick in enumerate(kicks):
        level = 0.3 * level + kick
        levels[at] = level
    slowed = (rng.random(count) < 0.03) * rng.uniform(0.05, 0.3, count)
    return levels + slowed


def pairs(rng: np.random.Generator, count: int, shift: float) -> list[float]:
    """Log ratios of alternating pairs, as the nightly takes them, with the candidate slower."""
    found = noise(rng, 2 * count).reshape(count, 2)
    found[1::2] = found[1::2, ::-1]
    base, candidate = np.exp(found[:, 0]), np.exp(found[:, 1] + shift)
    return log_ratios(list(base), list(candidate), Better.LOWER)


def night(rng: np.random.Generator, shift: float) -> tuple[bool, float]:
    """(regression found, ratio of the night) of one figure, by the nightly's two steps."""
    ratios = pairs(rng, PAIRS, shift)
    if screen(ratios, RULES):
        ratios += pairs(rng, CONFIRM, shift)
    found = judge(ratios, FIGURES, RULES)
    return found.outcome is Outcome.REGRESSION, float(np.exp(trimmed_pairs(ratios).shift))


def test_the_gate_finds_a_planted_slowdown_of_five_percent() -> None:
    rng = np.random.default_rng(1)
    found = [night(rng, np.log(1.05))[0] for _ in range(30)]
    assert all(sum(found[at : at + 10]) >= 9 for at in (0, 10, 20))


def test_drift_finds_a_planted_slowdown_of_five_percent_within_five_nights() -> None:
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(20):
        ratios = [night(rng, np.log(1.05) * (at >= 25))[1] for at in range(35)]
        told = shifts(ratios)
        after = [each for each in told if each.told >= 25]
        assert len(after) <= 1  # one alert for one shift
        found += bool(after) and after[0].told < 30
    assert found >= 18


def test_a_hundred_nights_of_noise_give_no_more_than_one_alarm() -> None:
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(FIGURES):
        nights = [night(rng, 0.0) for _ in range(100)]
        alarms += sum(regressed for regressed, _ in nights)
        alarms += len(shifts([ratio for _, ratio in nights]))
    assert alarms <= 1


LEVEL = [1.0, 1.003, 0.998, 1.001, 0.997, 1.002, 1.0, 0.999] * 3


def test_one_alert_for_a_level_shift_and_another_for_the_next() -> None:
    series = [*LEVEL, *(1.06 * value for value in LEVEL), *(1.12 * value for value in LEVEL)]
    found = shifts(series)
    assert [each.began for each in found] == [24, 48]
    assert [each.told for each in found] == [26, 50]
    assert found[0].change == pytest.approx(0.06, abs=0.005)
    assert found[1].change == pytest.approx(0.12 / 1.06 - 0.06 / 1.06, abs=0.005)


def test_a_known_shift_gives_no_alert() -> None:
    series = [*LEVEL, *(1.06 * value for value in LEVEL)]
    assert len(shifts(series)) == 1
    assert shifts(series, known=[24]) == []


def test_a_single_bad_night_and_a_short_history_give_no_alert() -> None:
    series = list(LEVEL)
    series[20] = 1.5
    assert shifts(series) == []
    assert shifts([1.0, 1.0, 2.0, 2.0, 2.0]) == []
    assert shifts([]) == []


def test_what_is_told_of_a_night_does_not_change_later() -> None:
    series = [*LEVEL, *(1.06 * value for value in LEVEL)]
    whole = shifts(series)
    assert isinstance(whole[0], Shift)
    for end in range(len(series)):
        assert shifts(series[:end]) == [each for each in whole if each.told < end]


def test_small_shifts_are_left_alone() -> None:
    series = [*LEVEL, *(1.02 * value for value in LEVEL)]
    assert shifts(series) == []
    assert shifts(series, DriftRules(least=0.01, z=4.0)) != []


def test_exact_figures() -> None:
    same = judge([0.0], 10, exact=True)
    assert same.outcome is Outcome.OK
    assert judge([np.log(1.03)], 10, exact=True).outcome is Outcome.REGRESSION
    assert judge([np.log(1.01)], 10, exact=True).outcome is Outcome.CHANGED
    assert judge([np.log(0.9)], 10, exact=True).outcome is Outcome.CHANGED


def test_too_few_pairs_are_not_judged() -> None:
    assert judge([0.2, 0.2, 0.2], 1).outcome is Outcome.UNJUDGED
    assert not screen([0.2, 0.2, 0.2])


def test_more_figures_need_stronger_evidence() -> None:
    ratios = [0.03, 0.06, 0.02, 0.07, 0.04, 0.05]
    few, many = judge(ratios, 1), judge(ratios, 1000)
    assert (few.outcome, many.outcome) == (Outcome.REGRESSION, Outcome.OK)
    assert few.p == many.p


def test_higher_is_better() -> None:
    assert log_ratios([100.0], [90.0], Better.HIGHER)[0] == pytest.approx(np.log(100 / 90))
    assert log_ratios([100.0], [90.0], Better.LOWER)[0] == pytest.approx(np.log(0.9))
