"""What the throughput model says of an experiment: capacities, thresholds, and figures of each phase.

Everything is in the units of the modelled system. Thresholds are searched with the `published` reading,
as the paper does; predictions that a run is held against use `work`, to which a queue converges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from harness.experiment import ConfigurationSpec, Experiment
from harness.measure import PhasePrediction
from harness.phases import CAPACITY, UNLOADED, Phase
from harness.planner import (
    Capacity,
    Deployment,
    LinkModel,
    Reading,
    Shape,
    Split,
    best_threshold,
    capacity,
    loaded_ttft,
    unloaded_ttft,
)
from harness.profiles import load_profile
from workloads.kinds import LogNormalLengths
from workloads.spec import TraceWorkload, length_distribution, trace_rows

_SHAPES = {
    "homogeneous": Shape.HOMOGENEOUS,
    "naive": Shape.NAIVE,
    "balanced": Shape.BALANCED,
}
#: The baseline of the comparison when an experiment has no homogeneous configuration.
_REFERENCE = ConfigurationSpec(name="homogeneous", policy="homogeneous", n_prefill=9, n_decode=3)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A configuration's threshold (None where it has none) and its capacity by the `work` reading."""

    deployment: Deployment
    capacity: Capacity
    threshold_tokens: float | None


def mean_output_tokens(experiment: Experiment) -> float:
    workload = experiment.workload
    if isinstance(workload, TraceWorkload):
        rows = islice(trace_rows(workload), 100_000)
        return float(np.mean([row.output_tokens for row in rows]))
    length = workload.output_tokens
    return length.distribution().mean() if isinstance(length, LogNormalLengths) else float(length)


def deployment_of(experiment: Experiment) -> Deployment:
    link = experiment.link
    return Deployment(
        lengths=length_distribution(experiment.workload),
        output_tokens=mean_output_tokens(experiment),
        local=load_profile(experiment.profiles.pd),
        remote=load_profile(experiment.profiles.prfaas),
        link=LinkModel(rate_gbps=link.rate_gbps, rtt_s=link.rtt_ms / 1e3),
        slo_tokens_per_s=experiment.slo.tokens_per_s,
        slo_tolerance=experiment.slo.tolerance,
    )


def shape_of(configuration: ConfigurationSpec) -> Shape:
    """How the throughput model sees a policy: everything that routes by length is a threshold."""
    shape = _SHAPES.get(configuration.policy, Shape.THRESHOLD)
    if shape is Shape.THRESHOLD and not configuration.n_prfaas:
        return Shape.HOMOGENEOUS
    return shape


def predict(
    experiment: Experiment, configuration: ConfigurationSpec, deployment: Deployment
) -> Prediction:
    shape = shape_of(configuration)
    split = Split(configuration.n_prfaas, configuration.n_prefill, configuration.n_decode)
    threshold = configuration.threshold_tokens
    if shape is not Shape.THRESHOLD:
        threshold = None
    elif threshold is None:
        threshold = float(
            best_threshold(deployment, split.n_prfaas, split.n_prefill, Reading.PUBLISHED)
        )
    return Prediction(
        deployment, capacity(deployment, shape, split, threshold, Reading.WORK), threshold
    )


def reference_capacity(experiment: Experiment, deployment: Deployment) -> float:
    """Homogeneous capacity (req/s), from which the common offered rate follows."""
    named = [each for each in experiment.configurations if each.policy == "homogeneous"]
    baseline = named[0] if named else _REFERENCE
    return predict(experiment, baseline, deployment).capacity.requests_per_s


def predict_phase(experiment: Experiment, prediction: Prediction, phase: Phase) -> PhasePrediction:
    """The figures of one phase; TTFT under load is the GI/G/k estimate of `planner.queueing`."""
    deployment, planned = prediction.deployment, prediction.capacity
    overloaded = phase.name == CAPACITY
    rate = planned.requests_per_s if overloaded else phase.request_rate
    sent_gbps = planned.egress_gbps / planned.requests_per_s
    tpot_s = deployment.local.decode_step_s(1, deployment.lengths.mean())
    common = PhasePrediction(
        throughput=rate,
        tpot_s=tpot_s,
        egress_gbps=sent_gbps * rate if planned.split.n_prfaas else None,
        offloaded_share=planned.offloaded_share,
    )
    if overloaded:
        return common
    if phase.name == UNLOADED:
        ttft = unloaded_ttft(planned.stages, deployment.lengths, deployment.link)
    else:
        arrival_cv = experiment.arrivals.burstiness**-0.5
        ttft = loaded_ttft(deployment, planned, phase.request_rate, arrival_cv)
    if math.isinf(ttft.mean_s):
        return common
    return replace(
        common,
        ttft_mean_s=ttft.mean_s,
        ttft_p50_s=ttft.p50_s,
        ttft_p90_s=ttft.p90_s,
        ttft_p99_s=ttft.p99_s,
    )
