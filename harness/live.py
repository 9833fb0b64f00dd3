"""How the phase that runs in real time stands, and what is said of it. Figures are in the modelled
system's units.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from harness.phases import Phase
from harness.replay import ReplayCounts
from harness.scale import Scale
from results.live import LiveHistogram
from results.records import RequestRecord, Status
from results.rows import LinkRow

Say = Callable[[str], None]

#: Real seconds between two lines on a phase that runs, and between two looks at it.
LINE_EVERY_S = 15.0
LOOK_EVERY_S = 1.0

#: Failures are told apart by the beginning of their messages, and so many kinds are kept.
_KIND_CHARS = 120
_KINDS = 100


class LivePhase:
    """Filled in while the phase runs. `counts` are the replay's own."""

    def __init__(self, configuration: str, phase: Phase, scale: Scale) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self.configuration = configuration
        self.phase = phase
        self.scale = scale
        self.counts = ReplayCounts()
        self.ttft = LiveHistogram()
        self.tpot = LiveHistogram()
        self.failures: dict[str, int] = {}
        self.links: dict[str, LinkRow] = {}

    @property
    def real_s(self) -> float:
        """Real seconds since it began."""
        return self._loop.time() - self._begun_s

    @property
    def sent(self) -> int:
        return self.counts.offered - self.counts.unsent

    @property
    def in_flight(self) -> int:
        return self.sent - self.counts.succeeded - self.counts.failed

    def record(self, record: RequestRecord) -> None:
        """A request that ended."""
        if record.status is Status.FAILED:
            kind = record.failure[:_KIND_CHARS]
            if kind in self.failures or len(self.failures) < _KINDS:
                self.failures[kind] = self.failures.get(kind, 0) + 1
        first_s, last_s, tokens = record.first_token_s, record.last_token_s, record.tokens_received
        if first_s is None:
            return
        self.ttft.record(self.scale.modelled_s(first_s - record.scheduled_s))
        if last_s is not None and tokens > 1:
            step_s = (last_s - first_s) / (tokens - 1)
            self.tpot.record(self.scale.modelled_s(step_s) / self.scale.token_scale)

    def link(self, row: LinkRow) -> None:
        self.links[row.link] = row


#: Is shown the phase that runs, about once in `LOOK_EVERY_S`.
Watch = Callable[[LivePhase], None]


async def watched(live: LivePhase, watch: Watch) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        watch(live)


class TtftLines:
    """Says now and then how TTFT stands: what there is to see without a terminal."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._live: LivePhase | None = None
        self._said_s = 0.0

    def __call__(self, live: LivePhase) -> None:
        if live is not self._live:
            self._live, self._said_s = live, 0.0
        real_s = live.real_s
        if real_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = real_s
        p50_s, p90_s = live.ttft.percentile(0.5), live.ttft.percentile(0.9)
        if p50_s is not None and p90_s is not None:
            self._say(
                f"  {live.ttft.count} first tokens, TTFT P50 {p50_s:.2f} s, P90 {p90_s:.2f} s "
                "so far"
            )
