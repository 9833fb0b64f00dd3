"""Charts of relative differences: of a run from the model, of an emulated from a simulated run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from results.fidelity import Difference
from results.report import theme
from results.report.data import RunData
from results.report.drawing import Spec, Style, finish, style_of, values_of, x_axis
from results.summary import ConfigurationSummary, Measured


def model_points(run: RunData) -> list[dict[str, Any]]:
    """Measured against predicted, for each figure that has both: the error in percent."""
    rows = []

    def add(each: ConfigurationSummary, figure: str, measured: Measured) -> None:
        if measured.error is not None:
            rows.append({"name": each.name, "figure": figure, "error": 100 * measured.error})

    for each in run.summary.configurations:
        add(each, "capacity", each.capacity)
        add(each, "capacity / homogeneous", each.capacity_ratio)
        capacity_phase = each.phase(run.summary.capacity_phase)
        if capacity_phase is not None:
            add(each, "egress mean", capacity_phase.egress.mean_gbps)
            add(each, "offloaded share", capacity_phase.offloaded_share)
        latency = each.phase(run.summary.latency_phase)
        if latency is not None:
            for statistic in ("mean", "p50", "p90", "p99"):
                add(each, f"TTFT {statistic.replace('p', 'P')}", getattr(latency.ttft, statistic))
            add(each, "TPOT mean", latency.tpot.mean)
    return rows


def against_model(run: RunData, width: int) -> Spec | None:
    rows = model_points(run)
    if not rows:
        return None
    return errors_chart(rows, style_of(run, rows, width), "measured - model, %")


def errors_chart(rows: Sequence[Mapping[str, Any]], style: Style, title: str) -> Spec:
    """A point for each `error` in percent: a line a figure, colour and shape by configuration."""
    width = style.width
    figures = list(dict.fromkeys(row["figure"] for row in rows))
    chart = (
        alt.Chart(values_of(rows))
        .mark_point(size=70, filled=True)
        .encode(
            x=x_axis("error:Q", title, width),
            y=alt.Y("figure:N", sort=figures, title=None),
            color=style.colour(),
            shape=style.shape(),
        )
    )
    zero = alt.Chart(values_of([{"x": 0}])).mark_rule(color=theme.INK).encode(x="x:Q")
    return finish(zero + chart, width, 26 * len(figures) + 90)


def between_runs(rows: Sequence[Difference], width: int) -> Spec:
    """Emulated against simulated, figure by figure."""
    names = tuple(dict.fromkeys(row.configuration for row in rows))
    points = [
        {"name": row.configuration, "figure": row.figure, "error": 100 * row.relative}
        for row in rows
    ]
    return errors_chart(points, Style(names, names, width), "emulate / simulate - 1, %")


def between_runs_reading(rows: Sequence[Difference]) -> str:
    """One sentence on how far the two modes are apart."""
    held = [row for row in rows if row.limit is not None]
    kept = sum(row.kept for row in held)
    worst = max(rows, key=lambda row: abs(row.relative))
    return (
        f"{kept} of the {len(held)} figures with a limit are within it; the farthest of all "
        f"{len(rows)} is {worst.figure.split(',')[0]} of {worst.configuration}, "
        f"{worst.relative:+.1%}."
    )
