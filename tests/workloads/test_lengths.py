import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.errors import InputError
from workloads.lengths import STRATA, Empirical, Fixed, TruncatedLogNormal, uniforms

PAPER = TruncatedLogNormal(9.90, 1.00, 128, 131_072)


def test_paper_workload_has_its_published_moments():
    assert PAPER.mean() == pytest.approx(27_486, abs=0.5)
    assert PAPER.mean_above(19_400) == pytest.approx(45_046, abs=0.5)
    assert PAPER.mean_below(19_400) == pytest.approx(10_224, abs=0.5)
    assert PAPER.tail(19_400) == pytest.approx(0.4957, abs=5e-5)
    assert PAPER.quantile(0.9) == pytest.approx(62_410, abs=0.5)


def test_expect_is_accurate_for_polynomials_kinks_and_intervals():
    assert PAPER.expect(lambda x: x) == pytest.approx(27_485.684434543, rel=1e-9)
    assert PAPER.expect(lambda x: x, low=19_400) == pytest.approx(45_045.640483327, rel=1e-9)
    assert PAPER.expect(lambda x: x, high=19_400) == pytest.approx(10_223.572947774, rel=1e-9)
    second = TruncatedLogNormal(9.90, 1.00, 128, 131_072).expect(lambda x: x**2)
    grid = np.linspace(math.log(128), math.log(131_072), 400_001)
    density = np.exp(-((grid - 9.90) ** 2) / 2)
    by_trapezoid = np.trapezoid(density * np.exp(2 * grid), grid) / np.trapezoid(density, grid)
    assert second == pytest.approx(by_trapezoid, rel=1e-7)
    capped = PAPER.cdf(20_000) * PAPER.mean_below(20_000) + PAPER.tail(20_000) * 20_000
    assert PAPER.expect(lambda x: np.minimum(x, 20_000.0)) == pytest.approx(capped, rel=1e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sigma", [1e-3, 0.01, 1.0, 5.0])
@pytest.mark.parametrize("max_tokens", [131_072, 2**31 - 1])
def test_narrow_and_wide_distributions_keep_their_mean_in_quadrature(sigma, max_tokens):
    lengths = TruncatedLogNormal(9.90, sigma, 1, max_tokens)
    assert lengths.expect(lambda x: x) == pytest.approx(lengths.mean(), rel=1e-6)
    t = lengths.quantile(0.3)
    assert lengths.expect(lambda x: x, low=t) == pytest.approx(lengths.mean_above(t), rel=1e-6)
    assert lengths.expect(lambda x: x, high=t) == pytest.approx(lengths.mean_below(t), rel=1e-6)
    assert lengths.sample(np.random.default_rng(1), 1000).min() >= 1


def test_samples_follow_the_distribution():
    lengths = PAPER.sample(np.random.default_rng(1), 200_000)
    assert lengths.dtype == np.int64
    assert lengths.min() >= 128 and lengths.max() <= 131_072
    assert lengths.mean() == pytest.approx(27_486, rel=0.01)
    assert (lengths > 19_400).mean() == pytest.approx(0.4957, abs=0.005)


def test_stratified_draws_cover_each_stratum_once_a_block():
    draws = uniforms(np.random.default_rng(3), 4 * STRATA, stratified=True)
    for block in draws.reshape(4, STRATA):
        assert sorted((block * STRATA).astype(int)) == list(range(STRATA))
    assert not np.all(np.diff(draws[:STRATA]) > 0)
    lengths = PAPER.sample(np.random.default_rng(3), 6400, stratified=True)
    assert lengths.mean() == pytest.approx(27_486, rel=0.005)


@settings(max_examples=60, deadline=None)
@given(
    mu=st.floats(5, 11),
    sigma=st.floats(0.2, 2),
    low=st.integers(1, 500),
    span=st.integers(100, 200_000),
    t=st.floats(1, 300_000),
)
def test_conditional_means_add_up(mu, sigma, low, span, t):
    try:
        lengths = TruncatedLogNormal(mu, sigma, low, low + span)
    except InputError:
        return
    p = lengths.tail(t)
    assert lengths.cdf(t) + p == pytest.approx(1)
    total = 0.0
    if p > 1e-9:
        assert lengths.mean_above(t) >= min(t, low + span) * (1 - 1e-9)
        total += p * lengths.mean_above(t)
    if p < 1 - 1e-9:
        total += (1 - p) * lengths.mean_below(t)
    if 1e-9 < p < 1 - 1e-9:
        assert total == pytest.approx(lengths.mean(), rel=1e-6)
    assert lengths.cdf(lengths.quantile(0.37)) == pytest.approx(0.37, abs=1e-9)


def test_empirical_counts_values_and_weights():
    seen = Empirical([10, 30, 20, 20])
    assert (seen.mean(), seen.cdf(20), seen.tail(20)) == (20, 0.75, 0.25)
    assert (seen.mean_above(10), seen.mean_below(19)) == (pytest.approx(70 / 3), 10)
    assert [seen.quantile(q) for q in (0, 0.25, 0.5, 0.75, 0.76, 1)] == [10, 10, 20, 20, 30, 30]
    assert seen.expect(lambda x: x**2, low=10) == pytest.approx(1700 / 3)
    assert math.isnan(seen.mean_above(30)) and math.isnan(seen.mean_below(9))
    weighted = Empirical([1, 2], [3, 1])
    assert weighted.mean() == 1.25
    draws = weighted.sample(np.random.default_rng(0), 20_000)
    assert draws.mean() == pytest.approx(1.25, abs=0.01)
    assert seen.tail(30) == 0


def test_empirical_of_many_samples_agrees_with_the_closed_form():
    seen = Empirical(PAPER.sample(np.random.default_rng(2), 64_000, stratified=True))
    assert seen.mean_above(19_400) == pytest.approx(45_046, rel=0.005)
    assert seen.tail(19_400) == pytest.approx(0.4957, abs=0.002)


def test_fixed_is_one_length():
    fixed = Fixed(512)
    assert (fixed.mean(), fixed.quantile(0.9), fixed.tail(511), fixed.tail(512)) == (512, 512, 1, 0)
    assert fixed.sample(np.random.default_rng(0), 3).tolist() == [512, 512, 512]


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: TruncatedLogNormal(sigma=0), "sigma"),
        (lambda: TruncatedLogNormal(sigma=1e-300), "sigma: .*0.001 to 5"),
        (lambda: TruncatedLogNormal(sigma=1e9), "sigma"),
        (lambda: TruncatedLogNormal(min_tokens=10, max_tokens=10), "min_tokens"),
        (lambda: TruncatedLogNormal(mu=1000), "mu"),
        (lambda: Empirical([]), "lengths"),
        (lambda: Empirical([1], [0]), "weights"),
        (lambda: Fixed(0), "tokens"),
        (lambda: Fixed(1).quantile(1.5), "quantile"),
    ],
)
def test_impossible_values_are_named(make, place):
    with pytest.raises(InputError, match=place) as caught:
        make()
    assert caught.value.exit_code == 2
