"""The same experiment on real processes and in virtual time, figure by figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from results.summary import ConfigurationSummary, Measured, RunSummary
from results.table import number

#: Largest relative difference that the figures of `bench` are promised to keep; None: shown only.
LIMITS: dict[str, float | None] = {
    "capacity, req/s": 0.03,
    "TTFT mean, s": 0.08,
    "TTFT P50, s": None,
    "TTFT P90, s": 0.08,
    "TPOT mean, ms": None,
    "egress mean, Gbps": None,
    "offloaded, %": None,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of one configuration in units of the modelled system."""

    configuration: str
    figure: str
    emulated: float
    simulated: float
    limit: float | None

    @property
    def relative(self) -> float:
        """emulated / simulated - 1."""
        return self.emulated / self.simulated - 1.0

    @property
    def kept(self) -> bool:
        return self.limit is None or abs(self.relative) <= self.limit


def differences(emulated: RunSummary, simulated: RunSummary) -> list[Difference]:
    """Every figure that both runs have, in the order of the configurations."""
    found = []
    for one in emulated.configurations:
        other = simulated.configuration(one.name)
        if other is None:
            continue
        theirs = dict(_figures(other, simulated.latency_phase))
        for name, value in _figures(one, emulated.latency_phase):
            reference = theirs.get(name)
            if reference:
                found.append(Difference(one.name, name, value, reference, LIMITS[name]))
    return found


def _figures(configuration: ConfigurationSummary, phase_name: str) -> Iterator[tuple[str, float]]:
    measured: dict[str, tuple[Measured, float]] = {"capacity, req/s": (configuration.capacity, 1)}
    phase = configuration.phase(phase_name)
    if phase is not None:
        measured |= {
            "TTFT mean, s": (phase.ttft.mean, 1),
            "TTFT P50, s": (phase.ttft.p50, 1),
            "TTFT P90, s": (phase.ttft.p90, 1),
            "TPOT mean, ms": (phase.tpot.mean, 1e3),
            "egress mean, Gbps": (phase.egress.mean_gbps, 1),
            "offloaded, %": (phase.offloaded_share, 100),
        }
    for name, (figure, factor) in measured.items():
        if figure.paper is not None:
            yield name, figure.paper * factor


#: Headings of `cells`.
HEADER = ("configuration", "figure", "emulate", "simulate", "difference", "limit")


def cells(row: Difference) -> list[str]:
    """One line of a table of differences."""
    limit = "-"
    if row.limit is not None:
        limit = f"{row.limit:.0%}" + ("" if row.kept else "  EXCEEDED")
    return [
        row.configuration,
        row.figure,
        number(row.emulated),
        number(row.simulated),
        f"{row.relative:+.1%}",
        limit,
    ]
