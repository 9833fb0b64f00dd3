"""Runs one phase against a fleet, and turns what was recorded into its figures.

The procedure is the same in every mode: requests on an absolute schedule, samples of what the link
counted, a window that leaves warm-up and drain out. Times of records are the loop's seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np

from harness.experiment import Experiment
from harness.fleets.base import Fleet
from harness.links.shape import GOODPUT_SHARE
from harness.phases import CAPACITY, UNLOADED, Phase
from harness.replay import ReplayCounts, replay
from harness.router import Router
from harness.sampling import EgressSamples, sample
from harness.scale import Scale
from harness.topology import PRFAAS
from results import metrics
from results.records import RequestRecord
from results.rows import InstanceRow, LinkRow
from results.summarise import LinkUse, phase_summary
from results.summary import NONE, Measured, PhaseSummary
from workloads.request import Request
from workloads.spec import ArrivalSpec, generate


@dataclass(slots=True)
class PhaseData:
    """What a phase left: every request's record, and samples of the egress."""

    phase: Phase
    records: list[RequestRecord] = field(default_factory=list)
    egress: EgressSamples = field(default_factory=EgressSamples)
    counts: ReplayCounts = field(default_factory=ReplayCounts)
    duration_s: float = 0.0


def phase_requests(
    experiment: Experiment,
    phase: Phase,
    scale: Scale,
    on_request: Callable[[Request], None] = lambda request: None,
) -> Iterator[Request]:
    """The requests of a phase, with arrivals in seconds of the loop; each is shown to `on_request`.

    They depend on the experiment's seed, the phase's rate and its length only, so that
    configurations at one rate meet the same requests at the same times.
    """
    arrivals = experiment.arrivals
    if phase.name == UNLOADED:
        arrivals = ArrivalSpec(process="constant")
    for request in generate(
        experiment.workload,
        arrivals,
        experiment.seed,
        request_rate=phase.request_rate,
        duration_s=phase.duration_s,
    ):
        placed = Request(
            phase.first_id + request.id,
            scale.loop_s(request.arrival_s),
            request.input_tokens,
            request.output_tokens,
            _own_blocks(request.block_ids, phase.first_id),
            request.block_tokens,
            request.session,
            request.tenant,
            request.slo_class,
        )
        on_request(placed)
        yield placed


def _own_blocks(block_ids: tuple[int, ...], first_id: int) -> tuple[int, ...]:
    """Other names for the same chain in each phase: no phase finds the prefixes of another."""
    salt = first_id << 24
    return tuple(block ^ salt for block in block_ids) if salt and block_ids else block_ids


async def run_phase(
    experiment: Experiment,
    phase: Phase,
    requests: Iterator[Request],
    fleet: Fleet,
    router: Router,
    on_record: Callable[[RequestRecord], None],
    on_link: Callable[[LinkRow], None],
    on_instance: Callable[[InstanceRow], None],
    stop: asyncio.Event | None = None,
    counts: ReplayCounts | None = None,
) -> PhaseData:
    """Offer the phase's requests through `router` and wait until all have ended. `counts` goes
    along with what is sent and ends.
    """
    data = PhaseData(phase, counts=counts or ReplayCounts())
    loop = asyncio.get_running_loop()
    scale = fleet.scale
    # A trace is opened and sorted for its first request: not on the clock.
    first = list(islice(requests, 1))
    origin_s = loop.time()

    def recorded(record: RequestRecord) -> None:
        data.records.append(record)
        on_record(record)

    interval_s = scale.loop_s(experiment.measure.sample_s)
    sampler = loop.create_task(
        sample(fleet, origin_s, interval_s, data.egress, on_link, on_instance)
    )
    try:
        await replay(
            chain(first, requests),
            router.serve,
            recorded,
            origin_s=origin_s,
            stop=stop,
            drain_s=scale.loop_s(experiment.measure.drain_s),
            timeout=fleet.timeout,
            counts=data.counts,
        )
    finally:
        data.duration_s = loop.time() - origin_s
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
    return data


def summarise_phase(
    data: PhaseData,
    experiment: Experiment,
    scale: Scale,
    link_bps: float,
    predicted: Mapping[str, float],
) -> PhaseSummary:
    """The figures of a phase. Counts and rates are over all its requests; latencies, goodput and
    the offloaded share over those scheduled in its window; throughput and egress over what happened
    in it. `link_bps` is the rate of the link as it ran.
    """
    phase = data.phase
    everything = metrics.from_records(data.records, remote=(PRFAAS,))
    window_s = (scale.loop_s(phase.warmup_s), scale.loop_s(phase.duration_s))
    scheduled_s = everything.scheduled_s
    inside = everything.where((scheduled_s >= window_s[0]) & (scheduled_s <= window_s[1]))
    slo = experiment.slo
    slack = 1 + slo.tolerance
    link = None
    egress = data.egress
    if egress.times_s and link_bps:
        # Real links count whole frames; the fluid one, as the model, counts payload.
        payload = 1.0 if experiment.mode == "simulate" else GOODPUT_SHARE
        sent_bytes = np.array(egress.sent_bytes, dtype=np.float64) * payload
        link = LinkUse(np.array(egress.times_s), sent_bytes, link_bps * payload * 1e-9)

    def figures(requests: metrics.Requests) -> PhaseSummary:
        return phase_summary(
            phase.name,
            requests,
            slo=metrics.Slo(
                ttft_s=scale.loop_s(slo.ttft_s) * slack,
                tpot_s=scale.loop_s(scale.token_scale / slo.tokens_per_s) * slack,
            ),
            scale=scale.recorded(),
            window_s=window_s,
            link=link,
            predicted=predicted,
            peak_window_s=scale.loop_s(experiment.measure.sample_s),
        )

    steady = figures(inside)
    return replace(
        figures(everything),
        goodput=steady.goodput,
        ttft=steady.ttft,
        tpot=steady.tpot,
        e2e=steady.e2e,
        ttft_split=steady.ttft_split,
        offloaded_share=steady.offloaded_share,
    )


def capacity_of(phases: list[PhaseSummary]) -> Measured:
    """The throughput of the overloaded phase."""
    return next((phase.throughput for phase in phases if phase.name == CAPACITY), NONE)
