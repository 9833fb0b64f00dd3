"""The gate: is tonight's candidate worse than the baseline it ran in turn with?

Samples come in pairs, baseline and candidate one right after the other, in alternating order, so
what the machine does slowly falls out of their ratio. The decision has two steps, since a night has
many figures: `screen` asks for more pairs of what looks worse, `judge` decides on all pairs, at a
p value that allows for the number of figures. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from results.figures import Better
from results.statistics import trimmed_pairs


@dataclass(frozen=True, slots=True)
class GateRules:
    """A regression is at least `least` (relative) and has p below `family_p` / figures. Screening
    lets pass what has p above `screen_p` or less than `screen_share` of `least`.
    """

    least: float = 0.025
    family_p: float = 0.01
    screen_p: float = 0.1
    screen_share: float = 0.6


class Outcome(StrEnum):
    OK = "ok"
    REGRESSION = "regression"
    CHANGED = "changed"
    UNJUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Judgement:
    """`worse` is the relative change for the worse; `p` one-sided, None for exact figures."""

    outcome: Outcome
    worse: float
    p: float | None
    pairs: int


def log_ratios(base: Sequence[float], candidate: Sequence[float], better: Better) -> list[float]:
    """Of each pair, positive when the candidate is worse."""
    sign = -1.0 if better is Better.HIGHER else 1.0
    return [sign * float(np.log(c / b)) for b, c in zip(base, candidate, strict=True)]


def screen(ratios: Sequence[float], rules: GateRules = GateRules()) -> bool:
    """Whether to run more pairs of this figure."""
    if len(ratios) < 4:
        return False
    found = trimmed_pairs(ratios)
    return found.p < rules.screen_p and found.shift > rules.screen_share * np.log1p(rules.least)


def judge(
    ratios: Sequence[float],
    figures: int,
    rules: GateRules = GateRules(),
    *,
    better: Better = Better.LOWER,
    exact: bool = False,
) -> Judgement:
    """The verdict on one of `figures` figures. `exact` figures do not vary: any difference is real,
    and of at least `least` in the bad direction a regression.
    """
    if exact:
        worse = float(np.expm1(np.mean(ratios)))
        if better is not Better.NEITHER and worse >= rules.least:
            return Judgement(Outcome.REGRESSION, worse, None, len(ratios))
        changed = abs(worse) > 1e-9
        return Judgement(Outcome.CHANGED if changed else Outcome.OK, worse, None, len(ratios))
    if len(ratios) < 4 or better is Better.NEITHER:
        worse = float(np.expm1(np.mean(ratios))) if ratios else 0.0
        return Judgement(Outcome.UNJUDGED, worse, None, len(ratios))
    found = trimmed_pairs(ratios)
    worse = float(np.expm1(found.shift))
    regressed = worse >= rules.least and found.p < rules.family_p / max(1, figures)
    return Judgement(Outcome.REGRESSION if regressed else Outcome.OK, worse, found.p, len(ratios))
