"""Requests and link samples of one phase to its `PhaseSummary`: metrics, then units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from results import metrics
from results.metrics import Floats, Requests, Slo
from results.summary import (
    NONE,
    Counts,
    Egress,
    Latency,
    Measured,
    PhaseSummary,
    Scale,
    Split,
    Window,
)


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Samples of a link's byte counter in a phase (run seconds, bytes) and its rate (run units)."""

    times_s: Floats
    sent_bytes: Floats
    rate_gbps: float


def counts(requests: Requests, scale: Scale = Scale()) -> Counts:
    """Whole numbers only; offered = succeeded + failed + unsent by construction."""
    asked = np.ceil(requests.tokens_asked / scale.tokens)
    done = requests.succeeded
    sent_and_failed = ~done & ~requests.unsent
    return Counts(
        offered=len(requests),
        succeeded=int(done.sum()),
        failed=int(sent_and_failed.sum()),
        unsent=int(requests.unsent.sum()),
        short=int((done & (requests.tokens_received < asked)).sum()),
        truncated=int((sent_and_failed & requests.truncated).sum()),
        retried=int((requests.attempts > 1).sum()),
        one_chunk=int((done & np.isnan(metrics.tpot_s(requests))).sum()),
        offloaded=int((done & requests.offloaded).sum()),
        verified=int(requests.verified.sum()),
        mismatched=int(requests.mismatched.sum()),
    )


def _latency(samples: Floats, factor: float, name: str, predicted: Mapping[str, float]) -> Latency:
    count = int((~np.isnan(samples)).sum())

    def one(statistic: str, raw: float | None) -> Measured:
        paper = None if raw is None else raw * factor
        return Measured(raw, paper, predicted.get(f"{name}_{statistic}"), n=count)

    return Latency(
        mean=one("mean", metrics.mean(samples)),
        p50=one("p50", metrics.percentile(samples, 0.50)),
        p90=one("p90", metrics.percentile(samples, 0.90)),
        p99=one("p99", metrics.percentile(samples, 0.99)),
    )


def phase_summary(
    name: str,
    requests: Requests,
    *,
    slo: Slo = Slo(),
    scale: Scale = Scale(),
    window_s: tuple[float, float] | None = None,
    link: LinkUse | None = None,
    predicted: Mapping[str, float] | None = None,
    peak_window_s: float = 1.0,
) -> PhaseSummary:
    """Figures of one phase.

    Counts, rates, goodput and latencies are over all its requests; throughput and egress, and
    nothing else, over `window_s`, the steady window as (start, end) in run seconds. Without a
    window throughput is empty and egress is over the time from first arrival to last end. `slo` is
    in run units. `predicted` holds the model's figures in paper units by name: "throughput",
    "offered_rate", "goodput", "offloaded_share", "egress_mean_gbps", "egress_mean_share", and
    "ttft_mean", "ttft_p90", "tpot_mean", "e2e_p99", ... for latencies.
    """
    model = predicted or {}
    tokens_factor = scale.time / scale.tokens

    def rate(raw: float | None, key: str) -> Measured:
        return Measured(raw, scale.per_second(raw), model.get(key), n=len(requests))

    def plain(raw: float | None, key: str) -> Measured:
        return Measured(raw, raw, model.get(key), n=len(requests))

    measured_rate = None
    if window_s is not None:
        measured_rate = metrics.throughput(metrics.completions_s(requests), *window_s)
    parts = metrics.ttft_split_s(requests)
    started_s = float(np.nanmin(requests.scheduled_s)) if len(requests) else 0.0
    ended_s = _latest(requests.ended_s)
    span_s = window_s or (started_s, started_s if ended_s is None else ended_s)
    return PhaseSummary(
        name=name,
        counts=counts(requests, scale),
        offered_rate=rate(metrics.offered_rate(requests), "offered_rate"),
        admitted_rate=rate(metrics.admitted_rate(requests), "admitted_rate"),
        achieved_rate=rate(metrics.achieved_rate(requests), "achieved_rate"),
        throughput=rate(measured_rate, "throughput") if measured_rate is not None else NONE,
        goodput=plain(metrics.goodput(requests, slo), "goodput"),
        ttft=_latency(metrics.ttft_s(requests), scale.time, "ttft", model),
        tpot=_latency(metrics.tpot_s(requests), tokens_factor, "tpot", model),
        e2e=_latency(metrics.e2e_s(requests), scale.time, "e2e", model),
        ttft_split=Split(
            **{f"{part}_s": scale.seconds(metrics.mean(each)) for part, each in parts.items()}
        ),
        egress=_egress(link, span_s, scale, model, peak_window_s),
        offloaded_share=plain(metrics.offloaded_share(requests), "offloaded_share"),
        window=None if window_s is None else Window(*window_s),
        duration_s=None if ended_s is None else ended_s - started_s,
        lateness_p99_s=metrics.percentile(metrics.lateness_s(requests), 0.99),
    )


def _latest(times_s: Floats) -> float | None:
    present = times_s[~np.isnan(times_s)]
    return float(present.max()) if len(present) else None


def _egress(
    link: LinkUse | None,
    span_s: tuple[float, float],
    scale: Scale,
    model: Mapping[str, float],
    peak_window_s: float,
) -> Egress:
    if link is None:
        return Egress()
    use = metrics.egress(link.times_s, link.sent_bytes, *span_s, peak_window_s)
    if use is None:
        return Egress()

    def gbps(raw: float, key: str) -> Measured:
        return Measured(raw, scale.gbps(raw), model.get(key), n=len(link.times_s))

    def share(raw_gbps: float, key: str) -> Measured:
        value = raw_gbps / link.rate_gbps if link.rate_gbps else None
        return Measured(value, value, model.get(key), n=len(link.times_s))

    return Egress(
        mean_gbps=gbps(use.mean_gbps, "egress_mean_gbps"),
        peak_gbps=gbps(use.peak_gbps, "egress_peak_gbps"),
        mean_share=share(use.mean_gbps, "egress_mean_share"),
        peak_share=share(use.peak_gbps, "egress_peak_share"),
        peak_window_s=use.peak_window_s,
    )
