"""The traffic that a control plane saw lately: what a planner needs of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from harness.planner import Deployment
from workloads.kinds import DriftWorkload
from workloads.lengths import Empirical
from workloads.spec import lengths_at


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a window: how many a (loop) second, their incremental lengths and mean output."""

    request_rate: float
    incremental_tokens: tuple[int, ...]
    output_tokens: float

    def placed_in(self, deployment: Deployment, rate_gbps: float | None) -> Deployment:
        """`deployment` under this traffic and a link of `rate_gbps` (None: no bound)."""
        return replace(
            deployment,
            lengths=Empirical(np.array(self.incremental_tokens)),
            output_tokens=self.output_tokens,
            link=replace(deployment.link, rate_gbps=rate_gbps),
        )


class TrafficWindow:
    """Keeps the requests of the last `window_s`, at most `most` of them."""

    def __init__(self, window_s: float, most: int = 4096) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=most)
        self._began_s: float | None = None

    def note(self, now_s: float, incremental_tokens: int, output_tokens: int) -> None:
        if self._began_s is None:
            self._began_s = now_s
        self._seen.append((now_s, incremental_tokens, output_tokens))

    def traffic(self, now_s: float) -> Traffic | None:
        """None while nothing was seen."""
        seen = self._seen
        while seen and seen[0][0] < now_s - self._window_s:
            seen.popleft()
        if not seen or self._began_s is None:
            return None
        full = len(seen) == seen.maxlen
        since_s = seen[0][0] if full else max(self._began_s, now_s - self._window_s)
        span_s = now_s - since_s
        return Traffic(
            request_rate=len(seen) / span_s if span_s > 0.0 else 0.0,
            incremental_tokens=tuple(tokens for _, tokens, _ in seen),
            output_tokens=sum(output for _, _, output in seen) / len(seen),
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
    quantiles = ((i + 0.5) / _QUANTILES for i in range(_QUANTILES))
    return replace(traffic, incremental_tokens=tuple(round(lengths.quantile(q)) for q in quantiles))


#: Points that stand for a distribution of lengths.
_QUANTILES = 512
