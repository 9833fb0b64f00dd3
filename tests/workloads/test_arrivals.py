from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from workloads.arrivals import (
    ExponentialRamp,
    LinearRamp,
    Steady,
    Steps,
    constant_process,
    exactly,
    gamma_process,
    on_off,
    scheduled,
)
from workloads.errors import InputError


def times(process, shape, n):
    return np.fromiter(islice(scheduled(process, shape), n), float)


def test_constant_arrivals_have_gaps_without_variation_and_do_not_drift():
    found = times(constant_process(), Steady(200), 10_000)
    assert found[0] == 0 and found[9_999] == pytest.approx(49.995, abs=1e-12)
    assert np.diff(found).std() < 1e-12


def test_poisson_gaps_are_exponential():
    found = times(gamma_process(np.random.default_rng(5)), Steady(100), 6000)
    gaps = np.diff(found)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    assert stats.kstest(gaps, "expon", args=(0, 0.01)).pvalue > 0.05
    assert (found % 1 == 0).sum() == 0
    assert found[-1] != 60.0


@pytest.mark.parametrize(("burstiness", "cv"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_gamma_gaps(burstiness, cv):
    gaps = np.diff(times(gamma_process(np.random.default_rng(1), burstiness), Steady(10), 50_000))
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)
    assert stats.kstest(gaps, "gamma", args=(burstiness, 0, 0.1 / burstiness)).pvalue > 0.01


def test_exact_rate_only_when_asked():
    free = list(islice(scheduled(gamma_process(np.random.default_rng(2)), Steady(10)), 601))
    assert not np.isclose(free[600], 60.0)
    exact = exactly(scheduled(gamma_process(np.random.default_rng(2)), Steady(10)), 600, 10)
    assert len(exact) == 600 and exact[-1] < 60
    assert np.allclose(np.array(exact) / exact[0], np.array(free[:600]) / free[0])
    assert exactly(scheduled(constant_process(), Steady(4)), 3, 2) == [0.0, 0.5, 1.0]


def test_ramps_reach_their_rates():
    linear = times(constant_process(), LinearRamp(0, 10, 5), 100)
    assert linear[25] == pytest.approx(5.0)
    assert linear[35] == pytest.approx(6.0)
    assert linear[1] == pytest.approx(1.0)
    exponential = ExponentialRamp(1, 8, 3)
    assert exponential.rate(1) == pytest.approx(2)
    assert exponential.time_s(7 / np.log(2)) == pytest.approx(3)
    assert exponential.time_s(7 / np.log(2) + 8) == pytest.approx(4)


def test_on_off_is_silent_when_off_and_keeps_the_mean():
    found = times(gamma_process(np.random.default_rng(0)), on_off(2.0, 10, 30), 20_000)
    assert ((found % 40) <= 10 + 1e-9).all()
    assert 20_000 / found[-1] == pytest.approx(2.0, rel=0.03)


SHAPES = st.one_of(
    st.builds(Steady, st.floats(0.1, 100)),
    st.builds(LinearRamp, st.floats(0, 50), st.floats(0.1, 50), st.floats(0.5, 100)),
    st.builds(ExponentialRamp, st.floats(0.1, 50), st.floats(0.1, 50), st.floats(0.5, 100)),
    st.builds(
        lambda first, rest: Steps((first, *rest)),
        st.tuples(st.floats(0.5, 20), st.floats(0.1, 20)),
        st.lists(
            st.tuples(st.floats(0.5, 20), st.one_of(st.just(0.0), st.floats(0.1, 20))), max_size=4
        ),
    ),
)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, count=st.floats(0.01, 500))
def test_a_shape_inverts_the_integral_of_its_rate(shape, count):
    until = shape.time_s(count)
    grid = np.linspace(0, until, 20_001)
    middle = (grid[1:] + grid[:-1]) / 2
    area = sum(shape.rate(t) for t in middle.tolist()) * (grid[1] - grid[0])
    assert area == pytest.approx(count, rel=0.02, abs=0.1)
    assert shape.time_s(count * 1.01) > until


@pytest.mark.parametrize(
    "make",
    [
        lambda: Steady(0),
        lambda: LinearRamp(1, 0, 1),
        lambda: ExponentialRamp(0, 1, 1),
        lambda: Steps(()),
        lambda: Steps(((1.0, 0.0),)),
        lambda: next(gamma_process(np.random.default_rng(0), 0)),
    ],
)
def test_impossible_rates_are_refused(make):
    with pytest.raises(InputError, match="needs"):
        make()
