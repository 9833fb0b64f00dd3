"""Judging whether a schedule was followed, on made-up samples."""

from __future__ import annotations

from harness.links.follow import _judge
from harness.links.shape import LinkShape, Shape, TimedShape


def judged(rate_bps: float, carried_bps: float, down: bool = False) -> bool | None:
    shape = Shape(rate_bps, down=down)
    samples = [(index / 10, int(carried_bps / 8 * index / 10)) for index in range(100)]
    return _judge(TimedShape(2.0, LinkShape(shape, shape)), 6.0, 3.0, samples).ok


def test_a_step_is_followed_within_its_bounds() -> None:
    assert judged(100e6, 99e6) is True
    assert judged(100e6, 80e6) is False
    assert judged(100e6, 110e6) is False


def test_an_outage_carries_nothing() -> None:
    assert judged(100e6, 0.0, down=True) is True
    assert judged(100e6, 50e6, down=True) is False


def test_a_step_too_short_to_settle_is_not_judged() -> None:
    shape = Shape(100e6)
    finding = _judge(TimedShape(2.0, LinkShape(shape, shape)), 2.5, 3.0, [(2.2, 0), (2.4, 10)])
    assert (finding.achieved, finding.ok) == ("too short to settle", None)
