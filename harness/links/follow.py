"""Does a link follow its schedule? Loads it and compares each step with what the link carried."""

from __future__ import annotations

import asyncio

from harness.links.achieved import Finding, prober
from harness.links.base import ShapedLink
from harness.links.shape import TimedShape

#: Share of a step's rate that bulk TCP must carry once it has settled.
LEAST_SHARE = 0.9
#: Token buckets and bundles let a little more through over a short step.
MOST_SHARE = 1.03
#: After a step, TCP needs this long (and twenty round trips) before its rate is the link's; after
#: an outage its retransmission timer has backed off to about the outage's own length.
SETTLE_S = 0.7
TICK_S = 0.05


async def follow(link: ShapedLink, until_s: float, connections: int = 4) -> list[Finding]:
    """Run the schedule of an idle link under bulk load up to `until_s`; one finding a step.

    The last finding is the schedule's own lateness.
    """
    steps = [timed for timed in link.spec.timeline() if timed.at_s < until_s]
    loop = asyncio.get_running_loop()
    samples: list[tuple[float, int]] = []
    async with prober(link, link.sides[1]) as end:
        plan = {"rate_s": until_s, "warm_up_s": 0.0, "connections": connections}
        load = asyncio.create_task(end.drive(plan))
        try:
            zero_s = loop.time()
            link.start_schedule()
            while (now_s := loop.time() - zero_s) < until_s:
                samples.append((now_s, link.read_counters()[0].sent_bytes))
                await asyncio.sleep(TICK_S)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    ends = [timed.at_s for timed in steps[1:]] + [until_s]
    findings, outage_s = [], 0.0
    for timed, end_s in zip(steps, ends, strict=True):
        settled_s = timed.at_s + SETTLE_S + 20 * timed.shape.rtt_s + 2 * outage_s
        findings.append(_judge(timed, end_s, settled_s, samples))
        outage_s = end_s - timed.at_s if timed.shape.forward.down else 0.0
    late_s = link.schedule_lateness_s
    late = Finding("lateness", "", f"{late_s * 1e3:.0f} ms at most", late_s, late_s < SETTLE_S)
    return [*findings, late]


def _judge(
    timed: TimedShape, end_s: float, settled_s: float, samples: list[tuple[float, int]]
) -> Finding:
    name = f"{timed.at_s:g} to {end_s:g} s"
    inside = [(at_s, sent) for at_s, sent in samples if settled_s <= at_s < end_s]
    down = timed.shape.forward.down
    rate_bps = 0.0 if down else timed.shape.forward.rate_bps
    configured = "down" if down else f"{rate_bps / 1e6:.1f} Mbit/s"
    if len(inside) < 3:
        return Finding(name, configured, "too short to settle", 0.0, None)
    (first_s, first), (last_s, last) = inside[0], inside[-1]
    carried_bps = (last - first) * 8 / (last_s - first_s)
    if down:
        ok = carried_bps < 0.01 * timed.shape.forward.rate_bps
    else:
        ok = LEAST_SHARE * rate_bps <= carried_bps <= MOST_SHARE * rate_bps
    return Finding(name, configured, f"{carried_bps / 1e6:.1f} Mbit/s on the link", carried_bps, ok)
