"""The definitions of every metric, as text and as function: the only place where they are made.

Times are of the run's loop clock and count from a request's *scheduled* arrival, so a late send or
a hidden queue is never lost. Latencies are over the requests that succeeded; `counts` tells of the
rest. Arrays are aligned with the requests; NaN is null.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from results.records import RequestRecord, Status

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: name -> (unit, definition); printed beside the figures, in reports and in docs/metrics.md.
DEFINITIONS: dict[str, tuple[str, str]] = {
    "ttft": ("s", "first token received - scheduled arrival; requests that succeeded"),
    "tpot": (
        "s/token",
        "(last token - first token) / (tokens received - 1); null when all tokens came at one "
        "instant (a single token, or an answer in one chunk)",
    ),
    "itl": (
        "s",
        "gap between one token and the next of the same request; where a server sends several "
        "tokens a chunk these are chunk gaps, and are called so",
    ),
    "e2e": ("s", "last token received - scheduled arrival; requests that succeeded"),
    "queue": ("s", "prefill started - scheduled arrival; lost attempts and late sends included"),
    "prefill": ("s", "prefill finished - prefill started"),
    "transfer": ("s", "whole cache committed at the decode side - prefill finished"),
    "decode_admission": ("s", "first token received - whole cache committed at the decode side"),
    "lateness": ("s", "sent - scheduled arrival"),
    "goodput": (
        "share",
        "requests that succeeded and met every SLO / all offered; the TPOT limit does not apply to "
        "an answer whose TPOT is null",
    ),
    "offered_rate": ("requests/s", "(offered - 1) / (last scheduled - first scheduled arrival)"),
    "admitted_rate": ("requests/s", "(sent - 1) / (last scheduled - first scheduled arrival)"),
    "achieved_rate": ("requests/s", "succeeded / (last end - first scheduled arrival)"),
    "throughput": (
        "requests/s",
        "(k - 1) / (last - first completion) over the k completions in the steady window",
    ),
    "percentile": (
        "",
        "nearest rank: the least sample with at least that share of samples at or below it; null "
        "below the sample floor of 1 / (1 - q) samples",
    ),
    "steady_window": (
        "s",
        "from the end of warm-up (MSER-5 cut of the gaps between completions) to the last "
        "scheduled arrival; none when it holds too few completions or never settles",
    ),
    "interval": ("", "95 % Student t interval of the mean over repeats of the run"),
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in the run's own units; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class Requests:
    """The columns of requests that metrics need, one entry a request, times in run seconds."""

    scheduled_s: Floats
    sent_s: Floats
    prefill_started_s: Floats
    prefill_finished_s: Floats
    delivered_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    ended_s: Floats
    tokens_asked: Floats
    tokens_received: Floats
    attempts: Floats
    succeeded: Bools
    unsent: Bools
    truncated: Bools
    offloaded: Bools
    verified: Bools
    mismatched: Bools

    def __len__(self) -> int:
        return len(self.scheduled_s)

    def where(self, mask: Bools) -> Requests:
        """The requests that `mask` selects."""
        return Requests(*(getattr(self, name)[mask] for name in self.__slots__))


TIMES = (
    "scheduled_s",
    "sent_s",
    "prefill_started_s",
    "prefill_finished_s",
    "delivered_s",
    "first_token_s",
    "last_token_s",
    "ended_s",
)


def from_records(records: Sequence[RequestRecord], remote: Collection[str] = ()) -> Requests:
    """Columns of `records`. `remote` names the prefill clusters on the far side of the link."""

    def numbers(values: Iterable[float | None]) -> Floats:
        return np.array(list(values), dtype=np.float64)

    def flags(values: Iterable[bool]) -> Bools:
        return np.fromiter(values, dtype=np.bool_, count=len(records))

    return Requests(
        **{name: numbers(getattr(each, name) for each in records) for name in TIMES},
        tokens_asked=numbers(each.output_tokens for each in records),
        tokens_received=numbers(each.tokens_received for each in records),
        attempts=numbers(each.attempts for each in records),
        succeeded=flags(each.status is Status.SUCCEEDED for each in records),
        unsent=flags(each.status is Status.UNSENT for each in records),
        truncated=flags(each.failure.startswith("truncated") for each in records),
        offloaded=flags(each.prefill_cluster in remote for each in records),
        verified=flags(each.verified is True for each in records),
        mismatched=flags(each.verified is False for each in records),
    )


def ttft_s(requests: Requests) -> Floats:
    return np.where(requests.succeeded, requests.first_token_s - requests.scheduled_s, np.nan)


def e2e_s(requests: Requests) -> Floats:
    return np.where(requests.succeeded, requests.last_token_s - requests.scheduled_s, np.nan)


def tpot_s(requests: Requests) -> Floats:
    span_s = requests.last_token_s - requests.first_token_s
    applies = requests.succeeded & (requests.tokens_received > 1) & (span_s > 0)
    return np.where(applies, span_s / np.maximum(requests.tokens_received - 1, 1), np.nan)


def lateness_s(requests: Requests) -> Floats:
    return requests.sent_s - requests.scheduled_s


def ttft_split_s(requests: Requests) -> dict[str, Floats]:
    """The four parts of TTFT by name; NaN where a request has no such times. They sum to TTFT."""
    edges = (
        requests.scheduled_s,
        requests.prefill_started_s,
        requests.prefill_finished_s,
        requests.delivered_s,
        requests.first_token_s,
    )
    names = ("queue", "prefill", "transfer", "decode_admission")
    return {
        name: np.where(requests.succeeded, edges[at + 1] - edges[at], np.nan)
        for at, name in enumerate(names)
    }


def met_slo(requests: Requests, slo: Slo) -> Bools:
    met = requests.succeeded.copy()
    if slo.ttft_s is not None:
        met &= ttft_s(requests) <= slo.ttft_s
    if slo.e2e_s is not None:
        met &= e2e_s(requests) <= slo.e2e_s
    if slo.tpot_s is not None:
        tpot = tpot_s(requests)
        # A token time is stored to the microsecond; a limit met exactly must not fail by rounding.
        met &= np.isnan(tpot) | (tpot <= slo.tpot_s + 1e-6)
    return met


def goodput(requests: Requests, slo: Slo) -> float | None:
    """Share of all offered requests that met every limit; None when none was offered."""
    return float(met_slo(requests, slo).mean()) if len(requests) else None


def sample_floor(q: float) -> int:
    """The fewest samples of which a `q` quantile (0..1) is reported."""
    return max(1, math.ceil(1.0 / (1.0 - q) - 1e-9))


def percentile(samples: Floats, q: float) -> float | None:
    """Nearest-rank `q` quantile (0 < q < 1) of the non-NaN samples; None below its floor."""
    present = samples[~np.isnan(samples)]
    count = len(present)
    if count < sample_floor(q):
        return None
    rank = max(1, math.ceil(q * count - 1e-9))
    return float(np.partition(present, rank - 1)[rank - 1])


def mean(samples: Floats) -> float | None:
    present = samples[~np.isnan(samples)]
    return float(present.mean()) if len(present) else None


def _rate(times_s: Floats, events: int) -> float | None:
    if events < 2:
        return None
    span_s = float(times_s.max() - times_s.min())
    return (events - 1) / span_s if span_s > 0 else None


def offered_rate(requests: Requests) -> float | None:
    return _rate(requests.scheduled_s, len(requests))


def admitted_rate(requests: Requests) -> float | None:
    return _rate(requests.scheduled_s, int((~np.isnan(requests.sent_s)).sum()))


def achieved_rate(requests: Requests) -> float | None:
    """Drain included, so it is at most the throughput that a steady window shows."""
    done = requests.succeeded
    if not done.any():
        return None
    span_s = float(np.nanmax(requests.ended_s) - requests.scheduled_s.min())
    return int(done.sum()) / span_s if span_s > 0 else None


def completions_s(requests: Requests) -> Floats:
    """Sorted times of the last tokens of the requests that succeeded."""
    return np.sort(requests.last_token_s[requests.succeeded])


def offloaded_share(requests: Requests) -> float | None:
    """Share of the requests that succeeded whose prompt was computed on the far side."""
    return (
        float(requests.offloaded[requests.succeeded].mean()) if requests.succeeded.any() else None
    )


def throughput(completed_s: Floats, start_s: float, end_s: float) -> float | None:
    """Completions a second within [start_s, end_s]; None with fewer than two at different times."""
    inside = completed_s[(completed_s >= start_s) & (completed_s <= end_s)]
    return _rate(inside, len(inside)) if len(inside) else None


@dataclass(frozen=True, slots=True)
class SteadyRules:
    """Warm-up may take `max_warmup_share` of the completions, in batches of `batch`; at least
    `min_completions` must be left. The rate of the two halves of what is left may differ by
    `max_drift` (share), or by more when that is within `drift_sigmas` standard errors of chance.
    """

    min_completions: int = 20
    max_warmup_share: float = 0.5
    batch: int = 5
    max_drift: float = 0.25
    drift_sigmas: float = 3.0


def mser_cut(samples: Floats, batch: int = 5, max_share: float = 0.5) -> int:
    """How many leading samples are warm-up: the cut, of at most `max_share` of the samples, after
    which the mean of the rest has the least standard error, in batches of `batch` (MSER-5, White
    1997). 0 with fewer than four batches.
    """
    batches = samples[: len(samples) // batch * batch].reshape(-1, batch).mean(axis=1)
    count = len(batches)
    if count < 4:
        return 0
    total = np.cumsum(batches[::-1])[::-1]
    squares = np.cumsum(batches[::-1] ** 2)[::-1]
    left = np.arange(count, 0, -1, dtype=np.float64)
    error = (squares - total**2 / left) / left**2
    return int(np.argmin(error[: int(max_share * count) + 1])) * batch


def settled(gaps_s: Floats, rules: SteadyRules) -> bool:
    """Whether the completion rate of the second half of `gaps_s` is that of the first."""
    first, second = np.array_split(gaps_s, 2)
    if len(second) < 2:
        return False
    difference = abs(float(first.mean() - second.mean()))
    if difference <= rules.max_drift * float(gaps_s.mean()):
        return True
    error = float(first.var(ddof=1) / len(first) + second.var(ddof=1) / len(second)) ** 0.5
    return difference <= rules.drift_sigmas * error


def steady_window(
    requests: Requests, rules: SteadyRules = SteadyRules()
) -> tuple[float, float] | None:
    """(start_s, end_s) of the steady window, or None. Before it is warm-up, after it drain.

    Warm-up is cut from the completions before the last scheduled arrival, by MSER-5 on their gaps;
    after that arrival the load is gone and the run drains.
    """
    if not len(requests):
        return None
    end_s = float(requests.scheduled_s.max())
    completed_s = completions_s(requests)
    completed_s = completed_s[completed_s <= end_s]
    if len(completed_s) < rules.min_completions:
        return None
    cut = mser_cut(np.diff(completed_s), rules.batch, rules.max_warmup_share)
    kept = completed_s[cut:]
    if len(kept) < rules.min_completions or not settled(np.diff(kept), rules):
        return None
    return float(kept[0]), end_s


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student t interval of the mean of independent repeats; None with fewer than two."""
    from scipy.stats import t

    if len(values) < 2:
        return None
    array = np.asarray(values, dtype=np.float64)
    half = float(
        t.ppf(0.5 + confidence / 2, len(array) - 1) * array.std(ddof=1) / len(array) ** 0.5
    )
    return float(array.mean()) - half, float(array.mean()) + half


@dataclass(frozen=True, slots=True)
class EgressUse:
    """Bytes over a link in a window of run time, as the link counted them; rates in Gbps."""

    mean_gbps: float
    peak_gbps: float
    peak_window_s: float


def egress(
    times_s: Floats, sent_bytes: Floats, start_s: float, end_s: float, peak_window_s: float = 1.0
) -> EgressUse | None:
    """Mean over [start_s, end_s] and peak over any `peak_window_s` in it, from counter samples.

    The counter is interpolated between samples; None when they do not span a part of the window.
    """
    if len(times_s) < 2:
        return None
    low, high = max(start_s, float(times_s[0])), min(end_s, float(times_s[-1]))
    if high <= low:
        return None
    at_edges = np.interp([low, high], times_s, sent_bytes)
    mean_gbps = float(at_edges[1] - at_edges[0]) * 8e-9 / (high - low)
    width_s = min(peak_window_s, high - low)
    # A moving mean of a piecewise linear counter is greatest with an edge at a sample.
    starts = np.concatenate((times_s, times_s - width_s, [low]))
    starts = starts[(starts >= low) & (starts <= high - width_s)]
    moved = np.interp(starts + width_s, times_s, sent_bytes) - np.interp(
        starts, times_s, sent_bytes
    )
    peak_gbps = max(mean_gbps, float(moved.max(initial=0.0)) * 8e-9 / width_s)
    return EgressUse(mean_gbps, peak_gbps, width_s)
