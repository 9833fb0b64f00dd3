"""What the throughput model says of an experiment: capacities, thresholds, and figures of each
phase.

Everything is in the units of the modelled system. Thresholds are searched with the `published`
reading, as the paper does; predictions that a run is held against use `work`, to which a queue
converges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.errors import BadInput
from harness.experiment import ConfigurationSpec, Experiment
from harness.links.shape import GOODPUT_SHARE
from harness.phases import CAPACITY, IDS_A_PHASE, UNLOADED, Phase, plan_phases
from harness.planner import Capacity, Deployment, Reading, loaded_ttft, tpot_s, unloaded_ttft
from harness.planner.experiment import arrival_cv, deployment_of, plan_configuration

#: The baseline of the comparison when an experiment has no homogeneous configuration.
_REFERENCE = ConfigurationSpec(name="homogeneous", policy="homogeneous", n_prefill=9, n_decode=3)

#: The requests that a phase may be expected to offer: arrivals at random can be more.
MOST_REQUESTS = IDS_A_PHASE * 9 // 10


@dataclass(frozen=True, slots=True)
class Prediction:
    """A configuration's threshold, None where it has none, and its `work` capacity."""

    deployment: Deployment
    capacity: Capacity
    threshold_tokens: float | None


def predict(configuration: ConfigurationSpec, deployment: Deployment) -> Prediction:
    """The threshold is the one given, else the best by the paper's reading; with it, capacity is by
    work, which a run converges to. Raises ProfileError."""
    published = plan_configuration(deployment, configuration, Reading.PUBLISHED)
    threshold = published.threshold_tokens
    resolved = configuration.model_copy(update={"threshold_tokens": threshold})
    return Prediction(deployment, plan_configuration(deployment, resolved, Reading.WORK), threshold)


def reference_capacity(experiment: Experiment, deployment: Deployment) -> float:
    """Homogeneous capacity (req/s), from which the common offered rate follows."""
    named = [each for each in experiment.configurations if each.policy == "homogeneous"]
    return predict(named[0] if named else _REFERENCE, deployment).capacity.requests_per_s


@dataclass(frozen=True, slots=True)
class Planned:
    """A configuration, what the model says of it, and the phases it will run."""

    configuration: ConfigurationSpec
    prediction: Prediction
    phases: tuple[Phase, ...]


def plan_experiment(experiment: Experiment) -> list[Planned]:
    """What a run of the experiment will do. Raises BadInput, or a workload's InputError."""
    deployment = deployment_of(experiment)
    reference = reference_capacity(experiment, deployment)
    planned = []
    for each in experiment.configurations:
        prediction = predict(each, deployment)
        capacity = prediction.capacity.requests_per_s
        if not 0 < capacity < math.inf or not reference > 0:
            raise BadInput(
                f"configurations.{each.name}: its planned capacity is {capacity:g} req/s "
                f"(homogeneous: {reference:g}), which no phase can offer a share of; a lower "
                "slo.tokens_per_s, other instance counts or shorter lengths would do"
            )
        phases = plan_phases(experiment.measure, capacity, reference)
        for phase in phases:
            _check_size(each, phase)
        planned.append(Planned(each, prediction, tuple(phases)))
    return planned


def _check_size(configuration: ConfigurationSpec, phase: Phase) -> None:
    """Raises BadInput for a phase whose requests would be numbered into the next one's."""
    expected = phase.request_rate * phase.duration_s
    if expected > MOST_REQUESTS:
        raise BadInput(
            f"configurations.{configuration.name}: phase {phase.name} would offer "
            f"{expected:.3g} requests ({phase.request_rate:.3g} req/s for {phase.duration_s:.3g} "
            f"s), at most {MOST_REQUESTS:,} would do; shorten the windows of [measure], or set "
            "measure.max_window_requests"
        )


def peak_rate(planned: list[Planned]) -> float:
    """The highest rate (req/s) that any phase offers."""
    return max(phase.request_rate for each in planned for phase in each.phases)


def predict_phase(
    experiment: Experiment, prediction: Prediction, phase: Phase
) -> Mapping[str, float]:
    """The model's figures of one phase by the names of `results.summarise.phase_summary`; TTFT
    under load is the GI/G/k estimate of `planner.queueing`.
    """
    deployment, planned = prediction.deployment, prediction.capacity
    overloaded = phase.name == CAPACITY
    rate = planned.requests_per_s if overloaded else phase.request_rate
    # One request at a time has a batch for itself.
    decoding = 0.0 if phase.name == UNLOADED else rate
    figures = {
        "throughput": rate,
        "offered_rate": phase.request_rate,
        "offloaded_share": planned.offloaded_share,
    }
    figures |= {
        f"tpot_{name}": tpot_s(deployment, planned.split.n_decode, decoding)
        for name in ("mean", "p50", "p90", "p99")
    }
    if planned.split.n_prfaas:
        egress_gbps = planned.egress_gbps / planned.requests_per_s * rate
        figures["egress_mean_gbps"] = egress_gbps
        if deployment.link.rate_gbps:
            payload_gbps = deployment.link.rate_gbps * GOODPUT_SHARE
            figures["egress_mean_share"] = egress_gbps / payload_gbps
    if overloaded:
        return figures
    if phase.name == UNLOADED:
        ttft = unloaded_ttft(planned.stages, deployment.lengths, deployment.link)
    else:
        ttft = loaded_ttft(deployment, planned, phase.request_rate, arrival_cv(experiment))
    if math.isfinite(ttft.mean_s):
        figures |= {
            "ttft_mean": ttft.mean_s,
            "ttft_p50": ttft.p50_s,
            "ttft_p90": ttft.p90_s,
            "ttft_p99": ttft.p99_s,
        }
    return figures
