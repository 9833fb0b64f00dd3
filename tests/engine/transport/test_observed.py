"""Samples of many connections become what they say of the link that they share."""

from __future__ import annotations

from typing import Any

import pytest

from engine.transport.observed import Observed, observe


def row(plane: str = "a", port: int = 1, **fields: Any) -> dict[str, Any]:
    values = {
        "seconds": 0.025,
        "connections": 2,
        "goodput_bps": 8e6,
        "rtt_s": 0.004,
        "min_rtt_s": 0.002,
        "retransmits": 0,
        "loss": 0.0,
        "busy": 1.0,
        "rwnd_limited": 0.0,
        "sndbuf_limited": 0.0,
        "backlog_bytes": 1000,
        "verdict": "busy",
    }
    return {"plane": plane, "host": "h", "port": port, **values, **fields}


def test_nothing_seen_is_a_free_link() -> None:
    assert observe([], 0.5) == Observed(verdict="free")


def test_rates_add_up_over_planes_and_average_over_time() -> None:
    rows = [row("a"), row("a", goodput_bps=16e6), row("b", port=2)]
    seen = observe(rows, 0.05)
    assert seen.goodput_bps == pytest.approx((8e6 + 16e6 + 8e6) / 2)
    assert seen.connections == 4
    assert seen.backlog_bytes == 2000


def test_two_planes_with_one_peer_are_two() -> None:
    assert observe([row("a"), row("b")], 0.05).connections == 4


def test_rtt_is_the_greatest_and_its_minimum_the_least() -> None:
    rows = [
        row(rtt_s=0.5, min_rtt_s=0.0),
        row(rtt_s=0.01),
        row(port=2, rtt_s=0.02, min_rtt_s=0.001),
    ]
    seen = observe(rows, 0.5)
    assert (seen.rtt_s, seen.min_rtt_s) == (0.02, 0.001)


def test_the_verdict_is_that_of_most_bytes() -> None:
    slow = row(port=2, goodput_bps=1e6, verdict="receiver-limited", rwnd_limited=0.9)
    seen = observe([row(verdict="saturated"), slow], 0.025)
    assert seen.verdict == "saturated"
    assert seen.rwnd_limited == pytest.approx(0.9 / 9)


def test_without_bytes_the_verdict_is_that_of_most_busy_time() -> None:
    rows = [
        row(goodput_bps=0.0, verdict="free", busy=0.1),
        row(goodput_bps=0.0, verdict="lossy", loss=1.0, retransmits=3),
    ]
    seen = observe(rows, 0.05)
    assert (seen.verdict, seen.loss, seen.retransmits) == ("lossy", 1.0, 3)


def test_loss_is_weighted_by_bytes() -> None:
    rows = [row(goodput_bps=7.2e6, loss=0.1), row(port=2, goodput_bps=9.2e6)]
    assert observe(rows, 0.025).loss == pytest.approx(0.8 / (7.2 + 0.8 + 9.2))
