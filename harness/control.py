"""The control plane of one configuration: its policy, and the schedulers that move it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from harness.errors import BadInput
from harness.experiment import ConfigurationSpec, Experiment
from harness.fleets.base import Fleet
from harness.planner import Deployment
from harness.policies import Decision, Policy
from harness.policies.catalog import SCHEDULED, UNTHRESHOLDED, make_policy
from harness.policies.parameters import build
from harness.policies.prfaas import Controls
from harness.schedulers.long_term import LongTerm, LongTermRules
from harness.schedulers.roles import Roles
from harness.schedulers.short_term import ShortTerm, ShortTermRules
from harness.schedulers.traffic import Traffic, TrafficWindow, foreseen
from harness.topology import PD, PRFAAS
from harness.view import View
from results.records import RequestRecord
from workloads.kinds import DriftWorkload
from workloads.spec import WorkloadSpec


def check_control(experiment: Experiment) -> None:
    """Raises BadInput where a configuration has a policy, parameter or threshold that would not do,
    or would do nothing. For all that runs or plans an experiment, before it does."""
    for each in experiment.configurations:
        make_policy(each.policy, 0.0, each.parameters)
        if each.policy in UNTHRESHOLDED and each.threshold_tokens is not None:
            own = " (but uncached_tokens)" if each.policy == "uncached-threshold" else ""
            raise BadInput(
                f"configurations.{each.name}.threshold_tokens: found {each.threshold_tokens:g}, "
                f"but policy {each.policy} has none{own}; leave it out"
            )
        if each.policy in SCHEDULED and build(LongTermRules, each.parameters).foresight:
            _check_foresight(each, experiment.workload)


def _check_foresight(configuration: ConfigurationSpec, workload: WorkloadSpec) -> DriftWorkload:
    if not isinstance(workload, DriftWorkload):
        raise BadInput(f"{configuration.name}: foresight needs workload kind 'drift'")
    return workload


class Control:
    """`policy` routes; `observe` sees each decision; schedulers run from `start` to `close`."""

    def __init__(
        self,
        configuration: ConfigurationSpec,
        threshold_tokens: float,
        deployment: Deployment,
        fleet: Fleet,
        workload: WorkloadSpec,
    ) -> None:
        self.controls = Controls(threshold_tokens)
        scale, parameters = fleet.scale, configuration.parameters
        self.policy: Policy = make_policy(
            configuration.policy, threshold_tokens, parameters, scale, self.controls
        )
        #: (modelled second, what a scheduler did), in order.
        self.actions: list[tuple[float, str]] = []
        self._scale = scale
        self._began_s = asyncio.get_running_loop().time()
        self._tasks: list[asyncio.Task[None]] = []
        self._seen: TrafficWindow | None = None
        self._short: ShortTerm | None = None
        self._long: LongTerm | None = None
        if configuration.policy not in SCHEDULED:
            return
        short = build(ShortTermRules, parameters, scale)
        long = build(LongTermRules, parameters, scale)
        self._seen = TrafficWindow(long.window_s, long.trend_window_s, long.trend_significance)
        traffic: Callable[[float], Traffic | None] = self._seen.traffic
        if long.foresight:
            traffic = self._foresight(self._seen, _check_foresight(configuration, workload))
        view = fleet.view
        follower = ShortTerm(
            short,
            self.controls,
            view,
            (PRFAAS, PD),
            deployment,
            traffic,
            scale,
            self._note,
        )
        if short.short_term:
            self._short = follower
        if long.long_term:
            self._long = LongTerm(
                long,
                Roles(view, fleet.instances, PD, long.conversion_s),
                lambda: view.prefill[PRFAAS].n_usable() if PRFAAS in view.prefill else 0,
                deployment,
                traffic,
                scale,
                follower.bandwidth_gbps,
                self._note,
                short.least_samples,
            )

    def observe(self, record: RequestRecord, decision: Decision, view: View) -> None:
        """Lengths that arrive, once a request."""
        if self._seen is not None and record.attempts == 1:
            incremental = record.input_tokens - decision.cached_tokens
            self._seen.note(view.now_s, incremental, record.output_tokens)

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._short is not None:
            self._tasks.append(loop.create_task(self._watch(self._short)))
        if self._long is not None:
            self._tasks.append(loop.create_task(self._plan(self._long)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def facts(self) -> dict[str, Any]:
        """What the schedulers did, in modelled seconds since the first phase began."""
        if self._seen is None:
            return {}
        return {"scheduling": [[round(time_s, 3), what] for time_s, what in self.actions]}

    def _foresight(
        self, seen: TrafficWindow, workload: DriftWorkload
    ) -> Callable[[float], Traffic | None]:
        def traffic(now_s: float) -> Traffic | None:
            modelled_s = self._scale.modelled_s(now_s - self._began_s)
            return foreseen(seen, workload, now_s, modelled_s)

        return traffic

    def _note(self, what: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self.actions.append((self._scale.modelled_s(now_s - self._began_s), what))

    async def _watch(self, short: ShortTerm) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(short.rules.watch_interval_s)
            short.look(loop.time())

    async def _plan(self, long: LongTerm) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(long.rules.plan_interval_s)
            await long.plan(loop.time())
