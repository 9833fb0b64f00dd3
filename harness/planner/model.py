"""The throughput model (Eqs 1 to 6 of arXiv:2604.15039) for any configuration. Pure functions.

A configuration is a list of prefill stages, each a pool of equal instances that serves a share of
the requests of a range of lengths, and one pool of decode instances. Capacity is the rate at
which the first of them, or the link, is full.

Two readings of "seconds a prefill takes". `published` is the paper's: T at the mean length.
`work` is what a queue needs: the mean of T over the lengths, E[T(L)]. T is convex, so `work` is
the lower capacity, and the one that a run converges to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.planner.cost import Operation, Prices, cost_per_hour, cost_per_request
from harness.planner.link import IDEAL_LINK, LinkModel
from harness.profiles import Profile, ProfileError
from workloads.lengths import LengthDistribution

GB = 1e9
NO_PRICES = Prices()


class Reading(StrEnum):
    """What a prefill takes: T(E[L]), as in the paper's equations, or E[T(L)], as in a queue."""

    PUBLISHED = "published"
    WORK = "work"


class Shape(StrEnum):
    """Which requests prefill where."""

    HOMOGENEOUS = "homogeneous"
    NAIVE = "naive"
    BALANCED = "balanced"
    THRESHOLD = "threshold"


@dataclass(frozen=True, slots=True)
class Split:
    """Instances: remote prefill, local prefill, local decode."""

    n_prfaas: int
    n_prefill: int
    n_decode: int

    def __str__(self) -> str:
        return f"{self.n_prfaas}/{self.n_prefill}/{self.n_decode}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Traffic, hardware and link; what a split and a threshold are searched for.

    `lengths` are those that are computed (uncached). `slo_tokens_per_s` bounds the decode batch
    (BS_max is the largest batch whose step keeps it); None takes the profile's `max_batch`.
    """

    lengths: LengthDistribution
    output_tokens: float
    local: Profile
    remote: Profile | None = None
    link: LinkModel = IDEAL_LINK
    slo_tokens_per_s: float | None = None
    slo_tolerance: float = 0.0
    prices: Prices = NO_PRICES

    def known_prices(self) -> Prices:
        """`prices`, with those of the profiles where it has none."""
        remote, local = self.prices.remote_per_hour, self.prices.local_per_hour
        if remote is None and self.remote is not None:
            remote = self.remote.price_per_hour
        if local is None:
            local = self.local.price_per_hour
        return Prices(remote, local, self.prices.egress_per_gb)


@dataclass(frozen=True, slots=True)
class Stage:
    """`n_instances` of `profile` prefill `share` of all requests, of lengths in (low, high].

    `prefill_s` is the mean time a request occupies an instance, `kv_bytes` the mean bytes it
    sends over the link (0 inside a cluster), `per_s` the rate the stage sustains (Eq 3 or 4).
    """

    cluster: str
    profile: Profile
    n_instances: int
    share: float
    low: float | None
    high: float | None
    prefill_s: float
    kv_bytes: float
    per_s: float
    link_bound: bool = False

    @property
    def remote(self) -> bool:
        return self.cluster == "prfaas"

    def rate_at_capacity(self) -> float:
        """Rate of *all* requests at which this stage is full."""
        return self.per_s / self.share if self.share > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Capacity:
    """Eq 6 with its parts. Rates are requests/s; a stage that serves nothing has rate None.

    `egress_gbps` and `cost_per_request` are at `requests_per_s`; the cost is in the profiles'
    currency, None when a price is missing, and counts instances and egress.
    """

    shape: Shape
    split: Split
    reading: Reading
    threshold_tokens: float | None
    prfaas_per_s: float | None
    prefill_per_s: float | None
    decode_per_s: float
    requests_per_s: float
    bottleneck: str
    offloaded_share: float
    egress_gbps: float
    egress_share: float | None
    cost_per_hour: float | None
    cost_per_request: float | None
    stages: tuple[Stage, ...]


def mean_prefill_s(
    deployment: Deployment,
    profile: Profile,
    low: float | None,
    high: float | None,
    reading: Reading,
) -> float:
    """Seconds a prompt of length in (low, high] takes, by `reading`; NaN for an empty range."""
    lengths = deployment.lengths
    if reading is Reading.WORK:
        return lengths.expect(profile.prefill_array_s, low, high)
    return profile.prefill_s(_mean_length(lengths, low, high))


def _mean_length(lengths: LengthDistribution, low: float | None, high: float | None) -> float:
    if low is not None and high is None:
        return lengths.mean_above(low)
    if high is not None and low is None:
        return lengths.mean_below(high)
    return lengths.mean()


def remote_stage(
    deployment: Deployment, n: int, share: float, low: float | None, reading: Reading
) -> Stage:
    """Eq 3: the slower of the instances and the link."""
    profile = deployment.remote
    if profile is None:
        raise ValueError("this configuration needs a remote profile")
    prefill_s = mean_prefill_s(deployment, profile, low, None, reading)
    kv_bytes = profile.kv_bytes(_mean_length(deployment.lengths, low, None))
    compute_per_s = n / prefill_s
    rate_gbps = deployment.link.rate_gbps
    link_per_s = math.inf if rate_gbps is None else rate_gbps * GB / 8 / kv_bytes
    return Stage(
        cluster="prfaas",
        profile=profile,
        n_instances=n,
        share=share,
        low=low,
        high=None,
        prefill_s=prefill_s,
        kv_bytes=kv_bytes,
        per_s=min(compute_per_s, link_per_s),
        link_bound=link_per_s < compute_per_s,
    )


def local_stage(
    deployment: Deployment, n: int, share: float, high: float | None, reading: Reading
) -> Stage:
    """Eq 4."""
    profile = deployment.local
    prefill_s = mean_prefill_s(deployment, profile, None, high, reading)
    return Stage("pd", profile, n, share, None, high, prefill_s, 0.0, n / prefill_s)


def prefill_stages(
    deployment: Deployment,
    shape: Shape,
    split: Split,
    threshold_tokens: float | None,
    reading: Reading,
) -> tuple[Stage, ...]:
    """The stages that serve any request at all."""
    n_remote, n_local = split.n_prfaas, split.n_prefill
    if shape is Shape.HOMOGENEOUS:
        return (local_stage(deployment, n_local, 1.0, None, reading),)
    if shape is Shape.NAIVE:
        return (remote_stage(deployment, n_remote, 1.0, None, reading),)
    if shape is Shape.BALANCED:
        return _balanced_stages(deployment, n_remote, n_local, reading)
    if threshold_tokens is None:
        raise ValueError("a threshold configuration needs threshold_tokens")
    share = deployment.lengths.tail(threshold_tokens)
    stages = []
    if share > 0:
        stages.append(remote_stage(deployment, n_remote, share, threshold_tokens, reading))
    if share < 1:
        stages.append(local_stage(deployment, n_local, 1 - share, threshold_tokens, reading))
    return tuple(stages)


def _balanced_stages(
    deployment: Deployment, n_remote: int, n_local: int, reading: Reading
) -> tuple[Stage, ...]:
    """Both clusters see the same lengths and share in proportion to what they sustain."""
    stages = []
    if n_remote:
        stages.append(remote_stage(deployment, n_remote, 1.0, None, reading))
    if n_local:
        stages.append(local_stage(deployment, n_local, 1.0, None, reading))
    total = sum(stage.per_s for stage in stages)
    return tuple(replace(stage, share=stage.per_s / total) for stage in stages)


def check_decodes(local: Profile) -> None:
    """Raises ProfileError when the local cluster's profile cannot decode."""
    if local.decode is None:
        raise ProfileError(
            f"profile {local.name}: decode is not profiled, and the local cluster must decode; "
            "give another, or a file with [decode]"
        )


def decode_batch(deployment: Deployment) -> int:
    """BS_max: the largest batch whose step keeps the SLO; 0 when none does.

    Raises ProfileError when the local profile cannot decode.
    """
    profile = deployment.local
    check_decodes(profile)
    if deployment.slo_tokens_per_s is None:
        return profile.max_batch
    bound_s = (1 + deployment.slo_tolerance) / deployment.slo_tokens_per_s
    each = _mean_context(deployment)
    fits = (
        batch
        for batch in range(profile.max_batch, 0, -1)
        if profile.decode_step_s(batch, batch * each) <= bound_s * (1 + 1e-12)
    )
    return next(fits, 0)


def decode_per_s(deployment: Deployment, n_decode: int) -> float:
    """Eq 5 with the mean context of a sequence in its step time."""
    batch = decode_batch(deployment)
    if batch == 0:
        return 0.0
    step_s = deployment.local.decode_step_s(batch, batch * _mean_context(deployment))
    return n_decode * batch / (step_s * deployment.output_tokens)


def tpot_s(deployment: Deployment, n_decode: int, requests_per_s: float) -> float:
    """Mean seconds between a request's tokens at a rate that `n_decode` instances share evenly.

    With no limit on the batch it would be Poisson (M/G/infinity), so a token shares its step with
    one sequence more than the mean batch B of an instance; by Little's law B is the rate times the
    output times the step. A step is linear in its batch: one equation for it, bounded by the step
    of the largest batch.
    """
    context = _mean_context(deployment)

    def step_s(batch: int) -> float:
        return deployment.local.decode_step_s(batch, batch * context)

    alone_s, each_s = step_s(1), step_s(2) - step_s(1)
    tokens_per_s = requests_per_s / n_decode * deployment.output_tokens
    most_s = step_s(max(1, decode_batch(deployment)))
    spare = 1.0 - tokens_per_s * each_s
    return min(alone_s / spare, most_s) if spare > 0.0 else most_s


def _mean_context(deployment: Deployment) -> float:
    return deployment.lengths.mean() + deployment.output_tokens / 2


def capacity(
    deployment: Deployment,
    shape: Shape,
    split: Split,
    threshold_tokens: float | None = None,
    reading: Reading = Reading.WORK,
) -> Capacity:
    """Eq 6 for one configuration. `threshold_tokens` is used by the threshold shape only."""
    if shape is not Shape.THRESHOLD:
        threshold_tokens = None
    stages = prefill_stages(deployment, shape, split, threshold_tokens, reading)
    decode = decode_per_s(deployment, split.n_decode)
    limits = [(decode, "decode")]
    for stage in stages:
        where = "link" if stage.link_bound else "prfaas" if stage.remote else "prefill"
        limits.append((stage.rate_at_capacity(), where))
    rate, bottleneck = min(limits)
    remote = next((stage for stage in stages if stage.remote), None)
    local = next((stage for stage in stages if not stage.remote), None)
    offloaded = 0.0 if remote is None else remote.share
    work = Operation(
        split.n_prfaas,
        split.n_prefill + split.n_decode,
        rate,
        0.0 if remote is None else offloaded * remote.kv_bytes / GB,
    )
    prices = deployment.known_prices()
    egress_gbps = rate * work.gb_per_request * 8
    bound = deployment.link.rate_gbps
    return Capacity(
        shape=shape,
        split=split,
        reading=reading,
        threshold_tokens=threshold_tokens,
        prfaas_per_s=None if remote is None else remote.per_s,
        prefill_per_s=None if local is None else local.per_s,
        decode_per_s=decode,
        requests_per_s=rate,
        bottleneck=bottleneck,
        offloaded_share=offloaded,
        egress_gbps=egress_gbps,
        egress_share=None if bound is None else egress_gbps / bound,
        cost_per_hour=cost_per_hour(work, prices),
        cost_per_request=cost_per_request(work, prices),
        stages=stages,
    )
