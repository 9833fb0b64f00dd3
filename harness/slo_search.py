"""The highest offered rate at which a configuration keeps the SLO, found by offering it some."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from harness.experiment import MeasureSpec, SloSpec
from harness.phases import SEARCH, Phase
from results.summary import PhaseSummary

#: Fewer requests would make the P90 of a low rate a matter of chance.
REQUESTS = 2000


async def highest_rate(
    probe: Callable[[Phase], Awaitable[PhaseSummary]],
    slo: SloSpec,
    measure: MeasureSpec,
    planned_per_s: float,
    tolerance: float = 0.01,
) -> float | None:
    """The highest rate (req/s) at which TTFT P90 and TPOT P90 keep the SLO, by bisection to
    `tolerance` of the planned capacity; None when not even a twentieth of that keeps it. `probe`
    runs a phase and gives its figures.
    """
    low, high = 0.05 * planned_per_s, 1.05 * planned_per_s
    best: float | None = None
    rate = low
    while True:
        window_s = max(measure.latency_window_s, REQUESTS / rate)
        phase = Phase(SEARCH, rate, measure.latency_warmup_s, window_s)
        if _holds(await probe(phase), slo):
            best = low = rate
        elif best is None:
            return None
        else:
            high = rate
        if high - low <= tolerance * planned_per_s:
            return best
        rate = (low + high) / 2


def _holds(summary: PhaseSummary, slo: SloSpec) -> bool:
    ttft_s, tpot_s = summary.ttft.p90.paper, summary.tpot.p90.paper
    return (
        ttft_s is not None
        and tpot_s is not None
        and ttft_s <= slo.ttft_s
        and tpot_s <= (1 + slo.tolerance) / slo.tokens_per_s
    )
