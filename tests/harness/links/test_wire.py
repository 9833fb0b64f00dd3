"""The emulator's arithmetic: rate, queue, delay and jitter on a clock of the test's own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.links.shape import LossModel, LossProcess, Shape
from harness.links.wire import Wire


def test_departures_are_spaced_by_the_rate_and_shifted_by_the_delay() -> None:
    wire: Wire[str] = Wire(Shape(rate_bps=8_000, delay_s=0.5), seed=1)
    wire.offer(0.0, 1000, 1, "a")
    wire.offer(0.0, 500, 1, "b")
    assert wire.take_due(1.499) == []
    assert wire.take_due(1.5) == ["a"]
    assert wire.next_s() == 2.0
    assert wire.take_due(2.0) == ["b"]
    assert (wire.sent_bytes, wire.sent_packets, wire.backlog_bytes) == (1500, 2, 0)
    assert wire.next_s() is None


def test_a_late_wake_up_does_not_slow_the_link() -> None:
    wire: Wire[int] = Wire(Shape(rate_bps=8_000), seed=1)
    for index in range(4):
        wire.offer(0.0, 1000, 1, index)
    assert wire.take_due(3.9) == [0, 1, 2]
    assert wire.take_due(4.0) == [3]


def test_room_leaves_out_the_item_on_the_wire() -> None:
    wire: Wire[int] = Wire(Shape(rate_bps=8_000, queue_bytes=2000), seed=1)
    wire.offer(0.0, 1500, 1, 0)
    assert wire.room_bytes() == 2000
    wire.offer(0.0, 1500, 1, 1)
    assert wire.room_bytes() == 500


def test_a_rate_step_applies_to_what_is_already_queued() -> None:
    wire: Wire[int] = Wire(Shape(rate_bps=8_000), seed=1)
    wire.offer(0.0, 1000, 1, 0)
    wire.offer(0.0, 1000, 1, 1)
    wire.reshape(0.5, Shape(rate_bps=16_000))
    assert wire.take_due(0.75) == [0]
    assert wire.take_due(1.25) == [1]


@given(
    sizes=st.lists(st.integers(64, 9000), min_size=1, max_size=60),
    jitter_ms=st.integers(0, 9),
    gaps_us=st.lists(st.integers(0, 3000), min_size=60, max_size=60),
)
def test_order_rate_and_bytes_hold_for_any_traffic(
    sizes: list[int], jitter_ms: int, gaps_us: list[int]
) -> None:
    shape = Shape(rate_bps=8e6, delay_s=0.01, jitter_s=jitter_ms / 1e3)
    wire: Wire[int] = Wire(shape, seed=3)
    now_s, arrivals = 0.0, []
    for index, size in enumerate(sizes):
        now_s += gaps_us[index] / 1e6
        wire.offer(now_s, size, 1, index)
        arrivals.append(now_s)
    seen: list[int] = []
    while (due_s := wire.next_s()) is not None:
        due = wire.take_due(max(due_s, now_s))
        now_s = max(due_s, now_s)
        for item in due:
            # Never earlier than its own serialisation and least delay allow.
            assert now_s >= arrivals[item] + sizes[item] * 8 / 8e6 + 0.01 - jitter_ms / 1e3 - 1e-9
        seen += due
    assert list(range(len(sizes))) == seen
    assert sum(sizes) == wire.sent_bytes
    assert wire.backlog_bytes == 0


def test_loss_processes_have_the_stated_mean() -> None:
    independent = LossProcess(LossModel(loss_good=0.01), seed=5)
    assert pytest.approx(len(independent.lost(100_000)) / 100_000, rel=0.15) == 0.01
    bursty = LossModel(loss_bad=0.5, good_to_bad=0.01, bad_to_good=0.24)
    assert pytest.approx(bursty.mean) == 0.02
    lost = LossProcess(bursty, seed=5).lost(200_000)
    assert pytest.approx(len(lost) / 200_000, rel=0.15) == 0.02
    following = sum(later - earlier == 1 for earlier, later in pairwise(lost))
    # Inside a burst the next packet is lost with 0.76 x 0.5 = 0.38, alone with 0.02.
    assert following / len(lost) > 0.3


def test_no_loss_draws_nothing() -> None:
    assert LossProcess(LossModel(), seed=1).lost(1000) == []
