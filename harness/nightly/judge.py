"""From a night's samples and the history to what is said of each figure; no I/O but the marks."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.errors import BadInput
from harness.nightly.run import BASE, CANDIDATE, Commits, PartResult
from results import history
from results.drift import DriftRules, Shift, shifts
from results.figures import Better
from results.gate import GateRules, Judgement, Outcome, judge
from results.history import Row


@dataclass(frozen=True, slots=True)
class FigureResult:
    """One figure of the night: medians, judgement, and a level shift that was told tonight.

    `drift.change` is positive for more of the figure's own unit; `drift_worse` says whether that is
    bad. `began` is the night on which the new level began.
    """

    part: str
    metric: str
    unit: str
    better: Better
    base: float
    candidate: float
    judgement: Judgement
    drift: Shift | None = None
    drift_worse: bool = False
    began: str = ""


@dataclass(frozen=True, slots=True)
class Night:
    """Everything that is said of one night. `nights_before` are those in the history."""

    stamp: str
    figures: tuple[FigureResult, ...]
    failures: Mapping[str, str]
    commits: Commits
    parts: tuple[str, ...]
    nights_before: int

    @property
    def regressions(self) -> list[FigureResult]:
        return [each for each in self.figures if each.judgement.outcome is Outcome.REGRESSION]

    @property
    def drifts(self) -> list[FigureResult]:
        return [each for each in self.figures if each.drift is not None and each.drift_worse]


@dataclass(frozen=True, slots=True)
class Mark:
    """A known level shift: no alert for it. Empty `part` or `metric` stand for all."""

    night: str
    why: str
    part: str = ""
    metric: str = ""

    def covers(self, row: Row) -> bool:
        return self.part in ("", row.part) and self.metric in ("", row.metric)


def load_marks(path: Path) -> list[Mark]:
    """Marks of `[[shift]]` tables with night, why, and optionally part and metric. A missing file
    has none. Raises BadInput.
    """
    if not path.exists():
        return []
    try:
        rows = tomllib.loads(path.read_text()).get("shift", [])
        return [Mark(**row) for row in rows]
    except (tomllib.TOMLDecodeError, TypeError, OSError) as error:
        raise BadInput(f"{path}: {error}; write [[shift]] with night = and why =") from error


def judge_parts(
    results: Sequence[PartResult], rules: GateRules
) -> list[tuple[PartResult, str, Judgement]]:
    """The gate over all parts. The p value allows for all figures that are tested."""
    tested = sum(
        len(result.metrics()) for result in results if result.spec.gate and not result.spec.exact
    )
    found = []
    for result in results:
        for metric in result.metrics():
            ratios = result.ratios(metric)
            if not ratios:
                continue
            if result.spec.gate:
                verdict = judge(
                    ratios,
                    tested,
                    rules,
                    better=result.better(metric),
                    exact=result.spec.exact and metric != "cpu_s",
                )
            else:
                worse = float(np.expm1(np.median(ratios)))
                verdict = Judgement(Outcome.UNJUDGED, worse, None, len(ratios))
            found.append((result, metric, verdict))
    return found


def rows_of(
    stamp: str,
    judged: Sequence[tuple[PartResult, str, Judgement]],
    commits: Commits,
) -> list[Row]:
    """The night's rows of the history."""
    return [
        Row(
            stamp,
            result.spec.name,
            metric,
            result.unit(metric),
            result.better(metric).value,
            float(np.median(result.values(BASE, metric))),
            float(np.median(result.values(CANDIDATE, metric))),
            verdict.worse,
            verdict.p,
            verdict.pairs,
            verdict.outcome.value,
            commits.base,
            commits.candidate,
            commits.host,
        )
        for result, metric, verdict in judged
    ]


def levels(nights: Sequence[Row], marks: Sequence[Mark]) -> tuple[list[float], set[int]]:
    """What change points are looked for in, and the nights at which a new level is expected.

    With pairs enough it is candidate / baseline of the same night, in which the machine's own level
    falls out; it starts anew when the baseline changes. Otherwise it is the candidate itself, which
    starts anew on another host.
    """
    values, known = [], set()
    for at, row in enumerate(nights):
        paired = row.pairs >= 4 and row.worse is not None and row.better != Better.NEITHER
        if paired and row.worse is not None:
            sign = -1.0 if row.better == Better.HIGHER else 1.0
            values.append(float((1.0 + row.worse) ** sign))
        else:
            values.append(row.candidate or 0.0)
        before = nights[at - 1] if at else None
        if before is not None and (
            before.base_commit != row.base_commit if paired else before.host != row.host
        ):
            known.add(at)
        if any(
            mark.covers(row) and mark.night <= row.night
            and (before is None or before.night < mark.night)
            for mark in marks
        ):  # fmt: skip
            known.add(at)
    return values, known


def told_tonight(nights: Sequence[Row], marks: Sequence[Mark], rules: DriftRules) -> Shift | None:
    """The level shift that the last of `nights` is the first to show."""
    values, known = levels(nights, marks)
    if not values or min(values) <= 0:
        return None
    found = [each for each in shifts(values, rules, known) if each.told == len(values) - 1]
    return found[-1] if found else None


def conclude(
    stamp: str,
    results: Sequence[PartResult],
    commits: Commits,
    past: Sequence[Row],
    marks: Sequence[Mark],
    gate: GateRules,
    drift: DriftRules,
) -> tuple[Night, list[Row]]:
    """The night and its rows. `past` are the nights before it."""
    judged = judge_parts(results, gate)
    rows = rows_of(stamp, judged, commits)
    before = [row for row in past if row.night != stamp]
    every = before + rows
    figures = []
    for row, (result, metric, verdict) in zip(rows, judged, strict=True):
        nights = history.series(every, row.part, row.metric)
        shift = told_tonight(nights, marks, drift)
        better = result.better(metric)
        worse = shift is not None and (
            (shift.change > 0 and better is Better.LOWER)
            or (shift.change < 0 and better is Better.HIGHER)
        )
        figures.append(
            FigureResult(
                row.part,
                metric,
                row.unit,
                better,
                row.base or 0.0,
                row.candidate or 0.0,
                verdict,
                shift,
                worse,
                nights[shift.began].night if shift else "",
            )
        )
    failures = {result.spec.name: result.failure for result in results if result.failure}
    night = Night(
        stamp,
        tuple(figures),
        failures,
        commits,
        tuple(result.spec.name for result in results),
        len({row.night for row in before}),
    )
    return night, rows
