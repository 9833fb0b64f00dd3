"""The modelled link: flows as fluids that share a rate max-min fairly.

Each flow is limited by its own cap (window / RTT, loss, the sender's interface) and, while its
cache is still being computed, by the rate at which bytes are produced. What is left of the link
is divided so that no flow gets more while a poorer one could have it. Between events all rates are
constant, so events are exact and there are a few of them per flow, however many bytes it has.

An event costs O(log n) while every flow gets what it asks for, and O(n log n) only when not.
Slow start is not modelled: flows run on connections that stay open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.links.fair_share import water_level
from harness.links.flow import Flow, FlowOwner, Phase
from harness.links.limits import UNLIMITED, FlowLimits, LinkState
from harness.ports import LinkSignals

__all__ = ["FlowLimits", "FluidLink", "LinkSample", "LinkState"]

# Looked up several times an event; an enumeration's attributes are slow to find.
_HELD, _IDLE, _PACED, _BACKLOG = Phase.HELD, Phase.IDLE, Phase.PACED, Phase.BACKLOG
_SENT, _ENDED = Phase.SENT, Phase.ENDED
_NEVER = float("inf")

#: Relative slack within which demands count as fitting the capacity.
_FITS = 1.0 + 1e-12
#: Fewer bytes than this are rounding: an hour into a run the clock's last bit is 0.01 byte at 100G.
_NO_BYTES = 0.01
#: Utilisation from which the link's verdict is busy.
_BUSY = 0.5


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One window of the utilisation series, which ended at `time_s`: what was sent in it."""

    time_s: float
    window_s: float
    sent_bytes: float
    flows: int
    signals: LinkSignals


class FluidLink:
    """One direction from `source` to `sink`; implements harness.ports.Link.

    `states` is the schedule, in order, the first at 0; it counts from the link's creation, as do
    the windows of `sample_s` after which `signals` is refreshed. Windows in which nothing was on
    the link yield no sample, except the first such one. `queue_bytes` is the bottleneck's buffer,
    which a saturated link keeps full; it only shows in the measured RTT.
    """

    def __init__(
        self,
        source: str,
        sink: str,
        states: Iterable[LinkState],
        *,
        limits: FlowLimits = UNLIMITED,
        queue_bytes: float = 0.0,
        sample_s: float = 1.0,
        on_sample: Callable[[LinkSample], None] | None = None,
    ) -> None:
        self.source = source
        self.sink = sink
        self.signals = LinkSignals()
        self._limits = limits
        self._queue_bytes = queue_bytes
        self._sample_s = sample_s
        self._on_sample = on_sample
        self._on_flow: Callable[[Flow], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._origin_s = self._loop.time()

        self._flows: dict[Flow, None] = {}
        self._paced: dict[Flow, None] = {}
        self._backlogged: dict[Flow, None] = {}
        self._paced_sum = 0.0
        self._cap_sum = 0.0
        #: No paced flow is faster than this.
        self._fastest_pace = 0.0
        self._all_satisfied = True
        self._ended_bytes = 0.0

        self._sampled_bytes = 0.0
        self._sampled_s = self._origin_s
        self._sampling = False

        first, *later = states
        self._apply(first)
        for state in later:
            self._loop.call_at(self._origin_s + state.at_s, self.change, state)

    def trace(self, on_flow: Callable[[Flow], None]) -> None:
        """Keep the `rates` of each flow that is opened from now on, and tell `on_flow` of it when
        it has ended, delivered or not."""
        self._on_flow = on_flow

    # What a sender does -------------------------------------------------------------------------

    def open(self, total_bytes: float, owner: FlowOwner, *, held: bool = False) -> Flow:
        """A flow of `total_bytes`, of which nothing is produced yet. A held one sends nothing until
        `release`."""
        now_s = self._loop.time()
        flow = Flow(total_bytes, self._flow_cap, owner, now_s, held)
        if self._on_flow is not None:
            flow.rates = []
        self._flows[flow] = None
        return flow

    def produce(
        self, flow: Flow, begin_s: float, end_s: float, paced_bytes: float, lump_bytes: float
    ) -> None:
        """From now on `flow` is produced so: evenly from begin_s to end_s, then a lump at once.

        Replaces what is left of the production set before.
        """
        now_s = self._loop.time()
        flow.set_production(now_s, begin_s, end_s, paced_bytes, lump_bytes)
        if flow.phase is _IDLE and now_s < begin_s < end_s:
            # Nothing to send yet, so nobody's share changes before it begins.
            self._set_timer(flow, begin_s)
        elif flow.phase < _SENT:
            self._classify(flow, now_s)

    def release(self, flow: Flow) -> None:
        """The destination has granted memory: a held flow may send."""
        if flow.phase is _HELD:
            flow.phase = _IDLE
            self._classify(flow, self._loop.time())

    def abort(self, flow: Flow) -> None:
        """Drop `flow` without telling its owner. Idempotent."""
        if flow.phase is _ENDED:
            return
        now_s = self._loop.time()
        flow.settle(now_s)
        self._enter(flow, _ENDED, now_s)
        self._ended_bytes += flow.sent
        del self._flows[flow]
        if flow.rates is not None and self._on_flow is not None:
            self._on_flow(flow)

    # What happens to a link ---------------------------------------------------------------------

    def change(self, state: LinkState) -> None:
        """The link is so from now on (`at_s` is not looked at)."""
        now_s = self._loop.time()
        self._apply(state)
        for flow in list(self._flows):
            flow.cap = self._flow_cap
        self._cap_sum = sum(flow.cap for flow in self._backlogged)
        for flow in list(self._paced):
            if flow.pace > flow.cap:
                self._classify(flow, now_s)
        self._all_satisfied = False
        self._share_out(now_s)

    def fail_flows(self, why: str) -> None:
        """Every connection breaks: all flows fail, in the order in which they were opened."""
        for flow in list(self._flows):
            self.abort(flow)
            flow.owner.flow_failed(flow, why)

    # What can be seen of it ---------------------------------------------------------------------

    def sent_bytes(self) -> int:
        """Bytes that have left since the link came up, also of flows that were cut off."""
        now_s = self._loop.time()
        return int(self._ended_bytes + sum(flow.sent_at(now_s) for flow in self._flows))

    def open_flows(self) -> int:
        """Flows not yet delivered, those that have sent all included."""
        return len(self._flows)

    # Phases and rates ---------------------------------------------------------------------------

    def _apply(self, state: LinkState) -> None:
        self._rate = state.rate_bps / 8
        self._delay_s = state.delay_s
        self._rtt_s = state.rtt_s
        self._loss = state.loss
        self._flow_cap = self._limits.flow_cap(state)
        if self._rate == 0.0:
            self._down_since_s = self._loop.time()
            self._loop.call_later(self._limits.stall_s, self._fail_if_down, self._down_since_s)

    def _fail_if_down(self, since_s: float) -> None:
        if self._rate == 0.0 and self._down_since_s == since_s:
            self.fail_flows(f"nothing crossed the link for {self._limits.stall_s} s")

    def _classify(self, flow: Flow, now_s: float) -> None:
        """Put `flow` into the phase that its production and its sent bytes call for."""
        if flow.phase is not _HELD:
            flow.settle(now_s)
            self._classify_settled(flow, now_s, flow.produced(now_s))

    def _classify_settled(self, flow: Flow, now_s: float, produced: float) -> None:
        if produced - flow.sent > _NO_BYTES:
            phase = _BACKLOG
        elif now_s >= flow.end_s:
            if produced >= flow.total * (1.0 - 1e-9):
                self._sent(flow, now_s)
                return
            phase = _IDLE
        elif flow.pace > 0.0 and flow.begin_s <= now_s:
            phase = _PACED if flow.pace <= flow.cap else _BACKLOG
        else:
            phase = _IDLE
        self._enter(flow, phase, now_s)

    def _enter(self, flow: Flow, phase: Phase, now_s: float) -> None:
        """`flow`, settled until now, is in `phase` from now on; all rates follow."""
        before = flow.phase
        if before is _BACKLOG:
            del self._backlogged[flow]
            self._cap_sum = self._cap_sum - flow.cap if self._backlogged else 0.0
        elif before is _PACED:
            del self._paced[flow]
            # A paced flow is sent exactly at its pace, so its rate is what it added to the sum.
            self._paced_sum = self._paced_sum - flow.rate if self._paced else 0.0
        flow.phase = phase
        if phase is _BACKLOG:
            self._backlogged[flow] = None
            self._cap_sum += flow.cap
            demand = flow.cap
        elif phase is _PACED:
            self._paced[flow] = None
            demand = flow.pace
            self._paced_sum += demand
            if demand > self._fastest_pace:
                self._fastest_pace = demand
        else:
            demand = 0.0
        if self._paced_sum + self._cap_sum <= self._rate * _FITS:
            self._set_rate(flow, demand, now_s)
            if not self._all_satisfied:
                self._share_out(now_s)
        else:
            # A backlogged flow gets its share with the others.
            self._set_rate(flow, 0.0 if phase is _BACKLOG else demand, now_s)
            self._share_out(now_s)

    def _share_out(self, now_s: float) -> None:
        """Give every flow its max-min share."""
        if self._paced_sum + self._cap_sum <= self._rate * _FITS:
            self._all_satisfied = True
            for flow in self._backlogged:
                if flow.rate != flow.cap:
                    flow.settle(now_s)
                    self._set_rate(flow, flow.cap, now_s)
            return
        self._all_satisfied = False
        caps = [flow.cap for flow in self._backlogged]
        left = max(0.0, self._rate - self._paced_sum)
        # With nobody in backlog it is the paced flows alone that ask for too much.
        level = water_level(left, caps) if len(caps) > 1 else left if caps else 0.0
        if self._fastest_pace > level:
            self._fastest_pace = max((flow.pace for flow in self._paced), default=0.0)
        if self._fastest_pace > level:
            level = water_level(self._rate, caps + [flow.pace for flow in self._paced])
            for flow in [flow for flow in self._paced if flow.pace > level]:
                flow.settle(now_s)
                del self._paced[flow]
                self._paced_sum = self._paced_sum - flow.pace if self._paced else 0.0
                flow.phase = _BACKLOG
                self._backlogged[flow] = None
                self._cap_sum += flow.cap
        for flow in self._backlogged:
            rate = min(flow.cap, level)
            if rate != flow.rate:
                flow.settle(now_s)
                self._set_rate(flow, rate, now_s)

    def _set_rate(self, flow: Flow, rate: float, now_s: float) -> None:
        """`flow`, settled until now, sends at `rate` from now on."""
        flow.rate = rate
        if rate > 0.0 and not self._sampling:
            self._start_sampling(now_s)
        if flow.rates is not None:
            flow.note_rate(now_s, rate)
        when_s = flow.next_change_s(now_s)
        if flow.timer is not None:
            self._set_timer(flow, when_s)
        elif when_s != _NEVER:
            flow.timer = self._loop.call_at(when_s, self._on_change_due, flow)

    def _set_timer(self, flow: Flow, when_s: float) -> None:
        if flow.timer is not None:
            flow.timer.cancel()
            flow.timer = None
        if when_s != _NEVER:
            flow.timer = self._loop.call_at(when_s, self._on_change_due, flow)

    # Events -------------------------------------------------------------------------------------

    def _on_change_due(self, flow: Flow) -> None:
        """The phase of `flow` changes now: all that was produced has left, or more is produced."""
        flow.timer = None
        now_s = self._loop.time()
        phase, produced = flow.phase, flow.produced(now_s)
        if phase is _PACED:
            # All but the lump, which comes now.
            flow.sent = produced - flow.lump
        elif phase is _BACKLOG:
            flow.sent = produced
        flow.since_s = now_s
        self._classify_settled(flow, now_s, produced)

    def _sent(self, flow: Flow, now_s: float) -> None:
        flow.sent = flow.total
        flow.sent_s = now_s
        self._enter(flow, _SENT, now_s)
        if self._delay_s > 0.0:
            flow.timer = self._loop.call_at(now_s + self._delay_s, self._deliver, flow)
        else:
            self._deliver(flow)

    def _deliver(self, flow: Flow) -> None:
        flow.phase = _ENDED
        flow.timer = None
        flow.delivered_s = self._loop.time()
        self._ended_bytes += flow.total
        del self._flows[flow]
        if flow.rates is not None and self._on_flow is not None:
            self._on_flow(flow)
        flow.owner.flow_delivered(flow)

    # The monitor --------------------------------------------------------------------------------

    def _start_sampling(self, now_s: float) -> None:
        self._sampling = True
        windows = (now_s - self._origin_s) // self._sample_s
        self._sampled_s = self._origin_s + windows * self._sample_s
        self._loop.call_at(self._sampled_s + self._sample_s, self._sample)

    def _sample(self) -> None:
        now_s = self._loop.time()
        sent, backlog, moving = self._ended_bytes, 0.0, False
        for flow in self._flows:
            flow_sent = flow.sent + flow.rate * (now_s - flow.since_s)
            sent += flow_sent
            backlog += max(0.0, flow.produced(now_s) - flow_sent)
            moving = moving or flow.rate > 0.0
        window_s = now_s - self._sampled_s
        sent_in_window = sent - self._sampled_bytes
        self._sampled_bytes, self._sampled_s = sent, now_s
        throughput_bps = sent_in_window * 8 / window_s
        rate_bps = self._rate * 8
        utilisation = min(1.0, throughput_bps / rate_bps) if rate_bps else float(bool(self._flows))
        queued = not self._all_satisfied
        signals = self.signals
        signals.sampled_s = now_s
        signals.rate_bps = rate_bps
        signals.throughput_bps = throughput_bps
        signals.utilisation = utilisation
        signals.backlog_bytes = backlog
        signals.min_rtt_s = self._rtt_s
        signals.rtt_s = self._rtt_s + (
            self._queue_bytes / self._rate if queued and self._rate else 0.0
        )
        signals.loss = self._loss
        signals.verdict = self._verdict(utilisation, queued)
        if self._on_sample is not None:
            flows = len(self._flows)
            self._on_sample(LinkSample(now_s, window_s, sent_in_window, flows, signals))
        # A link on which nothing moves sets no timer: a fleet that waits for it is a deadlock.
        self._sampling = moving or sent_in_window > 0.0
        if self._sampling:
            self._loop.call_at(now_s + self._sample_s, self._sample)

    def _verdict(self, utilisation: float, queued: bool) -> str:
        if self._flows and (self._rate == 0.0 or (queued and utilisation > 0.9)):
            return "saturated"
        if self._backlogged and not queued and self._flow_cap < self._rate:
            return "lossy" if self._loss > 0.0 else "receiver-limited"
        return "busy" if utilisation >= _BUSY else "free"
