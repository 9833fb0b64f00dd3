"""Zero-queue TTFT: what a request waits for when nothing is ahead of it. Exact, by quadrature.

Time to the first token is prefill, and for a request that crosses the link the arrival of its cache
(see `harness.planner.link.delivery_s`). TTFT grows with length in every stage, so the share of
requests under x is a sum of length probabilities, and quantiles of the mixture follow by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from harness.planner.link import IDEAL_LINK, LinkModel, delivery_s
from harness.planner.model import Stage
from harness.profiles.curves import FloatArray
from workloads.lengths import LengthDistribution

_BISECTIONS = 45


@dataclass(frozen=True, slots=True)
class Ttft:
    """Seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


def stage_ttft(stage: Stage, link: LinkModel, tokens: FloatArray) -> FloatArray:
    """Zero-queue TTFT of prompts of `tokens` in `stage`, seconds."""
    if stage.remote and link != IDEAL_LINK:
        return delivery_s(stage.profile, link, tokens)
    return stage.profile.prefill_array_s(tokens)


def unloaded_ttft(
    stages: Sequence[Stage], lengths: LengthDistribution, link: LinkModel = IDEAL_LINK
) -> Ttft:
    """Mean and quantiles over all requests. The default link adds nothing, as in the paper."""
    mean_s = 0.0
    for stage in stages:
        of_length = partial(stage_ttft, stage, link)
        mean_s += stage.share * lengths.expect(of_length, stage.low, stage.high)
    return Ttft(mean_s, *(_quantile(stages, lengths, link, q) for q in (0.5, 0.9, 0.99)))


def _quantile(
    stages: Sequence[Stage], lengths: LengthDistribution, link: LinkModel, q: float
) -> float:
    longest = np.array([lengths.quantile(1.0)])
    low = 0.0
    high = max(float(stage_ttft(stage, link, longest)[0]) for stage in stages)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        under = sum(stage.share * _share_under(stage, lengths, link, middle) for stage in stages)
        if under >= q:
            high = middle
        else:
            low = middle
    return high


def _share_under(
    stage: Stage, lengths: LengthDistribution, link: LinkModel, seconds: float
) -> float:
    """P(TTFT <= seconds | the request belongs to the stage)."""
    least = 0.0 if stage.low is None else stage.low
    most = lengths.quantile(1.0) if stage.high is None else stage.high
    low, high = least, most
    if stage_ttft(stage, link, np.array([most]))[0] <= seconds:
        return 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if stage_ttft(stage, link, np.array([middle]))[0] <= seconds:
            low = middle
        else:
            high = middle
    below = 0.0 if stage.low is None else lengths.cdf(stage.low)
    above = 1.0 if stage.high is None else lengths.cdf(stage.high)
    return (lengths.cdf(low) - below) / (above - below) if low > least else 0.0
