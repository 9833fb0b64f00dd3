"""Compares the configurations of an experiment, one after the other, by the same procedure.

Each configuration gets a fleet of its own. Its phases run one after the other, each until
all its requests have ended, so that offered = succeeded + failed + unsent in each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from harness.control import Control
from harness.experiment import ConfigurationSpec, Experiment
from harness.fleets.base import Fleet, OpenFleet
from harness.links.fluid import FluidLink
from harness.live import LivePhase, Say, TtftLines, Watch, watched
from harness.measure import (
    PhaseData,
    capacity_of,
    phase_requests,
    run_phase,
    summarise_phase,
)
from harness.phase_recorder import PhaseRecorder
from harness.phases import UNLOADED, Phase
from harness.policies import Decision
from harness.policies.catalog import WEIGHING
from harness.prediction import Planned, Prediction, predict_phase
from harness.router import RetryRules, Router
from harness.slo_search import highest_rate
from harness.topology import PRFAAS
from harness.verification import Sample
from harness.view import View
from results.recorder import Recorder
from results.records import RequestRecord, Status
from results.rows import LinkRow
from results.summary import ConfigurationSummary, Latency, Measured, PhaseSummary
from workloads.request import Request

#: Workers are asked for their audit rows this often: as much of it dies with a worker.
AUDIT_S = 2.0


@dataclass(slots=True)
class Comparison:
    """What a comparison found, filled in phase by phase, so that an interrupted one keeps what it
    has. Capacities are also given relative to that of the configuration named `baseline`.

    Once `stop` is set, no request is sent any more: the rest is unsent, what is in flight ends.
    """

    configurations: list[ConfigurationSummary] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    baseline: str = ""
    common_rate: float = 0.0
    interrupted: bool = False
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, summary: ConfigurationSummary) -> None:
        """Add a configuration, or replace what was known of it."""
        known = [*(each for each in self.configurations if each.name != summary.name), summary]
        capacity = next((each.capacity for each in known if each.name == self.baseline), None)
        self.configurations = [_with_ratio(each, capacity) for each in known]


async def compare(
    experiment: Experiment,
    plan: list[Planned],
    open_fleet: OpenFleet,
    recorder: Recorder,
    result: Comparison,
    say: Say = lambda line: None,
    watch: Watch | None = None,
    on_phase: Callable[[], None] = lambda: None,
) -> None:
    """Run all configurations of the plan, one after the other, into `result`. In real time `watch`
    is shown each phase while it runs; without it, lines are said. `on_phase` is called when a phase
    has ended and its figures are in `result`.
    """
    watch = watch or TtftLines(say)
    specs = [planned.configuration for planned in plan]
    result.baseline = next((each.name for each in specs if each.policy == "homogeneous"), "")
    for planned in plan:
        if result.stop.is_set():
            break
        await _configuration(
            experiment, planned, open_fleet, recorder, say, watch, result, on_phase
        )
    result.interrupted = result.stop.is_set()


async def _configuration(
    experiment: Experiment,
    planned: Planned,
    open_fleet: OpenFleet,
    recorder: Recorder,
    say: Say,
    watch: Watch,
    result: Comparison,
    on_phase: Callable[[], None],
) -> None:
    configuration, prediction = planned.configuration, planned.prediction
    phases, deployment = planned.phases, prediction.deployment
    result.common_rate = phases[1].request_rate
    fleet = await open_fleet(experiment, configuration)
    control: Control | None = None
    loop = asyncio.get_running_loop()
    origin_s, began_s = loop.time(), {}
    try:
        threshold = prediction.threshold_tokens
        control = Control(configuration, threshold or 0.0, deployment, fleet, experiment.workload)
        run = _Run(
            experiment, configuration, prediction, fleet, control, recorder, result.stop, watch
        )
        summaries: list[PhaseSummary] = []
        control.start()
        for phase in phases:
            if result.stop.is_set():
                break
            say(f"{configuration.name}: {phase.name} at {phase.request_rate:.2f} req/s")
            began_s[phase.name] = round(fleet.scale.modelled_s(loop.time() - origin_s), 3)
            summaries.append(await run.phase(phase))
            result.put(_summarised(planned, summaries))
            on_phase()
        slo_rate = Measured()
        if experiment.measure.slo_search and not result.stop.is_set():
            say(f"{configuration.name}: searching the highest rate at which the SLO holds")
            planned_per_s = prediction.capacity.requests_per_s
            found = await highest_rate(run.probe, experiment.slo, experiment.measure, planned_per_s)
            if not result.stop.is_set():  # else the last probes say nothing
                slo_rate = Measured(paper=found, n=1)
        await run.audit()
        facts = fleet.facts() | control.facts() | {"phase_began_s": began_s}
    finally:
        if control is not None:
            await control.close()
        await fleet.close()
    result.facts[configuration.name] = facts
    result.put(_summarised(planned, summaries, slo_rate, facts))


def _summarised(
    planned: Planned,
    phases: list[PhaseSummary],
    slo_rate: Measured = Measured(),
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> ConfigurationSummary:
    """What is known of a configuration after these phases."""
    configuration, prediction = planned.configuration, planned.prediction
    unloaded = next((each for each in phases if each.name == UNLOADED), None)
    weighing = configuration.policy in WEIGHING
    return ConfigurationSummary(
        name=configuration.name,
        n_prfaas=configuration.n_prfaas or None,
        n_p=configuration.n_prefill or None,
        n_d=configuration.n_decode,
        threshold_tokens=None if weighing else prediction.threshold_tokens,
        capacity=capacity_of(phases),
        zero_queue_ttft=unloaded.ttft if unloaded else Latency(),
        slo_rate=slo_rate,
        bottleneck=prediction.capacity.bottleneck,
        phases=tuple(phases),
        pacing_overruns=int(facts.get("pacing_overruns", 0)),
        paced_steps=int(facts.get("paced_steps", 0)),
        stalled_s=float(facts.get("stalled_s", 0.0)),
    )


class _Run:
    """One configuration's fleet under load: a router for it, and its phases."""

    def __init__(
        self,
        experiment: Experiment,
        configuration: ConfigurationSpec,
        prediction: Prediction,
        fleet: Fleet,
        control: Control,
        recorder: Recorder,
        stop: asyncio.Event,
        watch: Watch,
    ) -> None:
        self._experiment = experiment
        self._watch = watch
        self._live: LivePhase | None = None
        self._name = configuration.name
        self._prediction = prediction
        self._fleet = fleet
        self._control = control
        self._rows = PhaseRecorder(recorder, configuration.name)
        self._stop = stop
        self._router = Router(
            control.policy,
            fleet.view,
            fleet.instances,
            fleet.links,
            RetryRules(patience_s=fleet.patience_s),
            on_decision=self._decided,
            prefixes=fleet.prefixes,
            copier=fleet.copier,
        )
        if experiment.measure.flow_rates:
            for ends, link in fleet.links.items():
                assert isinstance(link, FluidLink)
                link.trace(partial(self._rows.flow, "->".join(ends)))

    def link_bps(self) -> float:
        """Rate of the egress direction as it runs; 0 without one."""
        return next(
            (
                link.signals.rate_bps
                for (source, _), link in self._fleet.links.items()
                if source == PRFAAS
            ),
            0.0,
        )

    async def phase(self, phase: Phase) -> PhaseSummary:
        verify = self._fleet.verify
        sample = Sample(self._experiment.emulate, phase)
        held: list[RequestRecord] = []

        def ended(record: RequestRecord) -> None:
            if record.token_ids is not None and sample.holds(record.id):
                held.append(record)
            else:
                self._rows.request(record)

        data = await self._measure(phase, ended, sample.note)
        for record in held:
            if verify and record.token_ids is not None and record.status is Status.SUCCEEDED:
                record.verified = await verify(sample.requests[record.id], record.token_ids)
            self._rows.request(record)
        self._rows.flush()
        return self._summary(data)

    async def probe(self, phase: Phase) -> PhaseSummary:
        """Figures of a phase whose requests are neither recorded nor verified."""
        return self._summary(await self._measure(phase, lambda record: None))

    async def _measure(
        self,
        phase: Phase,
        on_record: Callable[[RequestRecord], None],
        on_request: Callable[[Request], None] = lambda request: None,
    ) -> PhaseData:
        loop = asyncio.get_running_loop()
        self._rows.begin(phase.name, loop.time())
        requests = phase_requests(self._experiment, phase, self._fleet.scale, on_request)
        live = self._live = LivePhase(self._name, phase, self._fleet.scale)

        def recorded(record: RequestRecord) -> None:
            live.record(record)
            on_record(record)

        # In virtual time a phase is over before anybody looks.
        simulated = self._experiment.mode == "simulate"
        watcher = None if simulated else loop.create_task(watched(live, self._watch))
        ended = asyncio.Event()
        auditor = None if simulated else loop.create_task(self._audit_until(ended))
        try:
            return await run_phase(
                self._experiment,
                phase,
                requests,
                self._fleet,
                self._router,
                on_record if simulated else recorded,
                self._link_sampled,
                self._rows.instance,
                self._stop,
                live.counts,
            )
        finally:
            if watcher is not None:
                watcher.cancel()
            if auditor is not None:
                # Cancelled in the middle of an answer, it would lose the rows in it.
                ended.set()
                await auditor

    async def _audit_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), AUDIT_S)
            await self.audit()

    async def audit(self) -> None:
        """Write what the fleet says of the caches that crossed since it was last asked; those of
        the search, too."""
        for row in await self._fleet.audit():
            self._rows.audit(row)

    def _link_sampled(self, row: LinkRow) -> None:
        if self._live is not None:
            self._live.link(row)
        self._rows.link(row)

    def _summary(self, data: PhaseData) -> PhaseSummary:
        link_bps = self.link_bps()
        return summarise_phase(
            data,
            self._experiment,
            self._fleet.scale,
            link_bps,
            predict_phase(self._experiment, self._prediction, data.phase),
        )

    def _decided(self, record: RequestRecord, decision: Decision, view: View) -> None:
        self._control.observe(record, decision, view)
        self._rows.decision(record, decision, view)


def _with_ratio(summary: ConfigurationSummary, baseline: Measured | None) -> ConfigurationSummary:
    capacity = summary.capacity
    if baseline is None or not baseline.paper or capacity.paper is None:
        return summary
    ratio = capacity.paper / baseline.paper
    predicted = (
        capacity.predicted / baseline.predicted
        if capacity.predicted and baseline.predicted
        else None
    )
    return replace(summary, capacity_ratio=Measured(ratio, ratio, predicted, n=1))
