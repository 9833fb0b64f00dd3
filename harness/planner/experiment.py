"""From an experiment file to the throughput model's terms."""

from __future__ import annotations

import numpy as np

from harness.experiment import ConfigurationSpec, Experiment
from harness.planner.link import LinkModel
from harness.planner.model import Capacity, Deployment, Reading, Shape, Split, capacity
from harness.planner.search import best_threshold
from harness.policies.operators import UncachedThreshold
from harness.policies.parameters import build
from harness.profiles import load_profile
from workloads.kinds import TraceWorkload, distribution_of
from workloads.spec import WorkloadSpec, length_distribution, trace_rows


def mean_output_tokens(workload: WorkloadSpec) -> float:
    """Mean output length; of a trace, of the rows that it selects."""
    if isinstance(workload, TraceWorkload):
        return float(np.mean([row.output_tokens for row in trace_rows(workload)]))
    return distribution_of(workload.output_tokens).mean()


def deployment_of(experiment: Experiment, *, bounded: bool = True) -> Deployment:
    """The experiment's traffic, profiles and link. Lengths are what an unbounded prefix cache
    leaves to compute, or whole without one; the link's rate is the nominal one of its start, None
    if not `bounded`."""
    link = experiment.link
    return Deployment(
        lengths=length_distribution(experiment.workload, uncached=experiment.cache.enabled),
        output_tokens=mean_output_tokens(experiment.workload),
        local=load_profile(experiment.profiles.pd),
        remote=load_profile(experiment.profiles.prfaas),
        link=LinkModel(link.rate_gbps if bounded else None, link.rtt_ms / 1000),
        slo_tokens_per_s=experiment.slo.tokens_per_s,
        slo_tolerance=experiment.slo.tolerance,
    )


def shape_of(policy: str) -> Shape:
    """The model's shape for a policy name; a policy that is not here has a threshold, or what comes
    near one."""
    fixed = {
        "homogeneous": Shape.HOMOGENEOUS,
        "naive": Shape.NAIVE,
        "balanced": Shape.BALANCED,
        "least-loaded": Shape.BALANCED,
    }
    return fixed.get(policy, Shape.THRESHOLD)


def arrival_cv(experiment: Experiment) -> float:
    """Coefficient of variation of the gaps of a steady arrival process; 1 for a trace's stamps."""
    arrivals = experiment.arrivals
    if arrivals.process == "constant":
        return 0.0
    return 1.0 / arrivals.burstiness**0.5


def plan_configuration(
    deployment: Deployment,
    configuration: ConfigurationSpec,
    reading: Reading = Reading.WORK,
    step_tokens: int = 100,
) -> Capacity:
    """The capacity of one configuration. Where it leaves the threshold open, the result's
    `threshold_tokens` is the best for its instances."""
    shape = shape_of(configuration.policy)
    split = Split(configuration.n_prfaas, configuration.n_prefill, configuration.n_decode)
    threshold = configuration.threshold_tokens
    if configuration.policy == "uncached-threshold":
        threshold = build(UncachedThreshold, configuration.parameters).uncached_tokens
    if shape is Shape.THRESHOLD and threshold is None:
        threshold = best_threshold(
            deployment, split.n_prfaas, split.n_prefill, reading, step_tokens
        )
    return capacity(deployment, shape, split, threshold, reading)
