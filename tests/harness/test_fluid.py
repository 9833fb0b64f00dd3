"""The modelled link: shares against closed forms, bytes conserved, max-min at every moment."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import DeadlockError, run
from harness.links.fair_share import water_level
from harness.links.flow import Phase
from harness.links.fluid import FlowLimits, FluidLink, LinkState

MB = 1e6


class Owner:
    """Notes how its flow ended."""

    def __init__(self):
        self.delivered_s = None
        self.failed = None

    def flow_delivered(self, flow):
        self.delivered_s = asyncio.get_running_loop().time()

    def flow_failed(self, flow, why):
        self.failed = why


def link_of(rate_bytes, delay_s=0.0, rtt_s=0.0, loss=0.0, later=(), **options):
    first = LinkState(0.0, rate_bytes * 8, delay_s, rtt_s, loss)
    return FluidLink("a", "b", [first, *later], **options)


def send(link, n_bytes):
    """A flow whose bytes are all there now."""
    owner = Owner()
    flow = link.open(n_bytes, owner)
    now_s = asyncio.get_running_loop().time()
    link.produce(flow, now_s, now_s, 0.0, n_bytes)
    return flow, owner


# The water level -------------------------------------------------------------------------------


def test_water_level_literals():
    assert water_level(10.0, [2.0, 2.0]) == math.inf
    assert water_level(10.0, [10.0, 10.0]) == 5.0
    assert water_level(10.0, [1.0, 8.0, 8.0]) == 4.5
    assert water_level(10.0, [1.0, 2.0, 8.0]) == 7.0
    assert water_level(0.0, [1.0]) == 0.0
    assert water_level(1.0, []) == math.inf


@given(st.floats(0, 1e3), st.lists(st.floats(0, 1e3), max_size=20))
def test_water_level_fills_the_capacity_or_meets_all_demands(capacity, demands):
    level = water_level(capacity, demands)
    given_out = sum(min(demand, level) for demand in demands)
    assert given_out == pytest.approx(min(capacity, sum(demands)), rel=1e-9, abs=1e-9)


# Closed forms ----------------------------------------------------------------------------------


def test_one_flow_takes_its_bytes_over_the_rate_plus_the_delay():
    async def main():
        link = link_of(100 * MB, delay_s=0.025, rtt_s=0.05)
        flow, owner = send(link, 250 * MB)
        await asyncio.sleep(10)
        return flow.sent_s, owner.delivered_s, link.sent_bytes(), link.open_flows()

    assert run(main()) == (2.5, 2.525, 250_000_000, 0)


def test_n_equal_flows_end_together_at_n_times_the_time():
    async def main():
        link = link_of(100 * MB)
        owners = [send(link, 50 * MB)[1] for _ in range(8)]
        await asyncio.sleep(10)
        return [owner.delivered_s for owner in owners]

    assert run(main()) == pytest.approx([4.0] * 8, abs=1e-12)


def test_processor_sharing_of_two_flows_that_overlap():
    async def main():
        link = link_of(10.0)
        _, first = send(link, 40.0)
        await asyncio.sleep(2)  # 20 left of the first
        _, second = send(link, 30.0)
        await asyncio.sleep(20)
        return first.delivered_s, second.delivered_s

    # Both at 5/s: the first's 20 take until 6; then 10 are left of the second at 10/s.
    assert run(main()) == (6.0, 7.0)


def test_window_limits_a_flow_to_window_over_rtt():
    async def main():
        limits = FlowLimits(window_bytes=4 * MB)
        link = link_of(1000 * MB, delay_s=0.05, rtt_s=0.1, limits=limits)
        _, owner = send(link, 400 * MB)
        await asyncio.sleep(20)
        return owner.delivered_s

    assert run(main()) == pytest.approx(10.05, abs=1e-9)


def test_loss_bounds_a_flow_by_the_mathis_formula():
    async def main():
        limits = FlowLimits(connections=2, segment_bytes=1448)
        link = link_of(1000 * MB, rtt_s=0.1, loss=0.0001, limits=limits)
        flow, _ = send(link, 1 * MB)
        return flow.rate

    assert run(main()) == pytest.approx(2 * math.sqrt(1.5) * 1448 / (0.1 * 0.01), rel=1e-12)


def test_capped_flow_leaves_the_rest_to_the_others():
    async def main():
        link = link_of(10.0, limits=FlowLimits(interface_bps=8 * 6.0))
        a, _ = send(link, 1000.0)
        rates = [a.rate]
        b, _ = send(link, 1000.0)
        rates += [a.rate, b.rate]
        link.abort(a)
        return [*rates, b.rate]

    assert run(main()) == [6.0, 5.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("rate", "delivered_s"),
    [
        # Faster than production: the last layer's 10 bytes leave after it, at the full rate.
        (100.0, 11.0 + 10 / 100.0),
        # As slow as half the production: busy from the first layer's end at 2 s on.
        (5.0, 2.0 + 100 / 5.0),
        # Exactly the pace of production (90 bytes in 9 s).
        (10.0, 11.0 + 10 / 10.0),
    ],
)
def test_layers_overlap_with_their_transfer(rate, delivered_s):
    async def main():
        link = link_of(rate)
        owner = Owner()
        flow = link.open(100.0, owner)
        # Computed from 1 s to 11 s in 10 layers: evenly from 2 s on, and the last at 11 s.
        link.produce(flow, 2.0, 11.0, 90.0, 10.0)
        await asyncio.sleep(50)
        return owner.delivered_s

    assert run(main()) == pytest.approx(delivered_s, abs=1e-9)


def test_backlog_of_a_slow_minute_is_worked_off():
    async def main():
        # 5/s for 4 s of production at 10/s: a backlog of 20, worked off at 20 - 10 = 10/s.
        link = link_of(5.0, later=[LinkState(4.0, 8 * 20.0)])
        owner = Owner()
        flow = link.open(100.0, owner)
        link.produce(flow, 0.0, 10.0, 100.0, 0.0)
        await asyncio.sleep(3.999)
        backlog, phase = flow.backlog(3.999), flow.phase
        await asyncio.sleep(2.002)
        after = flow.phase
        await asyncio.sleep(10)
        return backlog, phase, after, owner.delivered_s

    backlog, phase, after, delivered_s = run(main())
    assert backlog == pytest.approx(19.995)
    assert (phase, after) == (Phase.BACKLOG, Phase.PACED)
    assert delivered_s == pytest.approx(10.0, abs=1e-9)


def test_paced_flows_get_their_pace_before_backlogged_ones_share_the_rest():
    async def main():
        link = link_of(10.0)
        paced = link.open(1000.0, Owner())
        link.produce(paced, 0.0, 1000.0, 1000.0, 0.0)  # 1/s
        a, _ = send(link, 1000.0)
        b, _ = send(link, 1000.0)
        return paced.rate, a.rate, b.rate

    assert run(main()) == (1.0, 4.5, 4.5)


def paced(link, *paces):
    """Flows that are produced at these rates for 1,000 s."""
    flows = [link.open(1000.0 * pace, Owner()) for pace in paces]
    now_s = asyncio.get_running_loop().time()
    for flow in flows:
        link.produce(flow, now_s, now_s + 1000.0, flow.total, 0.0)
    return flows


@pytest.mark.parametrize(
    ("paces", "rates"),
    [
        ([4.0, 4.0, 4.0], [10 / 3] * 3),
        ([2.0, 6.0, 6.0], [2.0, 4.0, 4.0]),
        ([6.0, 2.0, 6.0, 1.0], [3.5, 2.0, 3.5, 1.0]),
        ([5.0, 5.0], [5.0, 5.0]),
    ],
)
def test_productions_that_exceed_the_link_together_share_it(paces, rates):
    async def main():
        return [flow.rate for flow in paced(link_of(10.0), *paces)]

    assert run(main()) == pytest.approx(rates)


def test_productions_share_a_link_that_becomes_scarce():
    async def main():
        link = link_of(100.0, later=[LinkState(2.0, 8 * 10.0)])
        flows = paced(link, 2.0, 6.0, 6.0)
        await asyncio.sleep(3)
        return [flow.rate for flow in flows], link.sent_bytes()

    assert run(main()) == (pytest.approx([2.0, 4.0, 4.0]), 2 * 14 + 10)


def test_what_a_production_leaves_goes_to_the_others():
    async def main():
        link = link_of(10.0)
        first, second, _ = paced(link, 2.0, 2.0, 2.0)
        waiting, _ = send(link, 1000.0)
        rates = [waiting.rate]
        for flow in (first, second):
            link.abort(flow)
            rates.append(waiting.rate)
        return rates

    assert run(main()) == [4.0, 6.0, 8.0]


def test_a_window_bounds_production_once_the_path_is_longer():
    async def main():
        longer, shorter = LinkState(2.0, 8e3, 0.0, 1.0), LinkState(5.0, 8e3, 0.0, 0.1)
        limits = FlowLimits(window_bytes=4.0)
        link = link_of(1000.0, rtt_s=0.1, limits=limits, later=[longer, shorter])
        [flow] = paced(link, 10.0)
        rates = [flow.rate]
        for wait_s in (3.0, 2.5, 0.2):
            await asyncio.sleep(wait_s)
            rates.append(flow.rate)
        return rates

    # 4 bytes/s instead of 10 for three seconds leave 18, worked off at 40 - 10 by 5.6 s.
    assert run(main()) == [10.0, 4.0, 40.0, 10.0]


def test_outage_stops_all_and_recovery_goes_on():
    async def main():
        link = link_of(10.0, later=[LinkState(1.0, 0.0), LinkState(6.0, 80.0)])
        _, owner = send(link, 30.0)
        await asyncio.sleep(3)
        mid = link.sent_bytes(), link.signals.verdict
        await asyncio.sleep(20)
        return mid, owner.delivered_s

    assert run(main()) == ((10, "saturated"), 8.0)


def test_long_outage_fails_the_flows():
    async def main():
        link = link_of(
            10.0,
            later=[LinkState(1.0, 0.0), LinkState(2.0, 80.0), LinkState(4.0, 0.0)],
            limits=FlowLimits(stall_s=5.0),
        )
        _, owner = send(link, 1000.0)
        await asyncio.sleep(8.9)
        assert owner.failed is None
        await asyncio.sleep(0.2)
        return owner.failed, link.open_flows(), link.sent_bytes()

    assert run(main()) == ("nothing crossed the link for 5.0 s", 0, 30)


def test_held_flow_sends_nothing_until_released():
    async def main():
        link = link_of(10.0)
        owner = Owner()
        flow = link.open(100.0, owner, held=True)
        link.produce(flow, 0.0, 5.0, 100.0, 0.0)
        await asyncio.sleep(4)
        assert link.sent_bytes() == 0
        link.release(flow)
        await asyncio.sleep(20)
        return owner.delivered_s

    assert run(main()) == pytest.approx(14.0, abs=1e-9)


def test_production_that_pauses_and_goes_on():
    async def main():
        link = link_of(100.0)
        owner = Owner()
        flow = link.open(100.0, owner)
        link.produce(flow, 0.0, 10.0, 100.0, 0.0)
        await asyncio.sleep(4)
        link.produce(flow, 4.0, 4.0, 0.0, 0.0)
        await asyncio.sleep(3)
        assert link.sent_bytes() == 40
        link.produce(flow, 7.0, 13.0, 60.0, 0.0)
        await asyncio.sleep(20)
        return owner.delivered_s

    assert run(main()) == pytest.approx(13.0, abs=1e-9)


def test_abort_gives_the_share_back_and_is_idempotent():
    async def main():
        link = link_of(10.0)
        flow, owner = send(link, 100.0)
        _, other = send(link, 100.0)
        await asyncio.sleep(2)
        link.abort(flow)
        link.abort(flow)
        await asyncio.sleep(20)
        return owner.delivered_s, owner.failed, other.delivered_s, link.sent_bytes()

    assert run(main()) == (None, None, 11.0, 110)


def test_broken_connections_fail_in_order_of_opening():
    async def main():
        link = link_of(10.0)
        order = []
        for i in range(5):
            _, owner = send(link, 100.0)
            owner.flow_failed = lambda flow, why, i=i: order.append((i, why))
        await asyncio.sleep(1)
        link.fail_flows("reset")
        return order, link.open_flows()

    assert run(main()) == ([(i, "reset") for i in range(5)], 0)


def test_link_that_stays_down_is_a_deadlock_not_a_hang():
    async def main():
        link = link_of(0.0, limits=FlowLimits(stall_s=math.inf))
        link.open(1.0, Owner())
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError):
        run(main())


# Series and signals ----------------------------------------------------------------------------


def test_samples_tell_what_was_sent_in_each_window():
    async def main():
        samples = []
        link = link_of(
            10.0,
            rtt_s=0.02,
            queue_bytes=5.0,
            on_sample=lambda s: samples.append(
                (s.time_s, s.sent_bytes, s.flows, s.signals.utilisation, s.signals.verdict)
            ),
        )
        await asyncio.sleep(2.5)
        send(link, 8.0)
        await asyncio.sleep(10)
        send(link, 100.0)
        send(link, 100.0)
        await asyncio.sleep(3)
        assert link.signals.min_rtt_s == 0.02 and link.signals.rtt_s == 0.52
        return samples

    assert run(main()) == [
        (3.0, 5.0, 1, 0.5, "busy"),
        (4.0, 3.0, 0, pytest.approx(0.3), "free"),
        (5.0, 0.0, 0, 0.0, "free"),
        (13.0, 5.0, 2, 0.5, "busy"),
        (14.0, 10.0, 2, 1.0, "saturated"),
        (15.0, 10.0, 2, 1.0, "saturated"),
    ]


def test_window_limited_link_is_named_so():
    async def main():
        link = link_of(100.0, rtt_s=0.1, limits=FlowLimits(window_bytes=1.0))
        send(link, 1000.0)
        await asyncio.sleep(3.5)
        return link.signals.verdict, link.signals.throughput_bps, link.signals.backlog_bytes

    verdict, throughput_bps, backlog = run(main())
    assert verdict == "receiver-limited"
    assert throughput_bps == pytest.approx(80.0)
    assert backlog == pytest.approx(970.0)


def test_lossy_link_is_named_so_and_its_loss_is_shown():
    async def main():
        # 1,448 sqrt(3/2) / (0.1 s x sqrt(0.01)) = 177 kB/s a connection.
        link = link_of(1 * MB, rtt_s=0.1, loss=0.01, limits=FlowLimits(connections=1))
        send(link, 100 * MB)
        await asyncio.sleep(3.5)
        return link.signals.verdict, link.signals.loss, link.signals.throughput_bps

    assert run(main()) == ("lossy", 0.01, pytest.approx(8 * 177_343, rel=1e-4))


def test_rates_of_a_flow_are_traced_when_asked_for():
    async def main():
        ended = []
        link = link_of(10.0)
        send(link, 1.0)
        link.trace(ended.append)
        await asyncio.sleep(1)
        for wait_s, n_bytes in ((2, 40.0), (19, 30.0), (2, 40.0)):
            flow, _ = send(link, n_bytes)
            await asyncio.sleep(wait_s)
        link.abort(flow)
        return [flow.rates for flow in ended]

    assert run(main()) == [
        [(1.0, 80.0), (3.0, 40.0), (7.0, 0.0)],
        [(3.0, 40.0), (7.0, 80.0), (8.0, 0.0)],
        [(22.0, 80.0), (24.0, 0.0)],
    ]


# Properties ------------------------------------------------------------------------------------


def assert_max_min(link):
    """No flow below its demand while another gets more, or while the link has room."""
    flows = [*link._paced, *link._backlogged]
    assert link._paced_sum == pytest.approx(sum(flow.pace for flow in link._paced), abs=1e-9)
    assert link._cap_sum == pytest.approx(sum(flow.cap for flow in link._backlogged), abs=1e-9)
    total = sum(flow.rate for flow in flows)
    assert total <= link._rate * (1 + 1e-9) + 1e-9
    assert all(flow.rate == 0.0 for flow in link._flows if flow not in flows)
    most = max((flow.rate for flow in flows), default=0.0)
    for flow in flows:
        demand = flow.pace if flow.phase is Phase.PACED else flow.cap
        assert flow.rate <= demand * (1 + 1e-9)
        if flow.rate < demand * (1 - 1e-9):
            assert total >= link._rate * (1 - 1e-9) - 1e-9
            assert flow.rate >= most * (1 - 1e-9)


flows_strategy = st.lists(
    st.tuples(
        st.integers(0, 2000).map(lambda k: k / 100),  # opened
        st.integers(1, 500).map(float),  # bytes
        st.integers(0, 800).map(lambda k: k / 100),  # production time
        st.integers(1, 10),  # layers
        st.sampled_from([None, None, None, 0.5, 3.0]),  # aborted after
        st.booleans(),  # held for a while
    ),
    min_size=1,
    max_size=12,
)
states_strategy = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from([0.0, 3.0, 40.0])), max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([5.0, 20.0, 100.0, 1000.0]),
    st.sampled_from([math.inf, 8.0, 30.0]),
    flows_strategy,
    states_strategy,
)
def test_shares_are_max_min_and_bytes_conserved(rate, cap, plan, changes):
    async def main():
        later = [LinkState(at / 100, r * 8, 0.01) for at, r in sorted(changes)]
        later.append(LinkState(40.0, 8 * 25.0, 0.01))
        link = link_of(
            rate, 0.01, later=later, limits=FlowLimits(interface_bps=cap * 8, stall_s=1e9)
        )
        loop = asyncio.get_running_loop()
        opened = []

        async def one(opened_s, n_bytes, work_s, layers, abort_after_s, held):
            await asyncio.sleep(opened_s)
            now_s = loop.time()
            owner = Owner()
            flow = link.open(n_bytes, owner, held=held)
            opened.append((flow, owner, abort_after_s))
            first_s = work_s / layers
            last = n_bytes / layers
            link.produce(flow, now_s + first_s, now_s + work_s, n_bytes - last, last)
            assert_max_min(link)
            if held:
                await asyncio.sleep(1.234)
                link.release(flow)
                assert_max_min(link)
            if abort_after_s is not None:
                await asyncio.sleep(abort_after_s)
                link.abort(flow)
                assert_max_min(link)

        async def watch():
            for _ in range(100):
                await asyncio.sleep(0.617)
                assert_max_min(link)
                for flow in link._flows:
                    sent, produced = flow.sent_at(loop.time()), flow.produced(loop.time())
                    assert -1e-6 <= sent <= produced + 1e-6

        await asyncio.gather(watch(), *(one(*item) for item in plan))
        await asyncio.sleep(10_000)
        assert link.open_flows() == 0 and not link._paced and not link._backlogged
        assert link._paced_sum == link._cap_sum == 0.0
        total = 0.0
        for flow, owner, abort_after_s in opened:
            assert (owner.delivered_s is not None) or abort_after_s is not None
            if owner.delivered_s is not None:
                assert flow.sent == flow.total
                # Nothing is faster than its own production, its cap and the delay allow. The last
                # 0.01 byte may count as sent.
                least_s = flow.end_s + (flow.lump - 0.01) / min(cap, max(rate, 40.0))
                assert flow.sent_s >= least_s - 1e-6
                assert owner.delivered_s == pytest.approx(flow.sent_s + 0.01, abs=1e-9)
            total += flow.sent
        assert link.sent_bytes() == int(total + 1e-9) or abs(link.sent_bytes() - total) < 1.0

    run(main(), until_s=1e9)
