"""Runs one phase against a fleet, and turns what was recorded into its figures.

The procedure is the same in every mode: requests on an absolute schedule, samples of what the link
counted, a window that leaves warm-up and drain out. Times of records are the loop's seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from harness.experiment import Experiment
from harness.fleets.base import Fleet
from harness.phases import CAPACITY, UNLOADED, Phase
from harness.ports import Link
from harness.replay import ReplayCounts, replay
from harness.router import Router
from harness.scale import Scale
from results import metrics
from results.records import RequestRecord
from results.summary import (
    NONE,
    Counts,
    Egress,
    Latency,
    Measured,
    PhaseSummary,
    Split,
    Window,
)
from workloads.request import Request
from workloads.spec import ArrivalSpec, generate


@dataclass(slots=True)
class PhaseData:
    """What a phase left: every request's record, and samples (loop s, bytes sent) of the egress."""

    phase: Phase
    records: list[RequestRecord] = field(default_factory=list)
    egress_times_s: list[float] = field(default_factory=list)
    egress_bytes: list[int] = field(default_factory=list)
    counts: ReplayCounts = field(default_factory=ReplayCounts)
    duration_s: float = 0.0


def phase_requests(experiment: Experiment, phase: Phase, scale: Scale) -> Iterator[Request]:
    """The requests of a phase, with arrivals in seconds of the loop.

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
        yield replace(request, arrival_s=scale.loop_s(request.arrival_s))


async def run_phase(
    experiment: Experiment,
    phase: Phase,
    fleet: Fleet,
    router: Router,
    on_record: Callable[[RequestRecord], None],
    stop: asyncio.Event | None = None,
) -> PhaseData:
    """Offer the phase's requests through `router` and wait until all have ended."""
    data = PhaseData(phase)
    loop = asyncio.get_running_loop()
    scale = fleet.scale
    origin_s = loop.time()

    def recorded(record: RequestRecord) -> None:
        data.records.append(record)
        on_record(record)

    egress = [link for (source, _), link in fleet.links.items() if source == "prfaas"]
    sampler = loop.create_task(
        _sample_egress(data, egress, origin_s, scale.loop_s(experiment.measure.sample_s))
    )
    try:
        data.counts = await replay(
            phase_requests(experiment, phase, scale),
            router.serve,
            recorded,
            origin_s=origin_s,
            stop=stop,
            drain_s=scale.loop_s(experiment.measure.drain_s),
        )
    finally:
        data.duration_s = loop.time() - origin_s
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
    return data


async def _sample_egress(
    data: PhaseData, links: list[Link], origin_s: float, interval_s: float
) -> None:
    if not links:
        return
    loop = asyncio.get_running_loop()
    before = sum(link.sent_bytes() for link in links)
    n = 0
    while True:
        data.egress_times_s.append(loop.time() - origin_s)
        data.egress_bytes.append(sum(link.sent_bytes() for link in links) - before)
        n += 1
        await asyncio.sleep(max(0.0, origin_s + n * interval_s - loop.time()))


@dataclass(frozen=True, slots=True)
class PhasePrediction:
    """What the throughput model says of a phase, in modelled units; None is not predicted."""

    throughput: float | None = None
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_s: float | None = None
    egress_gbps: float | None = None
    offloaded_share: float | None = None


def summarise_phase(
    data: PhaseData,
    experiment: Experiment,
    scale: Scale,
    link_bps: float,
    predicted: PhasePrediction,
) -> PhaseSummary:
    """The figures of a phase. Counts are over all its requests, the rest over its window:
    latencies of requests scheduled in it, throughput and egress of what happened in it.
    `link_bps` is the rate of the link as it ran.
    """
    phase = data.phase
    everything = metrics.from_records(data.records, remote=("prfaas",))
    start_s, end_s = scale.loop_s(phase.warmup_s), scale.loop_s(phase.duration_s)
    inside = everything.where(
        (everything.scheduled_s >= start_s) & (everything.scheduled_s <= end_s)
    )
    slo = experiment.slo
    slack = 1 + slo.tolerance
    limits = metrics.Slo(
        ttft_s=scale.loop_s(slo.ttft_s) * slack,
        tpot_s=scale.loop_s(scale.token_scale / slo.tokens_per_s) * slack,
    )
    split = {
        f"{name}_s": _paper_s(metrics.mean(samples), scale)
        for name, samples in metrics.ttft_split_s(inside).items()
    }
    throughput = metrics.throughput(metrics.completions_s(everything), start_s, end_s)
    tpot = metrics.tpot_s(inside)
    lateness = metrics.lateness_s(everything)
    return PhaseSummary(
        name=phase.name,
        counts=count(everything),
        offered_rate=_rate(metrics.offered_rate(everything), scale, phase.request_rate),
        admitted_rate=_rate(metrics.admitted_rate(everything), scale),
        achieved_rate=_rate(metrics.achieved_rate(everything), scale),
        throughput=_rate(throughput, scale, predicted.throughput),
        goodput=_plain(metrics.goodput(inside, limits)),
        ttft=_latency(
            metrics.ttft_s(inside),
            scale.time_scale,
            (
                predicted.ttft_mean_s,
                predicted.ttft_p50_s,
                predicted.ttft_p90_s,
                predicted.ttft_p99_s,
            ),
        ),
        tpot=_latency(tpot, scale.time_scale / scale.token_scale, (predicted.tpot_s,) * 4),
        e2e=_latency(metrics.e2e_s(inside), scale.time_scale, (None,) * 4),
        ttft_split=Split(**split),
        egress=_egress(data, scale, link_bps, start_s, end_s, predicted, experiment),
        offloaded_share=_plain(metrics.offloaded_share(inside), predicted.offloaded_share),
        window=Window(start_s, end_s),
        duration_s=data.duration_s,
        lateness_p99_s=metrics.percentile(lateness, 0.99),
    )


def capacity_of(phases: list[PhaseSummary]) -> Measured:
    """The throughput of the overloaded phase."""
    return next((phase.throughput for phase in phases if phase.name == CAPACITY), NONE)


def count(requests: metrics.Requests) -> Counts:
    """offered = succeeded + failed + unsent."""
    failed = ~requests.succeeded & ~requests.unsent
    one_chunk = requests.succeeded & np.isnan(metrics.tpot_s(requests))
    return Counts(
        offered=len(requests),
        succeeded=int(requests.succeeded.sum()),
        failed=int(failed.sum()),
        unsent=int(requests.unsent.sum()),
        truncated=int((failed & requests.truncated).sum()),
        retried=int((requests.attempts > 1).sum()),
        one_chunk=int(one_chunk.sum()),
        offloaded=int(requests.offloaded.sum()),
        verified=int(requests.verified.sum()),
        mismatched=int(requests.mismatched.sum()),
    )


def _egress(
    data: PhaseData,
    scale: Scale,
    link_bps: float,
    start_s: float,
    end_s: float,
    predicted: PhasePrediction,
    experiment: Experiment,
) -> Egress:
    peak_window_s = scale.loop_s(experiment.measure.sample_s)
    use = metrics.egress(
        np.array(data.egress_times_s),
        np.array(data.egress_bytes, dtype=np.float64),
        start_s,
        end_s,
        peak_window_s,
    )
    if use is None:
        return Egress()
    link_gbps = link_bps * 1e-9
    paper_link_gbps = scale.modelled_bps(link_bps) * 1e-9
    expected = predicted.egress_gbps

    def gbps(raw: float, prediction: float | None) -> Measured:
        return Measured(raw, scale.modelled_bps(raw * 1e9) * 1e-9, prediction, n=1)

    def share(raw: float, prediction: float | None) -> Measured:
        expected_share = None if prediction is None else prediction / paper_link_gbps
        return Measured(raw / link_gbps, raw / link_gbps, expected_share, n=1)

    return Egress(
        mean_gbps=gbps(use.mean_gbps, expected),
        peak_gbps=gbps(use.peak_gbps, None),
        mean_share=share(use.mean_gbps, expected),
        peak_share=share(use.peak_gbps, None),
        peak_window_s=use.peak_window_s,
    )


def _latency(
    samples: metrics.Floats, factor: float, predicted: tuple[float | None, ...]
) -> Latency:
    n = int((~np.isnan(samples)).sum())

    def measured(raw: float | None, prediction: float | None) -> Measured:
        return Measured(raw, None if raw is None else raw * factor, prediction, n=n)

    return Latency(
        measured(metrics.mean(samples), predicted[0]),
        *(
            measured(metrics.percentile(samples, q), prediction)
            for q, prediction in zip((0.5, 0.9, 0.99), predicted[1:], strict=True)
        ),
    )


def _rate(raw: float | None, scale: Scale, predicted: float | None = None) -> Measured:
    return Measured(raw, None if raw is None else scale.modelled_rate(raw), predicted, n=1)


def _plain(value: float | None, predicted: float | None = None) -> Measured:
    return Measured(value, value, predicted, n=1)


def _paper_s(raw_s: float | None, scale: Scale) -> float | None:
    return None if raw_s is None else scale.modelled_s(raw_s)
