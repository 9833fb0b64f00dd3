"""The search for the highest rate at an SLO, against servers of known capacity."""

from __future__ import annotations

import numpy as np
import pytest

from harness.load.search import Search, Trial, wilson


def found(capacity: float, search: Search, per_trial: int = 1000, seed: int = 1) -> Search:
    """Requests meet the SLO with 99.5 % below `capacity` and with half of that above."""
    rng = np.random.default_rng(seed)
    while (rate := search.next_rate()) is not None:
        share = 0.995 if rate <= capacity else 0.5
        search.record(Trial(rate, per_trial, int(rng.binomial(per_trial, share))))
    return search


@pytest.mark.parametrize("capacity", [0.4, 3.7, 10.0, 97.0, 1234.0])
def test_the_bracket_holds_the_capacity(capacity: float) -> None:
    search = found(capacity, Search(10.0, precision=0.02, max_trials=40))
    low, high = search.bracket
    assert low is not None and high is not None
    assert low <= capacity <= high <= 1.02 * low


def test_it_ends_by_trials_too() -> None:
    search = found(1e9, Search(1.0, max_trials=5))
    assert [each.rate for each in search.trials] == [1, 2, 4, 8, 16]
    assert search.bracket == (16, None)


def test_an_undecided_rate_is_repeated_and_counts_add_up() -> None:
    search = Search(10.0, share=0.95)
    for met in (19, 19):
        assert search.next_rate() == 10.0
        search.record(Trial(10.0, 20, met))
    # 38 of 40 still leaves 95 % within the interval; the third decides.
    assert search.next_rate() == 10.0
    search.record(Trial(10.0, 20, 20))
    assert search.highest_met == 10.0
    assert search.next_rate() == 20.0


def test_nothing_meets_it() -> None:
    search = found(0.0, Search(10.0, max_trials=50))
    assert search.highest_met is None
    assert search.bracket[1] is not None and search.bracket[1] < 0.05


def test_a_limited_client_bounds_the_search_and_three_end_it() -> None:
    search = Search(10.0, max_trials=50)
    search.record(Trial(search.next_rate() or 0.0, 1000, 1000))
    search.record(Trial(search.next_rate() or 0.0, 1000, 1000, limited=True))
    assert search.next_rate() == pytest.approx(200**0.5)
    for _ in range(2):
        search.record(Trial(search.next_rate() or 0.0, 1000, 1000, limited=True))
    assert search.next_rate() is None
    assert search.highest_met == 10.0


def test_wilson_against_published_values() -> None:
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 29 of 29."""
    for met, offered, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (29, 29, 0.8830, 1.0000),
    ):
        assert wilson(met, offered) == pytest.approx((low, high), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)
