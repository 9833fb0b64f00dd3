"""Evaluates one point of a study: a row per configuration and phase, alike in both modes.

`plan` rows come from the throughput model, `simulate` rows from a run on the virtual clock. All are
in the units of the modelled system. A figure that a phase does not have is None.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from harness import clock
from harness.comparison import Comparison, compare
from harness.experiment import ConfigurationSpec, Experiment
from harness.fleets.modelled import open_modelled
from harness.links.fluid import FlowLimits
from harness.phases import plan_phases
from harness.planner import Deployment, Reading, best_capacity, decode_batch, highest_rate
from harness.planner.cost import (
    Operation,
    Prices,
    break_even_egress_per_gb,
    break_even_remote_per_hour,
    cost_per_hour,
    cost_per_request,
)
from harness.planner.experiment import arrival_cv, deployment_of
from harness.prediction import plan_experiment, predict, predict_phase, reference_capacity
from harness.sweep.study import Point
from results.recorder import Recorder
from results.records import RequestRecord
from results.rows import DecisionRow, FlowRow, InstanceRow, LinkRow
from results.summary import ConfigurationSummary, PhaseSummary

BEST = "best"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration in one phase. Rates in requests/s, times in s, shares 0 to 1.

    `capacity_per_s` is of the configuration, whatever the phase: in `plan` the `work` reading, in
    `simulate` the measured throughput under overload. Costs are per request at capacity, and
    break-even prices those at which a request costs what it does in the first configuration
    without remote instances of the same point.
    """

    configuration: str
    phase: str
    threshold_tokens: float | None
    n_prfaas: int
    n_prefill: int
    n_decode: int
    decode_batch: int
    bottleneck: str
    capacity_per_s: float | None
    slo_rate_per_s: float | None
    offered_per_s: float | None
    throughput_per_s: float | None
    goodput: float | None
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    tpot_p90_s: float | None
    offloaded_share: float | None
    egress_gbps: float | None
    cost_per_hour: float | None = None
    cost_per_request: float | None = None
    break_even_remote_per_hour: float | None = None
    break_even_egress_per_gb: float | None = None


COLUMNS = tuple(field.name for field in fields(Row))


def evaluate(point: Point, best: bool) -> list[Row]:
    """The rows of a point, in the order of its configurations and their phases."""
    deployment = _deployment(point)
    # Whatever mode the file names: the way of measuring goes by it.
    experiment = point.experiment.model_copy(update={"mode": "simulate"})
    if best:
        experiment = _with_best(experiment, deployment)
    if point.mode == "plan":
        rows = _planned(experiment, deployment)
    else:
        rows = _simulated(experiment, deployment, dict(point.own))
    return _priced(rows, deployment)


def _deployment(point: Point) -> Deployment:
    own = dict(point.own)
    deployment = deployment_of(point.experiment)
    window_mib = own.get("tcp.window_mib")
    link = replace(
        deployment.link,
        window_bytes=None if window_mib in (None, float("inf")) else window_mib * MIB,
        connections=int(own.get("tcp.connections", FlowLimits().connections)),
    )
    prices = Prices(
        own.get("price.remote_per_hour"),
        own.get("price.local_per_hour"),
        own.get("price.egress_per_gb", 0.0),
    )
    return replace(deployment, link=link, prices=prices)


def _with_best(experiment: Experiment, deployment: Deployment) -> Experiment:
    """Adds the best threshold configuration of the most instances that any configuration with
    remote ones has, by the `work` reading; its queue is that configuration's."""
    remote = [row for row in experiment.configurations if row.n_prfaas]
    if not remote:
        return experiment
    n_prfaas = max(row.n_prfaas for row in remote)
    most = max(
        (row for row in remote if row.n_prfaas == n_prfaas),
        key=lambda row: row.n_prefill + row.n_decode,
    )
    n_local = most.n_prefill + most.n_decode
    found = best_capacity(deployment, n_prfaas, n_local, Reading.WORK)
    added = ConfigurationSpec(
        name=BEST,
        policy="prfaas-static",
        n_prfaas=n_prfaas,
        n_prefill=found.split.n_prefill,
        n_decode=found.split.n_decode,
        threshold_tokens=found.threshold_tokens,
        queue=most.queue,
    )
    return experiment.model_copy(update={"configurations": (*experiment.configurations, added)})


def _planned(experiment: Experiment, deployment: Deployment) -> list[Row]:
    rows = []
    reference = reference_capacity(experiment, deployment)
    for configuration in experiment.configurations:
        prediction = predict(configuration, deployment)
        planned = prediction.capacity
        if planned.requests_per_s == 0:
            rows.append(_row(configuration, deployment, "capacity", None, planned.bottleneck, 0.0))
            continue
        slo_rate = None
        if experiment.measure.slo_search:
            slo_rate = highest_rate(
                deployment, planned, experiment.slo.ttft_s, arrival_cv(experiment)
            )
        for phase in plan_phases(experiment.measure, planned.requests_per_s, reference):
            figures = predict_phase(experiment, prediction, phase)
            row = _row(
                configuration,
                deployment,
                phase.name,
                prediction.threshold_tokens,
                planned.bottleneck,
                planned.requests_per_s,
            )
            rows.append(
                replace(
                    row,
                    slo_rate_per_s=slo_rate,
                    offered_per_s=figures.get("offered_rate"),
                    throughput_per_s=min(figures["throughput"], planned.requests_per_s),
                    ttft_mean_s=figures.get("ttft_mean"),
                    ttft_p50_s=figures.get("ttft_p50"),
                    ttft_p90_s=figures.get("ttft_p90"),
                    ttft_p99_s=figures.get("ttft_p99"),
                    tpot_p90_s=figures.get("tpot_p90"),
                    offloaded_share=figures.get("offloaded_share"),
                    egress_gbps=figures.get("egress_mean_gbps"),
                )
            )
    return rows


def _row(
    configuration: ConfigurationSpec,
    deployment: Deployment,
    phase: str,
    threshold_tokens: float | None,
    bottleneck: str,
    capacity_per_s: float | None,
) -> Row:
    return Row(
        configuration=configuration.name,
        phase=phase,
        threshold_tokens=threshold_tokens,
        n_prfaas=configuration.n_prfaas,
        n_prefill=configuration.n_prefill,
        n_decode=configuration.n_decode,
        decode_batch=decode_batch(deployment),
        bottleneck=bottleneck,
        capacity_per_s=capacity_per_s,
        slo_rate_per_s=None,
        offered_per_s=None,
        throughput_per_s=None,
        goodput=None,
        ttft_mean_s=None,
        ttft_p50_s=None,
        ttft_p90_s=None,
        ttft_p99_s=None,
        tpot_p90_s=None,
        offloaded_share=None,
        egress_gbps=None,
    )


class _Discard(Recorder):
    """A sweep keeps figures, not requests."""

    def __init__(self) -> None:
        pass

    def request(self, record: RequestRecord, configuration: str, phase: str) -> None:
        pass

    def decision(self, row: DecisionRow, configuration: str, phase: str) -> None:
        pass

    def link(self, row: LinkRow, configuration: str, phase: str) -> None:
        pass

    def flow(self, row: FlowRow, configuration: str, phase: str) -> None:
        pass

    def instance(self, row: InstanceRow, configuration: str, phase: str) -> None:
        pass

    def flush(self) -> None:
        pass


def _simulated(experiment: Experiment, deployment: Deployment, own: dict[str, float]) -> list[Row]:
    batch = decode_batch(deployment)
    if batch == 0:
        # No batch keeps the SLO: there is nothing to run.
        return [
            _row(configuration, deployment, "capacity", None, "decode", 0.0)
            for configuration in experiment.configurations
        ]
    limits = FlowLimits(
        window_bytes=deployment.link.connections * (deployment.link.window_bytes or float("inf")),
        connections=deployment.link.connections,
    )
    open_fleet = partial(open_modelled, limits=limits, max_batch=batch)
    comparison = Comparison()
    plan = plan_experiment(experiment)
    clock.run(compare(experiment, plan, open_fleet, _Discard(), comparison))
    specs = {row.name: row for row in experiment.configurations}
    return [
        _measured(specs[summary.name], deployment, summary, phase)
        for summary in comparison.configurations
        for phase in summary.phases
    ]


def _measured(
    configuration: ConfigurationSpec,
    deployment: Deployment,
    summary: ConfigurationSummary,
    phase: PhaseSummary,
) -> Row:
    row = _row(
        configuration,
        deployment,
        phase.name,
        summary.threshold_tokens,
        summary.bottleneck,
        summary.capacity.paper,
    )
    ttft = phase.ttft
    return replace(
        row,
        slo_rate_per_s=summary.slo_rate.paper,
        offered_per_s=phase.offered_rate.paper,
        throughput_per_s=phase.throughput.paper,
        goodput=phase.goodput.paper,
        ttft_mean_s=ttft.mean.paper,
        ttft_p50_s=ttft.p50.paper,
        ttft_p90_s=ttft.p90.paper,
        ttft_p99_s=ttft.p99.paper,
        tpot_p90_s=phase.tpot.p90.paper,
        offloaded_share=phase.offloaded_share.paper,
        egress_gbps=phase.egress.mean_gbps.paper,
    )


def _priced(rows: list[Row], deployment: Deployment) -> list[Row]:
    """Adds costs, all at each configuration's capacity."""
    prices = deployment.known_prices()
    works = {row.configuration: _operation(rows, row.configuration) for row in rows}
    baseline = next((work for work in works.values() if work and not work.n_remote), None)
    priced = []
    for row in rows:
        work = works[row.configuration]
        if work is not None:
            row = replace(
                row,
                cost_per_hour=cost_per_hour(work, prices),
                cost_per_request=cost_per_request(work, prices),
            )
            if baseline is not None and work is not baseline:
                row = replace(
                    row,
                    break_even_remote_per_hour=break_even_remote_per_hour(work, baseline, prices),
                    break_even_egress_per_gb=break_even_egress_per_gb(work, baseline, prices),
                )
        priced.append(row)
    return priced


def _operation(rows: list[Row], name: str) -> Operation | None:
    """The configuration at its capacity; None when that is unknown or nothing."""
    row = next(row for row in rows if row.configuration == name)
    if not row.capacity_per_s:
        return None
    sent_gb = 0.0
    if row.egress_gbps and row.throughput_per_s:
        sent_gb = row.egress_gbps / 8 / row.throughput_per_s
    return Operation(row.n_prfaas, row.n_prefill + row.n_decode, row.capacity_per_s, sent_gb)


def as_record(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in COLUMNS}
