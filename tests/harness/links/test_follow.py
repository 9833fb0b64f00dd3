"""Judging whether a schedule was followed, on made-up samples; and a short one for real."""

from __future__ import annotations

import pytest

from harness.links.caches import Load
from harness.links.factory import shaped_link
from harness.links.follow import RESUME_S, Sample, Segment, exactly_once, follow, judge, segments
from harness.links.spec import parse_link
from results.rows import LinkRow


def judged(rate_bps: float, carried_bps: float) -> bool | None:
    samples = [Sample(index / 10, int(carried_bps / 8 * index / 10)) for index in range(100)]
    return judge(Segment(2.0, 6.0, 3.0, rate_bps, down=False), samples).ok


def test_a_step_is_followed_within_its_bounds() -> None:
    assert judged(100e6, 99e6) is True
    assert judged(100e6, 96e6) is False
    assert judged(100e6, 104e6) is False


@pytest.mark.parametrize(
    ("sent_after", "resumed_s", "ok"),
    [(0, 1.0, True), (1, 1.0, False), (0, RESUME_S + 1.0, False)],
)
def test_an_outage_carries_nothing_and_ends(sent_after: int, resumed_s: float, ok: bool) -> None:
    samples = [
        Sample(at / 10, 1000 + sent_after * (at > 45) + 500 * (at / 10 > 6.0 + resumed_s))
        for at in range(200)
    ]
    assert judge(Segment(2.0, 6.0, 2.5, 0.0, down=True), samples).ok is ok


def test_a_step_too_short_to_settle_is_not_judged() -> None:
    finding = judge(Segment(2.0, 2.5, 3.0, 1e8, down=False), [Sample(2.2, 0), Sample(2.4, 10)])
    assert (finding.achieved, finding.ok) == ("too short to settle", None)


def test_segments_settle_longer_after_an_outage_and_on_a_long_way() -> None:
    spec = parse_link(
        {
            "rate_gbps": 1,
            "schedule": [
                {"at_s": 10, "rtt_ms": 40},
                {"at_s": 20, "down": True},
                {"at_s": 30, "down": False, "rtt_ms": 0},
                {"at_s": 90, "rate_gbps": 2},
            ],
        }
    )
    plan = segments(spec.timeline(), until_s=50.0)
    assert [(each.begin_s, each.end_s, each.down) for each in plan] == [
        (0.0, 10.0, False),
        (10.0, 20.0, False),
        (20.0, 30.0, True),
        (30.0, 50.0, False),
    ]
    assert [each.settled_s - each.begin_s for each in plan] == [6.0, 5.0, 0.5, 6.0]


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"caches": 9}, False),
        ({"highest": 10}, False),
        ({"doubled": 1}, False),
        ({"damaged": 1}, False),
    ],
)
def test_a_cache_lost_doubled_or_damaged_is_found(change: dict[str, int], ok: bool) -> None:
    sent = {"committed": 10, "late": 0, "failed": 3, "unfinished": 0}
    taken = {"caches": 10, "highest": 9, "doubled": 0, "damaged": 0, "aborted": 2, **change}
    assert exactly_once(sent, taken).ok is ok


async def test_caches_cross_once_through_steps_and_an_outage() -> None:
    """What the link carries when is a timing; that nothing is lost or doubled is not."""
    rows: list[LinkRow] = []
    table = {
        "backend": "relay",
        "rate_gbps": 0.04,
        "rtt_ms": 2,
        "schedule": [
            {"at_s": 1.0, "rate_gbps": 0.08},
            {"at_s": 2.0, "down": True},
            {"at_s": 4.5, "down": False},
        ],
    }
    async with shaped_link(parse_link(table, "test")) as link:
        load = Load(layers=4, report_s=0.25)
        followed = await follow(link, 7.0, load, rows.append)
    findings = {finding.name: finding for finding in followed.findings}
    assert findings["caches"].ok, findings["caches"]
    assert findings["2 to 4.5 s"].value == 0.0, findings["2 to 4.5 s"]
    assert followed.sent["failed"] > 0
    assert followed.sent["committed"] > 0
    assert {row.rate_bps for row in rows} == {0.0, 0.04e9, 0.08e9}
    assert rows[-1].sent_bytes > 0
    assert any(row.connections and row.goodput_bps for row in rows)
