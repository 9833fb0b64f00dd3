"""The picture of a phase that runs in real time: rates, latencies, links and failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.live import LivePhase
from harness.screen import Screen
from results.live import LiveHistogram
from results.rows import LinkRow
from results.table import number

#: Rates are over so many looks at the phase.
_LOOKS = 6
_FAILURES = 3


class Dashboard:
    """Draws the phase it is shown on `screen`."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._live: LivePhase | None = None
        self._looks: deque[tuple[float, int, int]] = deque(maxlen=_LOOKS)

    def __call__(self, live: LivePhase) -> None:
        if live is not self._live:
            self._live = live
            self._looks.clear()
            self._looks.append((0.0, 0, 0))
        self._looks.append((live.real_s, live.sent, live.counts.succeeded))
        self._screen.show(picture(live, *self._rates(live)))

    def _rates(self, live: LivePhase) -> tuple[float, float]:
        """(sent, succeeded) a modelled second."""
        (begun_s, sent, succeeded), (now_s, now_sent, now_succeeded) = (
            self._looks[0],
            self._looks[-1],
        )
        span_s = max(live.scale.modelled_s(now_s - begun_s), 1e-9)
        return (now_sent - sent) / span_s, (now_succeeded - succeeded) / span_s


def picture(live: LivePhase, sent_rate: float, succeeded_rate: float) -> RenderableType:
    """Rates are a modelled second."""
    counts, scale, phase = live.counts, live.scale, live.phase
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "phase",
        f"{live.configuration}: {phase.name}",
        f"{scale.modelled_s(live.real_s):.0f} of {phase.duration_s:.0f} s, "
        f"{number(phase.request_rate)} req/s asked",
    )
    table.add_row("sent", f"{live.sent:,}", f"{number(sent_rate)}/s")
    table.add_row("succeeded", f"{counts.succeeded:,}", f"{number(succeeded_rate)}/s")
    table.add_row("failed", Text(f"{counts.failed:,}", style="red" if counts.failed else ""))
    table.add_row("in flight", f"{live.in_flight:,}")
    for name, row in sorted(live.links.items()):
        table.add_row("link", name, _use(live, row))
    latencies = quantiles("", [("TTFT, s", live.ttft, 1.0), ("TPOT, ms", live.tpot, 1e3)])
    return Group(table, latencies, *failure_lines(live.failures))


def quantiles(title: str, rows: Iterable[tuple[str, LiveHistogram, float]]) -> Table:
    """A line each: label, histogram (s) and the factor to the label's unit."""
    table = Table(title, "P50", "P90", "P99", box=None, padding=(0, 2))
    for label, histogram, factor in rows:
        cells = (histogram.percentile(q) for q in (0.5, 0.9, 0.99))
        table.add_row(label, *(number(None if s is None else s * factor) for s in cells))
    return table


def failure_lines(failures: Mapping[str, int]) -> list[Text]:
    """The most frequent failures."""
    worst = sorted(failures.items(), key=lambda pair: -pair[1])[:_FAILURES]
    return [Text(f"{count:,} x {kind}", style="red") for kind, count in worst]


def _use(live: LivePhase, row: LinkRow) -> str:
    carried, rate = (
        live.scale.modelled_bps(bps) * 1e-9 for bps in (row.throughput_bps, row.rate_bps)
    )
    return f"{number(carried)} of {number(rate)} Gbps ({row.utilisation:.0%})"
