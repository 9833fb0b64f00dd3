"""Minutes: how many local instances prefill and how many decode, for the traffic that is seen.

At each plan the best split and threshold are searched for the lengths, as they would be now, the
outputs and the bandwidth that were seen. One instance is converted at a time, and only when the
planned gain is worth it, has been for several plans in a row, and the present split is under
pressure; a conversion is not taken back for a while, and then for more than it took to make it.
So a plan that wavers between two near-equal splits converts next to nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from harness.planner import Deployment, SplitPoint, search
from harness.policies.parameters import parameter
from harness.ports import Role
from harness.scale import Scale
from harness.schedulers.roles import Roles
from harness.schedulers.traffic import Traffic


@dataclass(frozen=True, slots=True)
class LongTermRules:
    """Windows and levels of the long-term scheduler."""

    long_term: bool = parameter(True, "run the long-term scheduler")
    plan_interval_s: float = parameter(60.0, "how often the split is planned", least=0.001)
    window_s: float = parameter(
        600.0, "requests of so long give the offered rate and the outputs", least=0.001
    )
    trend_window_s: float = parameter(
        2400.0,
        "lengths of so long count, for t too, moved to now along their trend; with no more than "
        "window_s, those of window_s as they are",
        least=0.0,
    )
    trend_significance: float = parameter(
        2.0, "a trend of the lengths counts from so many of its standard errors on", least=0.0
    )
    least_gain: float = parameter(
        0.01, "planned gain in capacity that a conversion must promise", least=0.0
    )
    reversal_gain: float = parameter(0.02, "and one that takes the last conversion back", least=0.0)
    confirmations: int = parameter(3, "plans in a row that must agree on the direction", least=1)
    reversal_s: float = parameter(
        900.0, "for so long after a conversion none goes the other way", least=0.0
    )
    pressure: float = parameter(
        0.7, "convert only when the offered rate is above this share of capacity", least=0.0
    )
    conversion_s: float = parameter(
        30.0, "what a change of role costs after the drain: weights, graphs, warm-up", least=0.0
    )
    foresight: bool = parameter(
        False, "plan with the true lengths of a drift workload: an oracle to compare with"
    )
    plan_step_tokens: int = parameter(500, "grid of the threshold in the plan, tokens", least=1)


class LongTerm:
    """Plans, and converts one instance at a time through `roles`."""

    def __init__(
        self,
        rules: LongTermRules,
        roles: Roles,
        n_remote: Callable[[], int],
        deployment: Deployment,
        traffic: Callable[[float], Traffic | None],
        scale: Scale,
        bandwidth_gbps: Callable[[], float | None],
        on_change: Callable[[str], None] = lambda what: None,
        least_samples: int = 200,
    ) -> None:
        self.rules = rules
        self._roles = roles
        self._n_remote = n_remote
        self._deployment = deployment
        self._traffic = traffic
        self._scale = scale
        self._bandwidth_gbps = bandwidth_gbps
        self._on_change = on_change
        self._least_samples = least_samples
        self._direction = 0
        self._agreed = 0
        self._last_direction = 0
        self._converted_s = -float("inf")

    async def plan(self, now_s: float) -> bool:
        """One plan; True when an instance changed its role."""
        direction = self._wanted(now_s)
        self._agreed = self._agreed + 1 if direction == self._direction else 1
        self._direction = direction
        if not direction or self._agreed < self.rules.confirmations:
            return False
        taken_back = direction == -self._last_direction
        if taken_back and now_s - self._converted_s < self.rules.reversal_s:
            return False
        role = Role.PREFILL if direction > 0 else Role.DECODE
        name = self._roles.least_busy(Role.DECODE if direction > 0 else Role.PREFILL)
        if name is None:
            return False
        self._last_direction = direction
        self._on_change(f"{name} -> {role}")
        converted = await self._roles.convert(name, role)
        self._converted_s = asyncio.get_running_loop().time()
        self._on_change(f"{name} serves {role}" if converted else f"{name} was lost on the way")
        return converted

    def _wanted(self, now_s: float) -> int:
        """+1: one more instance should prefill; -1: one more should decode; 0: leave it."""
        rules = self.rules
        traffic = self._traffic(now_s)
        if traffic is None or len(traffic.incremental_tokens) < self._least_samples:
            return 0
        n_prefill, n_decode = self._roles.counts()
        if n_prefill + n_decode < 2:
            return 0
        placed = traffic.placed_in(self._deployment, self._bandwidth_gbps())
        _, points = search(
            placed, self._n_remote(), n_prefill + n_decode, step_tokens=rules.plan_step_tokens
        )
        possible = {point.split.n_prefill: point for point in points if point.split.n_prefill}
        best = max(possible.values(), key=_worth)
        present = possible.get(n_prefill)
        if present is None:
            return 1
        offered = self._scale.modelled_rate(traffic.request_rate)
        if offered < rules.pressure * present.requests_per_s:
            return 0
        if best is present:
            return 0
        direction = 1 if best.split.n_prefill > n_prefill else -1
        taken_back = direction == -self._last_direction
        gain = max(rules.least_gain, rules.reversal_gain if taken_back else 0.0)
        return direction if best.requests_per_s >= (1 + gain) * present.requests_per_s else 0


def _worth(point: SplitPoint) -> tuple[float, float]:
    """Of equal capacities the one whose prefill has more to spare."""
    return point.requests_per_s, point.prefill_total_per_s
