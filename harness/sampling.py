"""Looks at links and instances at a fixed interval while a phase runs.

Link rows are what the link itself counted and what its monitor measured; instance rows are the
router's own accounting, the same in every mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.fleets.base import Fleet
from harness.ports import Role
from harness.topology import PRFAAS
from harness.view import View
from results.rows import InstanceRow, LinkRow

#: Instances are looked at once in so many looks at the links.
INSTANCES_EVERY = 10


@dataclass(slots=True)
class EgressSamples:
    """The prefill cluster's egress: (s since the phase began, bytes sent since then)."""

    times_s: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)


async def sample(
    fleet: Fleet,
    origin_s: float,
    interval_s: float,
    egress: EgressSamples,
    on_link: Callable[[LinkRow], None],
    on_instance: Callable[[InstanceRow], None],
) -> None:
    """Until cancelled."""
    loop = asyncio.get_running_loop()
    before = {ends: link.sent_bytes() for ends, link in fleet.links.items()}
    look = 0
    while True:
        time_s = loop.time() - origin_s
        for ends, link in fleet.links.items():
            sent_bytes = link.sent_bytes() - before[ends]
            if ends[0] == PRFAAS:
                egress.times_s.append(time_s)
                egress.sent_bytes.append(sent_bytes)
            signals = link.signals
            on_link(
                LinkRow(
                    time_s,
                    "->".join(ends),
                    sent_bytes,
                    signals.rate_bps,
                    signals.throughput_bps,
                    signals.utilisation,
                    signals.backlog_bytes,
                    signals.rtt_s,
                    signals.min_rtt_s,
                    signals.loss,
                    signals.verdict,
                    signals.connections,
                    signals.goodput_bps,
                    signals.retransmits,
                    signals.rwnd_limited,
                    signals.sndbuf_limited,
                )
            )
        if look % INSTANCES_EVERY == 0:
            for row in instance_rows(fleet.view, time_s):
                on_instance(row)
        look += 1
        await asyncio.sleep(max(0.0, origin_s + look * interval_s - loop.time()))


def instance_rows(view: View, time_s: float) -> Iterator[InstanceRow]:
    """One row an instance and role: what is assigned to it, and whether it takes any. An instance
    that changed its role has no row in the old one; on its way, it has one while it drains."""
    for prefill in view.prefill.values():
        for key, name in enumerate(prefill.names):
            queued = prefill.queued[key]
            if key in prefill.away and not queued:
                continue
            state = _state(prefill.usable(key), key in prefill.away)
            busy_s = prefill.busy_s[key]
            yield InstanceRow(
                time_s, name, prefill.cluster, Role.PREFILL, state, queued=queued, busy_s=busy_s
            )
    for decode in view.decode.values():
        for key, name in enumerate(decode.names):
            running = decode.active(key)
            if key in decode.away and not running:
                continue
            state = _state(decode.usable(key), key in decode.away)
            tokens = decode.tokens[key]
            yield InstanceRow(
                *(time_s, name, decode.cluster, Role.DECODE, state),
                running=running,
                cache_tokens=tokens,
            )


def _state(usable: bool, away: bool) -> str:
    return "up" if usable else "draining" if away else "down"
