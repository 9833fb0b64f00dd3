"""The view of a run under way: a dashboard on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.dashboard import failure_lines, quantiles
from harness.load.clients import Progress
from harness.replay import ReplayCounts
from harness.screen import Screen
from results.table import number

_LINE_EVERY_S = 5.0


def sent_of(counts: ReplayCounts) -> int:
    return counts.offered - counts.unsent


def interface_bytes(name: str) -> tuple[int, int]:
    """(received, sent) bytes of a network interface since it came up. Raises OSError."""
    counters = Path("/sys/class/net") / name / "statistics"
    received, sent = ((counters / f"{way}_bytes").read_text() for way in ("rx", "tx"))
    return int(received), int(sent)


class LiveView:
    """Shows progress on `screen`.

    `name` stands before each phase's, where several runs are one command. `interface` names the
    network interface whose use is shown; without one it is what the client itself received.
    """

    def __init__(
        self,
        screen: Screen,
        *,
        interface: str = "",
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._screen = screen
        self._interface = interface
        self._name = name
        self._clock = clock
        self._printed_s = float("-inf")
        self._phase = ""
        self._before: tuple[float, int, int, int] | None = None
        self._link_before: tuple[float, int, int] | None = None

    def update(self, phase: str, progress: Progress) -> None:
        phase = f"{self._name} {phase}".lstrip()
        if phase != self._phase:
            self._phase, self._before = phase, None
        rates = self._rates(progress)
        link = self._link()
        if self._screen.terminal:
            self._screen.show(self._dashboard(progress, rates, link))
        elif self._clock() - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = self._clock()
            self._screen.say(self._line(progress, rates, link))

    def _rates(self, progress: Progress) -> tuple[float, float, float]:
        """(sent, succeeded, bytes received) a second since the last update."""
        counts = progress.counts
        now = (progress.elapsed_s, sent_of(counts), counts.succeeded, progress.received_bytes)
        before, self._before = self._before or (0.0, 0, 0, 0), now
        span_s = max(now[0] - before[0], 1e-9)
        return tuple((a - b) / span_s for a, b in zip(now[1:], before[1:], strict=True))  # type: ignore[return-value]

    def _link(self) -> str:
        if not self._interface:
            return ""
        now = (self._clock(), *interface_bytes(self._interface))
        before, self._link_before = self._link_before, now
        if before is None:
            return f"{self._interface} -"
        span_s = max(now[0] - before[0], 1e-9)
        received, sent = ((now[at] - before[at]) * 8e-6 / span_s for at in (1, 2))
        return f"{self._interface} {number(received)} Mbit/s in, {number(sent)} out"

    def _line(self, progress: Progress, rates: tuple[float, float, float], link: str) -> str:
        counts = progress.counts
        return (
            f"{self._phase} {progress.elapsed_s:.0f} s: {sent_of(counts):,} sent "
            f"({number(rates[0])}/s), {counts.succeeded:,} succeeded ({number(rates[1])}/s), "
            f"{counts.failed:,} failed, {progress.in_flight:,} in flight, "
            f"TTFT P50 {_ms(progress, 'ttft', 0.5)} P99 {_ms(progress, 'ttft', 0.99)} ms"
            + (f", {link}" if link else "")
        )

    def _dashboard(
        self, progress: Progress, rates: tuple[float, float, float], link: str
    ) -> RenderableType:
        counts = progress.counts
        table = Table.grid(padding=(0, 2))
        table.add_row("phase", f"{self._phase}, {progress.elapsed_s:.0f} s")
        table.add_row("sent", f"{sent_of(counts):,}", f"{number(rates[0])}/s")
        table.add_row("succeeded", f"{counts.succeeded:,}", f"{number(rates[1])}/s")
        table.add_row("failed", Text(f"{counts.failed:,}", style="red" if counts.failed else ""))
        table.add_row("in flight", f"{progress.in_flight:,}")
        table.add_row("received", f"{number(rates[2] * 8e-6)} Mbit/s", link)
        histograms = progress.tally.histograms
        latencies = quantiles(
            "ms",
            [
                (label, histograms[name], 1e3)
                for label, name in (
                    ("TTFT", "ttft"),
                    ("TPOT", "tpot"),
                    ("E2E", "e2e"),
                    ("gap", "gap"),
                    ("own lateness", "lateness"),
                )
            ],
        )
        return Group(table, latencies, *failure_lines(progress.failures))


def _ms(progress: Progress, name: str, q: float) -> str:
    value = progress.tally.histograms[name].percentile(q)
    return number(None if value is None else value * 1e3)
