"""The way between two clusters on hosts of their own: whatever network is there, as it is seen.

Bytes are those that the workers' data planes sent across, with the headers of full Ethernet frames,
as a link's own counters have them; the rate is what the experiment says of the link, because
nothing here shapes or probes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from harness.links.base import verdict_by_use
from harness.links.shape import GOODPUT_SHARE
from harness.ports import LinkSignals


class DirectLink:
    """One direction (harness.ports.Link). `total_bytes` reads the payload that was sent; call
    `sample` often."""

    def __init__(
        self,
        source: str,
        sink: str,
        rate_bps: float,
        rtt_s: float,
        total_bytes: Callable[[], int],
    ) -> None:
        self.source, self.sink = source, sink
        self.signals = LinkSignals(rate_bps=rate_bps, rtt_s=rtt_s, min_rtt_s=rtt_s)
        self._total_bytes = total_bytes
        self._sent = 0

    def sent_bytes(self) -> int:
        return round(self._total_bytes() / GOODPUT_SHARE)

    def sample(self) -> None:
        now_s, sent = asyncio.get_running_loop().time(), self.sent_bytes()
        signals = self.signals
        window_s = now_s - signals.sampled_s
        if signals.sampled_s and window_s > 0.0:
            signals.throughput_bps = max(0, sent - self._sent) * 8 / window_s
            signals.utilisation = min(1.0, signals.throughput_bps / signals.rate_bps)
            signals.verdict = verdict_by_use(signals.utilisation)
        signals.sampled_s, self._sent = now_s, sent
