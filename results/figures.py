"""The figures of a run that comparisons, history and trends work on, as a flat list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from results.summary import Latency, Measured, PhaseSummary, RunSummary


class Better(StrEnum):
    """Which direction of a metric is an improvement."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


#: metric -> (unit, which is better); the names that `--fail-on` and the history use.
METRICS: dict[str, tuple[str, Better]] = {
    "capacity": ("req/s", Better.HIGHER),
    "slo_rate": ("req/s", Better.HIGHER),
    "throughput": ("req/s", Better.HIGHER),
    "achieved_rate": ("req/s", Better.HIGHER),
    "goodput": ("share", Better.HIGHER),
    "succeeded_share": ("share", Better.HIGHER),
    "offloaded_share": ("share", Better.NEITHER),
    "egress_mean_gbps": ("Gbps", Better.NEITHER),
    "egress_peak_gbps": ("Gbps", Better.NEITHER),
    "queue": ("s", Better.LOWER),
    "prefill": ("s", Better.LOWER),
    "transfer": ("s", Better.LOWER),
    "decode_admission": ("s", Better.LOWER),
    **{
        f"{latency}_{statistic}": ("s/token" if latency == "tpot" else "s", Better.LOWER)
        for latency in ("ttft", "tpot", "e2e")
        for statistic in ("mean", "p50", "p90", "p99")
    },
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One value in paper units; `phase` is empty for figures of a whole configuration."""

    configuration: str
    phase: str
    metric: str
    value: float

    @property
    def unit(self) -> str:
        return METRICS[self.metric][0] if self.metric in METRICS else ""

    @property
    def better(self) -> Better:
        return METRICS[self.metric][1] if self.metric in METRICS else Better.LOWER

    @property
    def key(self) -> tuple[str, str, str]:
        return self.configuration, self.phase, self.metric


def _of_phase(phase: PhaseSummary) -> Iterator[tuple[str, float | None]]:
    for name in ("throughput", "achieved_rate", "goodput", "offloaded_share"):
        figure: Measured = getattr(phase, name)
        yield name, figure.paper
    if phase.counts.offered:
        yield "succeeded_share", phase.counts.succeeded / phase.counts.offered
    yield "egress_mean_gbps", phase.egress.mean_gbps.paper
    yield "egress_peak_gbps", phase.egress.peak_gbps.paper
    for part in ("queue", "prefill", "transfer", "decode_admission"):
        yield part, getattr(phase.ttft_split, f"{part}_s")
    for name in ("ttft", "tpot", "e2e"):
        latency: Latency = getattr(phase, name)
        for statistic in ("mean", "p50", "p90", "p99"):
            yield f"{name}_{statistic}", getattr(latency, statistic).paper


def figures(run: RunSummary) -> list[Figure]:
    """Every figure of `run` that has a value, in the order of the summary."""
    found = []
    for each in run.configurations:
        for name in ("capacity", "slo_rate"):
            value = getattr(each, name).paper
            if value is not None:
                found.append(Figure(each.name, "", name, value))
        for phase in each.phases:
            found += [
                Figure(each.name, phase.name, metric, value)
                for metric, value in _of_phase(phase)
                if value is not None
            ]
    return found
