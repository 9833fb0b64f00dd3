"""What a load run is, as configuration: its target, its workload, its schedule and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal
from zlib import crc32

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from harness.load.schedule import OpenSchedule, SessionSchedule
from harness.targets.base import TargetSpec
from results.metrics import Slo
from workloads.kinds import SessionsWorkload
from workloads.request import Request
from workloads.spec import ArrivalSpec, FixedWorkload, WorkloadSpec, generate

#: Schedules "all at once" are generated at this rate and then moved to 0.
_AT_ONCE_RPS = 1e6


class SloSpec(BaseModel):
    """Limits of the goodput, s; none is no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_s: PositiveFloat | None = None
    tpot_s: PositiveFloat | None = None
    e2e_s: PositiveFloat | None = None

    def limits(self) -> Slo:
        return Slo(self.ttft_s, self.tpot_s, self.e2e_s)


class LoadSpec(BaseModel):
    """One load run. Without a request rate and without a trace's times, requests leave as fast as
    `max_concurrency` lets them (a closed loop), or all at once where there is no cap.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: TargetSpec = TargetSpec()
    workload: WorkloadSpec = Field(
        default=FixedWorkload(input_tokens=1024, output_tokens=128), discriminator="kind"
    )
    arrivals: ArrivalSpec = ArrivalSpec()
    request_rate: PositiveFloat | None = None
    num_requests: PositiveInt | None = None
    duration_s: PositiveFloat | None = None
    max_concurrency: PositiveInt | None = None
    num_warmups: NonNegativeInt = 0
    sessions: Literal["open", "closed"] = "open"
    think_s: NonNegativeFloat | None = None
    slo: SloSpec = SloSpec()
    timeout_s: PositiveFloat = 6 * 3600.0
    drain_s: PositiveFloat = 600.0
    repeats: PositiveInt = 1
    processes: PositiveInt = 1
    seed: int = 0
    name: str = "load"

    @property
    def timed(self) -> bool:
        """Whether requests have times of their own."""
        return self.request_rate is not None or self.arrivals.process == "trace"

    @property
    def closed(self) -> bool:
        """Whether a request's time is when its place under the cap comes free."""
        return not self.timed and self.max_concurrency is not None

    def cap(self, index: int) -> int | None:
        """The share of client process `index` in the concurrency cap."""
        return self._share(self.max_concurrency, index)

    def target_of(self, index: int) -> TargetSpec:
        """The target as client process `index` has it: with its share of the connections."""
        share = self._share(self.target.max_connections, index)
        return self.target.model_copy(update={"max_connections": share})

    def _share(self, whole: int | None, index: int) -> int | None:
        if whole is None:
            return None
        base, extra = divmod(whole, self.processes)
        return base + (index < extra)


class PhaseSpec(BaseModel):
    """One phase of a run: `first_id` keeps its prompts apart from those of other phases."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    request_rate: float | None
    num_requests: int | None
    duration_s: float | None
    closed: bool
    seed: int
    first_id: int
    max_concurrency: int | None = None


#: Requests of a phase are numbered from its index times this.
IDS_A_PHASE = 100_000_000
#: Warm-up is numbered, and draws, as the phase of this index.
_WARMUP_SEED = 10_000
#: Warm-up requests in flight where the run itself has no cap, and not more client processes.
WARMUP_CONCURRENCY = 32


def measured_phase(
    spec: LoadSpec, name: str, index: int, request_rate: float | None = None
) -> PhaseSpec:
    """A phase of the run's own load, or at another rate. Each phase draws by a seed of its own, so
    that repeats are independent and find no prompts of each other in a server's prefix cache.
    """
    return PhaseSpec(
        name=name,
        request_rate=request_rate or spec.request_rate,
        num_requests=spec.num_requests,
        duration_s=spec.duration_s,
        closed=spec.closed and request_rate is None,
        seed=spec.seed + index,
        first_id=index * IDS_A_PHASE,
        max_concurrency=spec.max_concurrency,
    )


def warmup_phase(spec: LoadSpec) -> PhaseSpec:
    """Warm-up: a closed loop of `num_warmups` requests; under the run's cap where it has one."""
    return PhaseSpec(
        name="warmup",
        request_rate=None,
        num_requests=spec.num_warmups,
        duration_s=None,
        closed=True,
        seed=spec.seed + _WARMUP_SEED,
        first_id=_WARMUP_SEED * IDS_A_PHASE,
        # A client without a place under the cap would never send its share.
        max_concurrency=spec.max_concurrency or max(WARMUP_CONCURRENCY, spec.processes),
    )


def phase_requests(spec: LoadSpec, phase: PhaseSpec) -> Iterator[Request]:
    """All requests of a phase in arrival order. Raises InputError, also while it is consumed."""
    arrivals = spec.arrivals
    if phase.request_rate is None and (phase.closed or arrivals.process != "trace"):
        untimed = ArrivalSpec(process="constant")
        requests = generate(
            spec.workload, untimed, phase.seed, request_rate=_AT_ONCE_RPS, count=phase.num_requests
        )
        for request in requests:
            yield replace(request, id=phase.first_id + request.id, arrival_s=0.0)
        return
    if phase.request_rate is not None and arrivals.process == "trace":
        arrivals = ArrivalSpec(process="poisson")
    for request in generate(
        spec.workload,
        arrivals,
        phase.seed,
        request_rate=phase.request_rate,
        duration_s=phase.duration_s,
        count=phase.num_requests,
    ):
        yield replace(request, id=phase.first_id + request.id)


def share(requests: Iterator[Request], index: int, processes: int) -> Iterator[Request]:
    """What client process `index` sends: every so many-th request, but sessions as a whole."""
    if processes == 1:
        yield from requests
        return
    for number, request in enumerate(requests):
        at = crc32(request.session.encode()) if request.session else number
        if at % processes == index:
            yield request


def schedule_of(spec: LoadSpec, phase: PhaseSpec, index: int) -> OpenSchedule:
    """The schedule of client process `index` in `phase`."""
    mine = share(phase_requests(spec, phase), index, spec.processes)
    if spec.sessions == "closed" and not phase.closed:
        workload = spec.workload
        response_s = workload.response_s if isinstance(workload, SessionsWorkload) else 0.0
        return SessionSchedule(mine, response_s, spec.think_s)
    return OpenSchedule(mine)
