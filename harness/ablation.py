"""The ladder from no PrfaaS at all to all of it, one part a rung, on any experiment.

A rung is a configuration: a policy, the instances it needs, and which parts are on. Rungs build on
each other, so the difference of neighbours is what a part adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import BadInput
from harness.experiment import ConfigurationSpec, Experiment
from harness.phases import CAPACITY, LATENCY
from harness.policies.catalog import UNTHRESHOLDED, parameter_names
from results.summary import ConfigurationSummary, RunSummary

#: `prfaas` with every part off: the threshold alone.
_OFF: dict[str, float | int | bool | str] = {
    "short_term": False,
    "long_term": False,
    "copies": False,
    "affine": False,
    "band": 1.0,
}


@dataclass(frozen=True, slots=True)
class Rung:
    """`parts` are parameters that differ from all off; `adds` says what the rung adds."""

    name: str
    policy: str
    adds: str
    parts: tuple[str, ...] = ()


LADDER = (
    Rung("homogeneous", "homogeneous", "one cluster, its best split"),
    Rung("naive", "naive", "all prefill remote"),
    Rung("balanced", "balanced", "idle local instances prefill too, whatever the length"),
    Rung("threshold", "prfaas", "long prompts remote, short ones local (prfaas-static)"),
    Rung("short-term", "prfaas", "the threshold follows link and lengths", ("short_term",)),
    Rung("prefixes", "prfaas", "prefixes fetched across, instances by cache",
         ("short_term", "copies", "affine")),
    Rung("queues", "prfaas", "queues decide near the threshold (prices)",
         ("short_term", "copies", "affine", "band")),
    Rung("roles", "prfaas", "local roles follow the traffic: all of prfaas",
         ("short_term", "copies", "affine", "band", "long_term")),
    Rung("priced", "priced", "no threshold: shadow prices alone"),
)  # fmt: skip


def ladder_experiment(experiment: Experiment, names: Sequence[str] = ()) -> Experiment:
    """`experiment` with the rungs as configurations (only those in `names`, if any).

    Instances come from its first configuration that has both remote and local prefill, homogeneous'
    and naive's from theirs, if it has them. A rung's queue and parameters are those of the first
    configuration of its policy (for `prfaas` also `prfaas-static`), or else of the one that gives
    the instances; the threshold is the first that one of remote and local prefill has.
    """
    known = [rung.name for rung in LADDER]
    for name in names:
        if name not in known:
            raise BadInput(f"--rung {name}: there are {', '.join(known)}")
    rows = experiment.configurations
    full = next((row for row in rows if row.n_prfaas and row.n_prefill), None)
    if full is None:
        raise BadInput(
            f"{experiment.name}: no configuration has both n_prfaas and n_prefill; the ladder "
            "needs one to say how many instances there are"
        )
    rungs = [rung for rung in LADDER if not names or rung.name in names]
    quiet = {"load_fractions": (), "unloaded": False, "slo_search": False}
    return experiment.model_copy(
        update={
            "name": f"{experiment.name}-ladder",
            "configurations": tuple(_configuration(rung, full, rows) for rung in rungs),
            "measure": experiment.measure.model_copy(update=quiet),
        }
    )


def _configuration(
    rung: Rung, full: ConfigurationSpec, rows: Sequence[ConfigurationSpec]
) -> ConfigurationSpec:
    policies = [rung.policy, *(["prfaas-static"] if rung.policy == "prfaas" else [])]
    own = next((row for name in policies for row in rows if row.policy == name), None)
    queue = (own or full).queue
    has = parameter_names(rung.policy)
    parameters = {k: v for k, v in (own or full).parameters.items() if k in has}
    if rung.policy == "prfaas":
        parameters |= {k: v for k, v in _OFF.items() if k not in rung.parts}
    thresholds = [row.threshold_tokens for row in rows if row.n_prfaas and row.n_prefill]
    threshold = next((each for each in thresholds if each is not None), None)
    return full.model_copy(
        update={
            "name": rung.name,
            "policy": rung.policy,
            "threshold_tokens": None if rung.policy in UNTHRESHOLDED else threshold,
            "parameters": parameters,
            "queue": queue,
            **_instances(rung, full, own),
        }
    )


def _instances(
    rung: Rung, full: ConfigurationSpec, own: ConfigurationSpec | None
) -> dict[str, int]:
    """What differs from the counts of `full`."""
    if rung.policy not in ("homogeneous", "naive"):
        return {}
    if own is not None:
        return {name: getattr(own, name) for name in ("n_prfaas", "n_prefill", "n_decode")}
    n_local = full.n_prefill + full.n_decode
    if rung.policy == "naive":
        return {"n_prefill": 0, "n_decode": n_local}
    # As many devices as the others have, at the ratio the paper found best (9 of 12 prefill).
    n_all = full.n_prfaas + n_local
    n_prefill = max(1, round(0.75 * n_all))
    return {"n_prfaas": 0, "n_prefill": n_prefill, "n_decode": n_all - n_prefill}


@dataclass(frozen=True, slots=True)
class Step:
    """One rung in paper units; gains are over the rung before, None on the first."""

    name: str
    adds: str
    capacity: float | None
    ttft_mean_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    egress_gbps: float | None
    capacity_gain: float | None
    ttft_p90_gain: float | None
    ttft_p99_gain: float | None


def steps(summary: RunSummary) -> list[Step]:
    """The ladder that a run of `ladder_experiment` climbed."""
    adds = {rung.name: rung.adds for rung in LADDER}
    made: list[Step] = []
    for row in summary.configurations:
        before = made[-1] if made else None
        made.append(_step(row, adds.get(row.name, ""), before))
    return made


def _step(row: ConfigurationSummary, adds: str, before: Step | None) -> Step:
    latency, overloaded = row.phase(LATENCY), row.phase(CAPACITY)
    ttft = None if latency is None else latency.ttft
    capacity = None if overloaded is None else overloaded.throughput.paper
    p90 = None if ttft is None else ttft.p90.paper
    p99 = None if ttft is None else ttft.p99.paper
    return Step(
        name=row.name,
        adds=adds,
        capacity=capacity,
        ttft_mean_s=None if ttft is None else ttft.mean.paper,
        ttft_p90_s=p90,
        ttft_p99_s=p99,
        egress_gbps=None if latency is None else latency.egress.mean_gbps.paper,
        capacity_gain=_change(capacity, before.capacity if before else None),
        ttft_p90_gain=_change(p90, before.ttft_p90_s if before else None),
        ttft_p99_gain=_change(p99, before.ttft_p99_s if before else None),
    )


def _change(now: float | None, before: float | None) -> float | None:
    return None if now is None or not before else now / before - 1.0
