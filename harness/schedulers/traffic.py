"""The traffic that a control plane saw lately: what a planner needs of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from harness.planner import Deployment
from harness.schedulers.trend import as_of
from workloads.kinds import DriftWorkload
from workloads.lengths import Empirical
from workloads.spec import lengths_at

#: Points that stand for a distribution of lengths.
_QUANTILES = 512
_MIDPOINTS = (np.arange(_QUANTILES) + 0.5) / _QUANTILES


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a window: how many a (loop) second, their incremental lengths and mean output."""

    request_rate: float
    incremental_tokens: tuple[int, ...]
    output_tokens: float

    def placed_in(self, deployment: Deployment, rate_gbps: float | None) -> Deployment:
        """`deployment` under this traffic and a link of `rate_gbps` (None: no bound)."""
        tokens = np.array(self.incremental_tokens)
        if len(tokens) > _QUANTILES:
            tokens = np.rint(np.quantile(tokens, _MIDPOINTS)).astype(np.int64)
        return replace(
            deployment,
            lengths=Empirical(tokens),
            output_tokens=self.output_tokens,
            link=replace(deployment.link, rate_gbps=rate_gbps),
        )


class TrafficWindow:
    """Rate and outputs of the last `window_s`, and the lengths of the last `trend_window_s` moved
    to now along their trend (`harness.schedulers.trend`), of `window_s` at the least. It keeps at
    most `most` requests.
    """

    def __init__(
        self,
        window_s: float,
        trend_window_s: float = 0.0,
        trend_significance: float = 2.0,
        most: int = 32_768,
    ) -> None:
        self._window_s = window_s
        self._kept_s = max(window_s, trend_window_s)
        self._significance = trend_significance
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=most)
        self._began_s: float | None = None

    def note(self, now_s: float, incremental_tokens: int, output_tokens: int) -> None:
        if self._began_s is None:
            self._began_s = now_s
        self._seen.append((now_s, incremental_tokens, output_tokens))

    def traffic(self, now_s: float) -> Traffic | None:
        """None while nothing was seen."""
        seen = self._seen
        while seen and seen[0][0] < now_s - self._kept_s:
            seen.popleft()
        if not seen or self._began_s is None:
            return None
        rows = np.fromiter(chain.from_iterable(seen), float, 3 * len(seen)).reshape(-1, 3)
        times_s, tokens, outputs = rows[:, 0], rows[:, 1], rows[:, 2]
        recent = int(np.searchsorted(times_s, now_s - self._window_s))
        if recent == len(times_s):
            return None
        full = len(seen) == seen.maxlen
        since_s = max(self._began_s, now_s - self._window_s, float(times_s[0]) if full else 0.0)
        span_s = now_s - since_s
        tokens = as_of(now_s, times_s, tokens, self._window_s, self._significance)
        return Traffic(
            request_rate=(len(times_s) - recent) / span_s if span_s > 0.0 else 0.0,
            incremental_tokens=tuple(np.rint(tokens).astype(int).tolist()),
            output_tokens=float(outputs[recent:].mean()),
        )

    def __len__(self) -> int:
        return len(self._seen)


def foreseen(
    seen: TrafficWindow, workload: DriftWorkload, now_s: float, modelled_s: float
) -> Traffic | None:
    """The traffic of now by perfect knowledge of the workload's lengths: what an oracle plans with.
    `modelled_s` is the workload's own time."""
    traffic = seen.traffic(now_s)
    if traffic is None:
        return None
    lengths = lengths_at(workload, modelled_s)
    return replace(
        traffic, incremental_tokens=tuple(round(lengths.quantile(q)) for q in _MIDPOINTS.tolist())
    )
