"""What `prfaas plan` says about an experiment or a trace: each configuration, and the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.experiment import ConfigurationSpec
from harness.planner.experiment import plan_configuration
from harness.planner.link import LinkModel
from harness.planner.model import Capacity, Deployment, Reading, Shape, Split
from harness.planner.queueing import highest_rate, loaded_ttft
from harness.planner.search import SplitPoint, best_capacity, best_split, split_points
from harness.planner.ttft import Ttft, unloaded_ttft


@dataclass(frozen=True, slots=True)
class ConfigurationPlan:
    """One configuration in both readings; a threshold left open is each reading's own best.

    `loaded` is the GI/G/k estimate at `load_fraction` of its own capacity, `slo_rate_per_s` the
    highest rate at which that estimate keeps TTFT P90 within the SLO. All three are of `work`.
    """

    name: str
    work: Capacity
    published: Capacity
    unloaded: Ttft
    load_fraction: float
    loaded: Ttft
    slo_rate_per_s: float


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """The best threshold configuration, with the link's bound and without one. `splits`: as
    `split_points`, where they were asked for."""

    reading: Reading
    bounded: Capacity
    unbounded: Capacity
    splits: tuple[SplitPoint, ...]


def plan_all(
    deployment: Deployment,
    configurations: Sequence[ConfigurationSpec],
    *,
    ttft_slo_s: float,
    arrival_cv: float = 1.0,
    load_fraction: float = 0.8,
    step_tokens: int = 100,
) -> tuple[ConfigurationPlan, ...]:
    """Each configuration in order. `ttft_slo_s` bounds the P90 of its `slo_rate_per_s`,
    `arrival_cv` is of the gaps between requests, `step_tokens` the grid of thresholds."""
    plans = []
    for configuration in configurations:
        work = plan_configuration(deployment, configuration, Reading.WORK, step_tokens)
        plans.append(
            ConfigurationPlan(
                name=configuration.name,
                work=work,
                published=plan_configuration(
                    deployment, configuration, Reading.PUBLISHED, step_tokens
                ),
                unloaded=unloaded_ttft(work.stages, deployment.lengths, deployment.link),
                load_fraction=load_fraction,
                loaded=loaded_ttft(
                    deployment, work, load_fraction * work.requests_per_s, arrival_cv
                ),
                slo_rate_per_s=highest_rate(deployment, work, ttft_slo_s, arrival_cv),
            )
        )
    return tuple(plans)


def default_configurations(
    deployment: Deployment, n_prfaas: int, n_local: int, reading: Reading, step_tokens: int
) -> tuple[ConfigurationSpec, ...]:
    """The comparison when none is given, each at its best split: as many instances all local, all
    prefill remote, length-blind, and by threshold."""
    total = n_prfaas + n_local
    homogeneous = best_split(deployment, Shape.HOMOGENEOUS, 0, total, reading)
    balanced = best_split(deployment, Shape.BALANCED, n_prfaas, n_local, reading)
    threshold = best_capacity(deployment, n_prfaas, n_local, reading, step_tokens).split
    rows = (
        ("homogeneous", "homogeneous", homogeneous),
        ("naive", "naive", Split(n_prfaas, 0, n_local)),
        ("balanced", "balanced", balanced),
        ("prfaas", "prfaas-static", threshold),
    )
    return tuple(
        ConfigurationSpec(
            name=name,
            policy=policy,
            n_prfaas=split.n_prfaas,
            n_prefill=split.n_prefill,
            n_decode=split.n_decode,
        )
        for name, policy, split in rows
    )


def search_plan(
    deployment: Deployment,
    n_prfaas: int,
    n_local: int,
    reading: Reading,
    step_tokens: int,
    curves: bool,
) -> SearchPlan:
    """Eqs 7 and 8 by search over `n_local` instances and multiples of `step_tokens`. With `curves`
    also of other splits than the best."""
    bounded = best_capacity(deployment, n_prfaas, n_local, reading, step_tokens)
    splits = split_points(deployment, n_prfaas, n_local, reading, step_tokens) if curves else ()
    free = replace(deployment, link=replace(deployment.link, rate_gbps=None))
    unbounded = best_capacity(free, n_prfaas, n_local, reading, step_tokens)
    return SearchPlan(reading, bounded, unbounded, splits)


def describe_link(link: LinkModel) -> str:
    rate = "unbounded" if link.rate_gbps is None else f"{link.rate_gbps:g} Gbit/s"
    return f"{rate}, RTT {1000 * link.rtt_s:g} ms"


def to_json(value: Any) -> Any:
    """Dataclasses as plain JSON values; a number that is not finite becomes null."""
    return _plain(asdict(value) if hasattr(value, "__dataclass_fields__") else value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def capacity_json(result: Capacity) -> dict[str, Any]:
    """A capacity without its stages' profiles."""
    row: dict[str, Any] = to_json(replace(result, stages=()))
    del row["stages"]
    return row
