"""The netem backend on a kernel that has netem (`make test-netem` finds or boots one)."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from harness.links.achieved import mathis_bps, prober
from harness.links.netem import disagreement, limit_packets, netem_words
from harness.links.shape import GOODPUT_SHARE, LossModel, Shape
from harness.links.state import command

netem = pytest.mark.netem


def qdisc(link, index: int) -> dict:
    words = ["qdisc", "show", "dev", link._interface(index), "root"]
    return json.loads(command("tc", "-j", "-n", link._namespace(index), *words))[0]["options"]


def test_words_give_every_parameter() -> None:
    shape = Shape(1e9, delay_s=0.001, jitter_s=0.0002, queue_bytes=151_400)
    assert " ".join(netem_words(shape)) == (
        "limit 200 delay 1000us 200us loss random 0% rate 1000000000bit"
    )
    bursty = Shape(1e8, queue_bytes=1514, loss=LossModel(0.0, 0.5, 0.01, 0.25))
    assert " ".join(netem_words(bursty)) == (
        "limit 2 delay 0us loss gemodel 1% 25% 50% 0% rate 100000000bit"
    )
    down = Shape(1e8, queue_bytes=1514, down=True)
    assert "loss random 100%" in " ".join(netem_words(down))


def test_limit_counts_the_delay_line_and_the_queue() -> None:
    # 1 Gbit/s x 10 ms = 1.25 MB on the way, and 1.25 MB queued: 2.5 MB in 1514-byte frames.
    assert limit_packets(Shape(1e9, delay_s=0.010, queue_bytes=1_250_000)) == 1652


def test_read_back_is_compared_with_what_was_asked() -> None:
    shape = Shape(1e9, delay_s=0.002, queue_bytes=1_000_000)
    options = {
        "limit": limit_packets(shape),
        "delay": {"delay": 0.002, "jitter": 0},
        "rate": {"rate": 125_000_000},
    }
    assert disagreement(options, shape) == ""
    assert "rate" in disagreement({**options, "rate": {"rate": 1}}, shape)
    assert "delay" in disagreement({**options, "delay": {"delay": 0.02}}, shape)
    assert "limit" in disagreement({**options, "limit": 1000}, shape)


@netem
def test_the_kernel_is_the_one_that_was_promised(offers) -> None:
    if not offers.available("netem"):
        assert "NETEM_REQUIRED" not in os.environ, offers.by_backend["netem"].reason
        pytest.skip(offers.by_backend["netem"].reason)


@netem
async def test_qdiscs_read_back_as_specified(open_backend) -> None:
    link = await open_backend(
        "netem",
        rate_gbps=0.5,
        rtt_ms=10,
        jitter_ms=0.5,
        reverse={"rate_gbps": 0.1, "delay_ms": 3},
        loss={"model": "independent", "probability": 0.01},
    )
    there, back = qdisc(link, 0), qdisc(link, 1)
    assert (there["rate"]["rate"], back["rate"]["rate"]) == (62_500_000, 12_500_000)
    assert there["delay"]["delay"] == pytest.approx(0.007, abs=2e-5)
    assert there["delay"]["jitter"] == pytest.approx(0.0005, abs=2e-5)
    assert back["delay"]["delay"] == pytest.approx(0.003, abs=2e-5)
    assert there["loss-random"]["loss"] == pytest.approx(0.01, rel=0.01)


@netem
async def test_packets_are_true(open_backend) -> None:
    """Local TCP hands netem single segments, or it would drop and count bundles of them."""
    link = await open_backend("netem", rate_gbps=0.5, rtt_ms=2)
    async with prober(link, "pd") as end:
        before = link.read_counters()[0]
        await end.drive({"rate_s": 1.0, "warm_up_s": 0.3})
        after = link.read_counters()[0]
    mean = (after.sent_bytes - before.sent_bytes) / (after.sent_packets - before.sent_packets)
    assert 1000 < mean <= 1514


@netem
async def test_a_change_replaces_every_parameter(open_backend) -> None:
    link = await open_backend(
        "netem",
        rate_gbps=0.5,
        rtt_ms=10,
        jitter_ms=1,
        loss={"model": "gilbert-elliott", "good_to_bad": 0.1, "bad_to_good": 0.5},
        schedule=[
            {"at_s": 0.2, "down": True},
            {
                "at_s": 0.4,
                "down": False,
                "rate_gbps": 0.05,
                "rtt_ms": 4,
                "loss": {"model": "independent", "probability": 0.0},
            },
        ],
    )
    link.start_schedule()
    last = link.spec.timeline()[-1].shape
    for _ in range(200):
        await asyncio.sleep(0.1)
        # The state file is written once the kernel has taken both directions.
        if link.state.shape == last.to_json():
            break
    options = qdisc(link, 0)
    assert options["rate"]["rate"] == 6_250_000
    assert options["delay"]["delay"] == pytest.approx(0.002, abs=2e-5)
    assert options.get("loss-random", {}).get("loss", 0) == 0
    assert "loss-gemodel" not in options
    async with prober(link, "pd") as end:
        goodput_bps = (await end.drive({"rate_s": 1.0, "warm_up_s": 0.5}))["goodput_bps"]
    assert 0.3 * 0.05e9 < goodput_bps < 0.05e9


@netem
async def test_counters_go_on_over_a_change_of_shape(open_backend) -> None:
    link = await open_backend(
        "netem", rate_gbps=0.2, schedule=[{"at_s": 0, "down": True}, {"at_s": 9, "rate_gbps": 1}]
    )
    async with prober(link, "pd") as end:
        await link.apply(link.spec.initial())
        await end.drive({"rate_s": 0.5, "warm_up_s": 0.1})
        before = link.read_counters()[0].sent_bytes
        await link.apply(link.spec.timeline()[0].shape)
        await link.apply(link.spec.initial())
        after = link.read_counters()[0].sent_bytes
    assert before > 1_000_000
    assert after >= before


@netem
async def test_round_trips_take_the_delay(open_backend) -> None:
    link = await open_backend("netem", rate_gbps=1.0, rtt_ms=30)
    async with prober(link, "pd") as end:
        rtt_s = (await end.drive({"rtt_count": 30}))["rtt_s"]
    assert 0.0299 <= rtt_s["min"] < 0.045


@netem
@pytest.mark.parametrize(
    "loss",
    [
        {"model": "independent", "probability": 0.01},
        {"model": "gilbert-elliott", "good_to_bad": 0.01, "bad_to_good": 0.24, "loss_bad": 0.25},
    ],
)
async def test_loss_has_the_stated_mean(open_backend, loss: dict) -> None:
    link = await open_backend("netem", rate_gbps=0.5, rtt_ms=2, loss=loss, queue_ms=100)
    async with prober(link, "pd") as end:
        share = (await end.drive({"loss_packets": 15_000, "loss_bps": 30e6}))["loss"]
    assert 0.005 < share < 0.016


@netem
async def test_a_full_queue_drops_and_bounds_the_delay(open_backend) -> None:
    link = await open_backend("netem", rate_gbps=0.05, queue_ms=20)
    async with prober(link, "pd") as end:
        loading = asyncio.create_task(
            end.drive({"rate_s": 2.0, "warm_up_s": 0.5, "connections": 4, "congestion": "cubic"})
        )
        await asyncio.sleep(1.5)
        during = await end.drive({"rtt_count": 20})
        await loading
    # Full-size frames fill at most 20 ms; small ones take less. Without the limit: seconds.
    assert during["rtt_s"]["median"] < 0.06
    assert link.read_counters()[0].dropped_packets > 0


@netem
async def test_goodput_is_the_rate_less_headers(open_backend) -> None:
    link = await open_backend("netem", rate_gbps=0.1, rtt_ms=2)
    async with prober(link, "pd") as end:
        goodput_bps = (await end.drive({"rate_s": 2.0, "warm_up_s": 0.5}))["goodput_bps"]
    assert goodput_bps < 1.02 * GOODPUT_SHARE * 0.1e9
    assert goodput_bps > 0.3 * GOODPUT_SHARE * 0.1e9


@netem
async def test_loss_bounds_cubic_as_mathis_says(open_backend) -> None:
    link = await open_backend(
        "netem", rate_gbps=1.0, rtt_ms=20, loss={"model": "independent", "probability": 0.001}
    )
    async with prober(link, "pd") as end:
        goodput_bps = (await end.drive({"rate_s": 6.0, "warm_up_s": 2.0, "congestion": "cubic"}))[
            "goodput_bps"
        ]
    # Bundles of segments would give five times this bound and more.
    assert goodput_bps < 3 * mathis_bps(0.001, 0.020)
    assert goodput_bps > 0.2 * mathis_bps(0.001, 0.020)
