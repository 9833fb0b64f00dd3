"""Which phases a configuration runs, and at which offered rates. Pure; in modelled units."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.experiment import MeasureSpec

CAPACITY, LATENCY, UNLOADED = "capacity", "latency", "unloaded"
#: Phases of the search for the SLO's rate: measured, not recorded.
SEARCH = "search"


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests arrive at `request_rate` for warmup_s + window_s; figures are from the window."""

    name: str
    request_rate: float
    warmup_s: float
    window_s: float
    #: Requests of a phase are numbered from here: prompts of two phases never repeat.
    first_id: int = 0

    @property
    def duration_s(self) -> float:
        return self.warmup_s + self.window_s


def plan_phases(measure: MeasureSpec, capacity: float, reference: float) -> list[Phase]:
    """The phases of a configuration of planned `capacity`, where `reference` is homogeneous'.

    All configurations meet the same latency phase: the same requests at the same times.
    """
    common = measure.request_rate or measure.rate_fraction * reference
    phases = [
        Phase(
            CAPACITY,
            measure.capacity_rate or measure.overload * capacity,
            measure.capacity_warmup_s,
            measure.capacity_window_s,
        ),
        Phase(LATENCY, common, measure.latency_warmup_s, measure.latency_window_s),
    ]
    phases += [
        Phase(
            load_phase(fraction),
            fraction * capacity,
            measure.latency_warmup_s,
            measure.latency_window_s,
        )
        for fraction in measure.load_fractions
    ]
    if measure.unloaded:
        phases.append(Phase(UNLOADED, UNLOADED_RATE, 0.0, UNLOADED_REQUESTS / UNLOADED_RATE))
    if measure.max_window_requests is not None:
        phases = [_shortened(phase, measure.max_window_requests) for phase in phases]
    return [replace(phase, first_id=i * IDS_A_PHASE) for i, phase in enumerate(phases)]


def _shortened(phase: Phase, requests: int) -> Phase:
    return replace(phase, window_s=min(phase.window_s, requests / phase.request_rate))


def load_phase(fraction: float) -> str:
    """Name of the phase at this fraction of a configuration's own capacity."""
    return f"load-{fraction:g}"


#: One request a minute is alone in the system whatever its length; enough of them for a P90.
UNLOADED_RATE = 1 / 60
UNLOADED_REQUESTS = 2000

IDS_A_PHASE = 10_000_000
