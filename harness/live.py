"""What a phase says of itself while it runs: histogram figures, in the modelled system's units."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from harness.scale import Scale
from results.live import LiveHistogram
from results.records import RequestRecord

Say = Callable[[str], None]

#: Real seconds between two lines on a phase that runs.
LIVE_INTERVAL_S = 15.0


class LiveTtft:
    """Says now and then, in real time, how TTFT stands in the phase that runs."""

    def __init__(self, scale: Scale, say: Say) -> None:
        self._loop = asyncio.get_running_loop()
        self._scale = scale
        self._say = say
        self._histogram = LiveHistogram()
        self._said_s = self._loop.time()

    def record(self, record: RequestRecord) -> None:
        if record.first_token_s is not None:
            self._histogram.record(
                self._scale.modelled_s(record.first_token_s - record.scheduled_s)
            )
        if self._loop.time() - self._said_s >= LIVE_INTERVAL_S:
            self._said_s = self._loop.time()
            p50_s, p90_s = self._histogram.percentile(0.5), self._histogram.percentile(0.9)
            if p50_s is not None and p90_s is not None:
                count = self._histogram.count
                self._say(
                    f"  {count} first tokens, TTFT P50 {p50_s:.2f} s, P90 {p90_s:.2f} s so far"
                )
