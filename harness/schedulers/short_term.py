"""Seconds: the threshold follows the egress, and the lengths that are really seen.

Two loops act on `Controls`. The fast one reads what the link's monitor measured: near saturation
the threshold rises by a factor an interval, and when the link has been calm it falls back; between
the two levels nothing moves (hysteresis). The slow one searches the planner's best threshold again
for the incremental lengths seen lately, the instances now in each role, and the bandwidth measured
now; a change of that bandwidth makes it search at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.accounts import Path
from harness.planner import Deployment, best_threshold
from harness.policies.parameters import parameter
from harness.policies.prfaas import Controls
from harness.scale import Scale
from harness.schedulers.traffic import Traffic
from harness.view import View


@dataclass(frozen=True, slots=True)
class ShortTermRules:
    """Windows, levels and steps of the short-term scheduler. A link is near saturation when one of
    utilisation, backlog, queueing delay (RTT above the least seen) and retransmitted share is at
    its high level, and calm when utilisation and backlog are below the low ones and the rest is
    not high.
    """

    short_term: bool = parameter(True, "run the short-term scheduler")
    watch_interval_s: float = parameter(1.0, "how often the egress is looked at", least=0.001)
    high_utilisation: float = parameter(0.92, "near saturation from here", least=0.0, most=1.0)
    low_utilisation: float = parameter(0.75, "calm below", least=0.0, most=1.0)
    high_backlog_s: float = parameter(
        2.0, "near saturation when the bytes that wait take so long", least=0.0
    )
    low_backlog_s: float = parameter(0.5, "calm when they take less", least=0.0)
    high_queueing_s: float = parameter(
        0.2, "near saturation when the RTT is so much above the least", least=0.0
    )
    high_loss: float = parameter(
        0.03, "near saturation when so large a share is sent again", least=0.0, most=1.0
    )
    raise_factor: float = parameter(
        1.1, "threshold times this an interval near saturation", least=1.0
    )
    fall_factor: float = parameter(
        0.95, "and times this an interval when calm", least=0.0, most=1.0
    )
    most_congestion: float = parameter(4.0, "the threshold rises at most so many times", least=1.0)
    search_interval_s: float = parameter(60.0, "how often t is searched again", least=0.001)
    search_step_tokens: int = parameter(200, "grid of that search, tokens", least=1)
    bandwidth_change: float = parameter(
        0.15, "a relative change of measured bandwidth that makes it search at once", least=0.0
    )
    target_utilisation: float = parameter(
        0.95, "share of the measured bandwidth that the search counts on", least=0.01, most=1.0
    )
    least_samples: int = parameter(200, "requests that must have been seen first", least=1)


class ShortTerm:
    """Moves `controls` by what `view` knows of the link `egress`; `on_change` hears of each
    threshold that a search changed."""

    def __init__(
        self,
        rules: ShortTermRules,
        controls: Controls,
        view: View,
        egress: tuple[str, str],
        deployment: Deployment,
        traffic: Callable[[float], Traffic | None],
        scale: Scale,
        on_change: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.rules = rules
        self._controls = controls
        self._view = view
        self._egress = egress
        self._deployment = deployment
        self._traffic = traffic
        self._scale = scale
        self._on_change = on_change
        self._searched_s = -float("inf")
        self._searched_gbps: float | None = None

    def look(self, now_s: float) -> None:
        """One look at the link, and a search when one is due."""
        path = self._view.path(*self._egress)
        if path is None:
            return
        self._follow(path)
        gbps = self.bandwidth_gbps()
        due = now_s - self._searched_s >= self.rules.search_interval_s
        if due or self._changed(gbps):
            self._search(now_s, gbps)

    def _follow(self, path: Path) -> None:
        rules, controls, signals = self.rules, self._controls, path.signals
        backlog_s = path.sending_s(signals.backlog_bytes * path.byte_scale)
        congested = (
            signals.rtt_s - signals.min_rtt_s >= rules.high_queueing_s
            or signals.loss >= rules.high_loss
        )
        if (
            congested
            or signals.utilisation >= rules.high_utilisation
            or backlog_s >= rules.high_backlog_s
        ):
            controls.scarce = True
            controls.congestion = min(
                rules.most_congestion, controls.congestion * rules.raise_factor
            )
        elif signals.utilisation <= rules.low_utilisation and backlog_s <= rules.low_backlog_s:
            controls.congestion = max(1.0, controls.congestion * rules.fall_factor)
            controls.scarce = controls.scarce and controls.congestion > 1.0

    def bandwidth_gbps(self) -> float | None:
        """Measured, in modelled units; None before any measurement."""
        path = self._view.path(*self._egress)
        bytes_per_s = float("inf") if path is None else path.bytes_per_s()
        if bytes_per_s == float("inf"):
            return None
        return self._scale.modelled_rate(bytes_per_s) * 8e-9

    def _changed(self, gbps: float | None) -> bool:
        before = self._searched_gbps
        if gbps is None or before is None:
            return False
        return abs(gbps - before) > self.rules.bandwidth_change * before

    def _search(self, now_s: float, gbps: float | None) -> None:
        traffic = self._traffic(now_s)
        if traffic is None or len(traffic.incremental_tokens) < self.rules.least_samples:
            return
        self._searched_s, self._searched_gbps = now_s, gbps
        threshold = self.best_threshold(traffic, gbps)
        if threshold is None:
            return
        before, self._controls.threshold_tokens = self._controls.threshold_tokens, threshold
        # The search knows this bandwidth: what was added for want of it goes.
        self._controls.congestion = 1.0
        if threshold != before:
            self._on_change(f"t {before:.0f} -> {threshold:.0f}")

    def best_threshold(self, traffic: Traffic, gbps: float | None) -> float | None:
        """The planner's for the instances that prefill now; None while one side has none."""
        pools = [self._view.prefill.get(cluster) for cluster in self._egress]
        n_remote, n_local = (0 if pool is None else pool.n_usable() for pool in pools)
        if not n_remote or not n_local:
            return None
        share = self.rules.target_utilisation
        placed = traffic.placed_in(self._deployment, None if gbps is None else gbps * share)
        return float(
            best_threshold(placed, n_remote, n_local, step_tokens=self.rules.search_step_tokens)
        )
