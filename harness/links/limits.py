"""What a modelled link can do at a time, and what bounds each of its flows on its own."""

from __future__ import annotations

from dataclasses import dataclass

#: Mathis et al. 1997: rate <= C x MSS / (RTT x sqrt(loss)), C = sqrt(3/2).
_MATHIS = 1.224744871391589


@dataclass(frozen=True, slots=True)
class LinkState:
    """What the link can do from `at_s` (seconds after it came up) on: payload bits/s, seconds."""

    at_s: float
    rate_bps: float
    delay_s: float = 0.0
    rtt_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """What bounds one flow whatever the others do.

    `window_bytes` is the sum of the send windows of its connections; `interface_bps` the sender's
    own interface; `segment_bytes` and `connections` enter the bound that loss puts on TCP.
    `stall_s`: with the link down for so long, flows fail.
    """

    window_bytes: float = float("inf")
    interface_bps: float = float("inf")
    connections: int = 4
    segment_bytes: int = 1448
    stall_s: float = 30.0

    def flow_cap(self, state: LinkState) -> float:
        """The most that one flow gets, bytes/s."""
        cap = min(self.interface_bps, state.rate_bps) / 8
        if state.rtt_s > 0.0:
            cap = min(cap, self.window_bytes / state.rtt_s)
            if state.loss > 0.0:
                one = _MATHIS * self.segment_bytes / (state.rtt_s * state.loss**0.5)
                cap = min(cap, one * self.connections)
        return cap


UNLIMITED = FlowLimits()
