"""What is in a workload: counts, lengths, rates, burstiness, prefix reuse; in bounded memory.

Lengths and gaps are counted by value, so quantiles are exact and memory grows with the number of
distinct lengths, not of requests. Prefix reuse keeps at most `max_blocks` blocks; `evicted_blocks`
says whether that made the cache a bounded one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from workloads.request import Request
from workloads.reuse import PrefixCache

MAX_BLOCKS = 1_000_000
QUANTILES = (0.5, 0.9, 0.99)
COUNT_WINDOW_S = 60.0
#: Stamps are quantised when so many of their steps are multiples of one (see `_quantum_s`).
_QUANTISED_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and quantiles of a length, tokens."""

    mean: float
    minimum: int
    p50: int
    p90: int
    p99: int
    maximum: int


@dataclass(frozen=True, slots=True)
class Description:
    """Times in s, lengths in tokens, rates in requests/s; None where there is too little to say.

    `gap_cv` is the coefficient of variation of the gaps between arrivals (1 for Poisson),
    `dispersion` the variance of counts in whole minutes over their mean (1 for Poisson).
    `hit_share` is the share of input tokens that an unbounded prefix cache holds;
    `above_threshold` the share of requests with more than `threshold_tokens` uncached tokens.
    `quantum_s` is the step that stamps are rounded to.
    """

    requests: int
    duration_s: float
    rate_rps: float | None
    peak_rate_rps: float | None
    gap_cv: float | None
    dispersion: float | None
    quantum_s: float | None
    input_tokens: Spread
    output_tokens: Spread
    uncached_tokens: Spread
    hit_share: float
    threshold_tokens: int
    above_threshold: float
    evicted_blocks: int
    in_sessions: int
    tenants: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def describe(
    requests: Iterable[Request], threshold_tokens: int = 19_400, max_blocks: int = MAX_BLOCKS
) -> Description:
    """Reads `requests` (in arrival order, at least one) once."""
    inputs: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    uncached: Counter[int] = Counter()
    tenants: Counter[str] = Counter()
    minutes: Counter[int] = Counter()
    steps: Counter[float] = Counter()
    cache = PrefixCache(max_blocks)
    count = in_sessions = 0
    gap_squares = 0.0
    first_s = last_s = 0.0
    for request in requests:
        arrival_s = request.arrival_s
        if count == 0:
            first_s = last_s = arrival_s
        gap = arrival_s - last_s
        gap_squares += gap * gap
        if gap > 0:
            steps[float(f"{gap:.2g}")] += 1
        last_s = arrival_s
        count += 1
        minutes[int((arrival_s - first_s) // COUNT_WINDOW_S)] += 1
        inputs[request.input_tokens] += 1
        outputs[request.output_tokens] += 1
        uncached[request.input_tokens - cache.serve(request)] += 1
        in_sessions += bool(request.session)
        if request.tenant:
            tenants[request.tenant] += 1
    if not count:
        raise ValueError("describe: needs at least one request")
    duration_s = last_s - first_s
    whole_minutes = int(duration_s // COUNT_WINDOW_S)
    total = sum(length * n for length, n in inputs.items())
    left = sum(length * n for length, n in uncached.items())
    return Description(
        requests=count,
        duration_s=duration_s,
        rate_rps=(count - 1) / duration_s if duration_s else None,
        peak_rate_rps=max(minutes.values()) / COUNT_WINDOW_S if whole_minutes else None,
        gap_cv=_cv(duration_s, gap_squares, count - 1),
        dispersion=_dispersion([minutes[i] for i in range(whole_minutes)]),
        quantum_s=_quantum_s(steps, count),
        input_tokens=_spread(inputs),
        output_tokens=_spread(outputs),
        uncached_tokens=_spread(uncached),
        hit_share=1 - left / total,
        threshold_tokens=threshold_tokens,
        above_threshold=sum(n for length, n in uncached.items() if length > threshold_tokens)
        / count,
        evicted_blocks=cache.evicted_blocks,
        in_sessions=in_sessions,
        tenants=dict(tenants.most_common(20)),
    )


def _spread(counts: Counter[int]) -> Spread:
    lengths = sorted(counts)
    total = counts.total()
    marks = [max(1, math.ceil(q * total)) for q in QUANTILES]
    found: list[int] = []
    seen = 0
    for length in lengths:
        seen += counts[length]
        while len(found) < len(marks) and seen >= marks[len(found)]:
            found.append(length)
    mean = sum(length * n for length, n in counts.items()) / total
    return Spread(mean, lengths[0], found[0], found[1], found[2], lengths[-1])


def _cv(total: float, squares: float, n: int) -> float | None:
    if n < 2 or total == 0:
        return None
    mean = total / n
    return math.sqrt(max(0.0, squares / n - mean * mean)) / mean


def _dispersion(counts: list[int]) -> float | None:
    if len(counts) < 10:
        return None
    mean = sum(counts) / len(counts)
    return sum((n - mean) ** 2 for n in counts) / (len(counts) - 1) / mean


def _quantum_s(steps: Counter[float], requests: int) -> float | None:
    """The commonest step between different stamps, when two requests or more share a stamp on
    average and nearly all steps are whole multiples of it (within 2 %)."""
    total = steps.total()
    if total < 20 or requests < 2 * total:
        return None
    quantum = steps.most_common(1)[0][0]
    whole = sum(
        n for step, n in steps.items() if step >= quantum and abs(step / quantum % 1 - 0.5) > 0.48
    )
    return quantum if whole >= _QUANTISED_SHARE * total else None
