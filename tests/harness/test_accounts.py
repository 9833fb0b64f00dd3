"""Pools: least-first choice with changing costs, and accounting that follows what is observed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import ordering
from harness.accounts import PrefillPool
from native import require

try:
    ordering_in_c = require("harness._ordering")
except ImportError:
    ordering_in_c = None


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ordering, id="python"),
        pytest.param(
            ordering_in_c,
            id="c",
            marks=pytest.mark.skipif(
                ordering_in_c is None, reason="harness._ordering is not built"
            ),
        ),
    ],
)
def twin(request):
    return request.param


class Work:
    def prefill_s(self, input_tokens: int, cached_tokens: int = 0) -> float:
        return 1.0


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans()), max_size=60),
)
def test_least_equals_a_scan(twin, n: int, operations: list[tuple[int, int, bool]]) -> None:
    order = twin.LeastFirst()
    for _ in range(n):
        order.add()
    costs, usable = [0.0] * n, [True] * n
    for key, cost, use in operations:
        key %= n
        order.update(key, float(cost))
        order.set_usable(key, use)
        costs[key], usable[key] = float(cost), use
        candidates = [(costs[i], i) for i in range(n) if usable[i]]
        assert order.least() == (min(candidates)[1] if candidates else -1)
        assert order.n_usable() == len(candidates)
    assert len(order) == n
    assert [order.cost(i) for i in range(n)] == costs
    assert [order.usable(i) for i in range(n)] == usable


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 39), st.integers(-3, 3), st.booleans()), max_size=60),
)
def test_fewest_equals_a_scan(twin, n: int, operations: list[tuple[int, int, bool]]) -> None:
    order = twin.FewestFirst()
    for _ in range(n):
        order.add()
    counts, usable = [0] * n, [True] * n
    for key, by, use in operations:
        key %= n
        order.change(key, by)
        order.set_usable(key, use)
        counts[key] += by
        usable[key] = use
        candidates = [(counts[i], i) for i in range(n) if usable[i]]
        assert order.least() == (min(candidates)[1] if candidates else -1)
        assert order.n_usable() == len(candidates)
        assert [order.usable(i) for i in range(n)] == usable
    assert len(order) == n
    assert [order.count(i) for i in range(n)] == counts


def test_an_order_refuses_what_is_no_key_and_no_number(twin) -> None:
    least, fewest = twin.LeastFirst(), twin.FewestFirst()
    assert least.least() == fewest.least() == -1
    least.add()
    fewest.add()
    for no_key in (1, 1 << 80):
        for refused in (
            lambda key=no_key: least.update(key, 2.0),
            lambda key=no_key: least.cost(key),
            lambda key=no_key: fewest.change(key, 2),
            lambda key=no_key: fewest.count(key),
        ):
            with pytest.raises(IndexError):
                refused()
    with pytest.raises(TypeError):
        least.cost("0")
    with pytest.raises(TypeError):
        least.update(0)
    with pytest.raises(TypeError):
        fewest.change(0, "one")
    assert least.cost(0) == fewest.count(0) == 0


def test_work_queues_up_and_an_empty_queue_forgets_wrong_predictions() -> None:
    pool = PrefillPool("pd", Work())
    key = pool.add("pd-0")
    pool.assign(key, 10.0, 2.0)
    pool.assign(key, 10.5, 2.0)
    assert pool.wait_s(key, 11.0) == 3.0
    pool.settle(key, 13.0, 2.0, 3.0)
    assert pool.wait_s(key, 13.0) == 2.0
    pool.settle(key, 13.5, 2.0, 0.5)
    assert pool.wait_s(key, 13.5) == 0.0
    assert pool.busy_s == [3.5]
