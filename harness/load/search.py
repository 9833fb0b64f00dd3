"""The highest request rate at which an SLO holds: doubling, then bisection, on noisy trials. Pure.

A trial offers a rate and counts the requests that met the SLO. Its share is compared to the wanted
one by its 95 % Wilson interval: a rate is repeated, and the counts added up, while the interval
holds the wanted share, at most `max_repeats` times; then the share itself decides. The answer is a
bracket: the highest rate that met the SLO below the lowest that did not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

_Z = 1.959964


@dataclass(frozen=True, slots=True)
class Trial:
    """`met` of `offered` requests met the SLO at `rate`. `limited`: the client was the limit."""

    rate: float
    offered: int
    met: int
    limited: bool = False
    phase: str = ""


def wilson(met: int, offered: int) -> tuple[float, float]:
    """95 % score interval (Wilson 1927) of a share; (0, 1) of nothing."""
    if not offered:
        return 0.0, 1.0
    share = met / offered
    weight = _Z**2 / offered
    middle = (share + weight / 2) / (1 + weight)
    half = _Z * (share * (1 - share) / offered + weight / (4 * offered)) ** 0.5 / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(slots=True)
class Search:
    """Ask `next_rate`, run it, `record` the trial; until `next_rate` is None. Rates in requests/s.

    Ends when the bracket's ends differ by less than `precision` (share), or after `max_trials`. A
    rate at which the client was the limit is a rate that it cannot test: no higher one is tried,
    and after `max_limited` of them the search ends, since the client's machine is the matter.
    """

    start: float
    share: float = 0.95
    precision: float = 0.05
    max_trials: int = 20
    max_repeats: int = 3
    max_limited: int = 3
    lowest: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    _met: list[float] = field(default_factory=list)
    _missed: list[float] = field(default_factory=list)
    _current: float | None = None

    def next_rate(self) -> float | None:
        if len(self.trials) >= self.max_trials:
            return None
        if sum(each.limited for each in self.trials) >= self.max_limited:
            return None
        if self._current is None:
            self._current = self._propose()
        return self._current

    def record(self, trial: Trial) -> None:
        self.trials.append(trial)
        rate = trial.rate
        same = [each for each in self.trials if each.rate == rate and not each.limited]
        if trial.limited:
            self._decide(rate, False)
            return
        offered, met = sum(each.offered for each in same), sum(each.met for each in same)
        low, high = wilson(met, offered)
        if low >= self.share:
            self._decide(rate, True)
        elif high < self.share:
            self._decide(rate, False)
        elif len(same) >= self.max_repeats:
            self._decide(rate, met >= self.share * offered)

    @property
    def highest_met(self) -> float | None:
        """The highest rate that met the SLO below the lowest that did not."""
        ceiling = min(self._missed, default=float("inf"))
        return max((rate for rate in self._met if rate < ceiling), default=None)

    @property
    def bracket(self) -> tuple[float | None, float | None]:
        return self.highest_met, min(self._missed, default=None)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.bracket
        return {
            "share": self.share,
            "highest_met": low,
            "lowest_missed": high,
            "trials": [
                asdict(each) | {"interval": wilson(each.met, each.offered)} for each in self.trials
            ],
        }

    def _decide(self, rate: float, met: bool) -> None:
        (self._met if met else self._missed).append(rate)
        self._current = None

    def _propose(self) -> float | None:
        low, high = self.bracket
        if low is None and high is None:
            return self.start
        if high is None:
            assert low is not None
            return low * 2
        if low is None:
            lower = high / 2
            return lower if lower > max(self.lowest, self.start / 1024) else None
        if high / low - 1 <= self.precision:
            return None
        return float((low * high) ** 0.5)
