"""The charts of a run as Vega-Lite specifications; each takes the run and a width in pixels.

A chart is None where the run has nothing to draw. Axis titles name quantity and unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from results.report import theme
from results.report.data import Event, RunData, Series
from results.report.drawing import Spec, Style, finish, legend_for, style_of, values_of, x_axis
from results.summary import Measured

Chart = Callable[[RunData, int], Spec | None]

#: Rules in a chart; more would hide the lines, and are listed only.
SHOWN_EVENTS = 40
#: Pixels that a letter of a phase's name takes; a name without room is left out.
_LETTER_WIDTH = 7.5

_PARTS = ("queue", "prefill", "transfer", "decode admission")


def _bars(run: RunData, rows: list[dict[str, Any]], title: str, width: int) -> Spec:
    """A bar a configuration with its value beside it, the model's as a tick, intervals as rules."""
    style = style_of(run, rows, width)
    y = alt.Y("name:N", sort=list(style.shown), title=None)
    top = max(row[key] for row in rows for key in ("value", "model", "high") if row.get(key))
    x = x_axis("value:Q", title, width, domain=[0, 1.15 * top])
    base = alt.Chart(values_of(rows))
    layers = [
        base.mark_bar(height=20).encode(x=x, y=y, color=style.colour(legend=False)),
        # Behind whatever of its row reaches furthest.
        base.transform_calculate(end="max(datum.value, datum.model || 0, datum.high || 0)")
        .mark_text(align="left", dx=6, color=theme.INK)
        .encode(x=alt.X("end:Q"), y=y, text="label:N"),
    ]
    if any(row.get("low") is not None for row in rows):
        layers.append(
            base.transform_filter("isValid(datum.low)")
            .mark_rule(color=theme.INK, strokeWidth=1.5)
            .encode(x=alt.X("low:Q"), x2="high:Q", y=y)
        )
    if any(row.get("model") is not None for row in rows):
        layers.append(
            base.transform_filter("isValid(datum.model)")
            .mark_tick(color=theme.INK, thickness=3, size=28)
            .encode(x=alt.X("model:Q"), y=y)
        )
    return finish(alt.layer(*layers), width, 44 * len(rows) + 50)


def _bar_row(name: str, figure: Measured, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": figure.paper,
        "label": label,
        "model": figure.predicted,
        "low": figure.low,
        "high": figure.high,
    }


def capacity(run: RunData, width: int) -> Spec | None:
    rows = [
        _bar_row(each.name, each.capacity, f"{each.capacity.paper:.2f}")
        for each in run.summary.configurations
        if each.capacity.paper
    ]
    if not rows:
        return None
    return _bars(run, rows, "requests/s (tick: model)", width)


def ttft_distribution(run: RunData, width: int) -> Spec | None:
    rows = []
    for name, values in run.ttft.items():
        shares = np.linspace(0, 100, len(values))
        rows += [
            {"name": name, "x": float(value), "y": float(share)}
            for value, share in zip(values, shares, strict=True)
            if value > 0
        ]
    if not rows:
        return None
    style = style_of(run, rows, width)
    chart = (
        alt.Chart(values_of(rows))
        .mark_line(interpolate="step-after")
        .encode(
            x=alt.X(
                "x:Q",
                title="TTFT, s (log scale)",
                axis=alt.Axis(labelOverlap="greedy", labelSeparation=8),
                scale=alt.Scale(type="log", nice=False),
            ),
            y=alt.Y("y:Q", title="requests with at most this TTFT, %"),
            color=style.colour(),
            strokeDash=style.dash(),
        )
    )
    rules = (
        alt.Chart(values_of([{"y": 50}, {"y": 90}]))
        .mark_rule(strokeDash=[2, 3], color=theme.MUTED)
        .encode(y="y:Q")
    )
    return finish(rules + chart, width)


def ttft_split(run: RunData, width: int) -> Spec | None:
    rows = []
    for each in run.summary.configurations:
        phase = each.phase(run.summary.latency_phase)
        if phase is None:
            continue
        for order, part in enumerate(_PARTS):
            value = getattr(phase.ttft_split, f"{part.replace(' ', '_')}_s")
            if value is not None:
                rows.append({"name": each.name, "part": part, "value": value, "order": order})
    if not rows:
        return None
    names = list(dict.fromkeys(row["name"] for row in rows))
    chart = (
        alt.Chart(values_of(rows))
        .mark_bar(height=22, stroke=theme.SURFACE, strokeWidth=1)
        .encode(
            x=x_axis("value:Q", "mean TTFT, s", width),
            y=alt.Y("name:N", sort=names, title=None),
            color=alt.Color(
                "part:N",
                scale=alt.Scale(domain=list(_PARTS), range=list(theme.SERIES[:4])),
                legend=legend_for(width),
                sort=None,
            ),
            order=alt.Order("order:Q"),
        )
    )
    return finish(chart, width, 44 * len(names) + 80)


def load_points(run: RunData) -> list[dict[str, Any]]:
    """(configuration, offered rate, TTFT mean and P90, share of capacity) of each load phase."""
    rows = []
    for each in run.summary.configurations:
        for phase in each.phases:
            is_load = phase.name.startswith("load-") or phase.name == run.summary.latency_phase
            rate, p90 = phase.offered_rate.paper, phase.ttft.p90.paper
            if is_load and rate and p90:
                rows.append(
                    {"name": each.name, "rate": rate, "p90": p90, "mean": phase.ttft.mean.paper}
                )
    return sorted(rows, key=lambda row: (row["name"], row["rate"]))


def ttft_over_load(run: RunData, width: int) -> Spec | None:
    rows = load_points(run)
    if len(rows) <= len({row["name"] for row in rows}):
        return None
    style = style_of(run, rows, width)
    base = alt.Chart(values_of(rows)).encode(
        x=x_axis("rate:Q", "offered rate, requests/s", width, zero=False),
        y=alt.Y(
            "p90:Q",
            title="TTFT P90, s (log scale)",
            axis=alt.Axis(labelOverlap="greedy", labelSeparation=4),
            scale=alt.Scale(type="log", nice=False),
        ),
        color=style.colour(),
    )
    layers = [
        base.mark_line().encode(strokeDash=style.dash()),
        base.mark_point(size=50).encode(shape=style.shape()),
    ]
    limit = run.summary.slo.ttft_s
    if limit:
        rule = alt.Chart(values_of([{"y": limit}])).mark_rule(strokeDash=[4, 4], color=theme.INK)
        layers.append(rule.encode(y="y:Q"))
    return finish(alt.layer(*layers), width)


def _over_time(run: RunData, series: Mapping[str, Series], title: str, width: int) -> Spec | None:
    rows = [
        {"name": name, "x": float(x) / 60, "y": None if np.isnan(y) else float(y)}
        for name, line in series.items()
        for x, y in zip(line.times_s, line.values, strict=True)
    ]
    if not rows:
        return None
    style = style_of(run, rows, width)
    chart = (
        alt.Chart(values_of(rows))
        .mark_line(strokeWidth=1.6)
        .encode(
            x=x_axis("x:Q", "minutes since the phase began", width),
            y=alt.Y("y:Q", title=title),
            color=style.colour(),
            strokeDash=style.dash(),
        )
    )
    return finish(chart, width)


def egress(run: RunData, width: int) -> Spec | None:
    rate = run.link_gbps
    title = "egress, Gbps" if not rate else f"egress, Gbps (link: {rate:g})"
    return _over_time(run, run.egress, title, width)


def utilisation(run: RunData, width: int) -> Spec | None:
    percent = {
        name: Series(series.times_s, 100 * series.values) for name, series in run.busy.items()
    }
    return _over_time(run, percent, "prefill instances that compute, %", width)


def queued(run: RunData, width: int) -> Spec | None:
    return _over_time(run, run.queued, "requests assigned for prefill", width)


def decoding(run: RunData, width: int) -> Spec | None:
    return _over_time(run, run.decoding, "requests assigned to decode", width)


def threshold(run: RunData, width: int) -> Spec | None:
    thousands = {
        name: Series(series.times_s, series.values / 1000)
        for name, series in run.thresholds.items()
    }
    return _with_events(run, thousands, "threshold, thousand tokens", width)


def roles(run: RunData, width: int) -> Spec | None:
    return _with_events(run, run.prefill_roles, "instances in prefill", width)


def _with_events(run: RunData, series: Mapping[str, Series], title: str, width: int) -> Spec | None:
    """Lines over the whole run, with rules where phases begin and where something happened."""
    rows = [
        {"name": name, "x": float(x) / 60, "y": None if np.isnan(y) else float(y)}
        for name, line in series.items()
        for x, y in zip(line.times_s, line.values, strict=True)
    ]
    if not any(row["y"] is not None for row in rows):
        return None
    style = style_of(run, rows, width)
    layers: list[Any] = []
    phases: list[dict[str, Any]] = [
        {"x": begins_s / 60, "phase": name} for name, begins_s in run.begins_s.items()
    ]
    if len(phases) > 1:
        rules = alt.Chart(values_of(phases)).mark_rule(color=theme.GRID, strokeWidth=1.5)
        layers.append(rules.encode(x="x:Q"))
        last = max(float(line.times_s[-1]) for line in series.values() if len(line.times_s)) / 60
        named = [
            phase
            for phase, after in zip(phases, [*phases[1:], {"x": last}], strict=True)
            if (after["x"] - phase["x"]) / last * width > _LETTER_WIDTH * (len(phase["phase"]) + 2)
        ]
        if named:
            layers.append(
                alt.Chart(values_of(named))
                .mark_text(
                    align="left", baseline="top", dx=4, dy=-14, fontSize=11, color=theme.MUTED
                )
                .encode(x="x:Q", y=alt.value(0), text="phase:N")
            )
    events = [
        {"x": (run.begins_s[event.phase] + event.time_s) / 60}
        for event in marked_events(run, series)
    ]
    if events:
        layers.append(
            alt.Chart(values_of(events))
            .mark_rule(color=theme.MUTED, strokeDash=[2, 3])
            .encode(x=alt.X("x:Q"))
        )
    several = "minutes, phases one after another"
    layers.append(
        alt.Chart(values_of(rows))
        .mark_line(interpolate="step-after")
        .encode(
            x=x_axis("x:Q", several if len(phases) > 1 else "minutes since the phase began", width),
            y=alt.Y("y:Q", title=title, scale=alt.Scale(zero=True)),
            color=style.colour(),
            strokeDash=style.dash(),
        )
    )
    return finish(alt.layer(*layers), width, 200)


def marked_events(run: RunData, lines: Mapping[str, Series]) -> list[Event]:
    """What gets a rule: all but the thresholds' moves, which the line itself shows; without what
    the link's state did where that would hide the lines.
    """
    events = [
        event
        for name in lines
        for event in run.events.get(name, [])
        if not event.what.startswith("threshold")
    ]
    if len(events) > SHOWN_EVENTS:
        events = [event for event in events if not event.what.startswith("link")]
    return events if len(events) <= SHOWN_EVENTS else []


def kinds_of(events: Sequence[Event]) -> str:
    """Of what kinds events are, in words."""
    link = any(event.what.startswith("link") for event in events)
    others = any(not event.what.startswith("link") for event in events)
    kinds = [
        *(["instances changed role"] if others else []),
        *(["the link's state"] if link else []),
    ]
    return " and ".join(kinds)


def measured_point(run: RunData) -> tuple[float, float] | None:
    """(threshold, capacity) of the first configuration with a threshold, as measured: the last
    threshold of the phase that capacity is of, where schedulers moved it.
    """
    for each in run.summary.configurations:
        if each.threshold_tokens is not None and each.capacity.paper is not None:
            moved = run.thresholds.get(each.name)
            at = each.threshold_tokens
            if moved is not None:
                later = [begins for begins in run.begins_s.values()
                         if begins > run.begins_s[run.series_phase]]  # fmt: skip
                inside = ~np.isnan(moved.values) & (moved.times_s < min(later, default=np.inf))
                at = float(moved.values[inside][-1]) if inside.any() else at
            return at, each.capacity.paper
    return None


def figure_5(run: RunData, width: int) -> Spec | None:
    curve = run.extras.curve
    if curve is None:
        return None
    stages = {
        "remote prefill": curve.prfaas,
        "local prefill": curve.local_prefill,
        "decode": curve.decode,
    }
    rows = [
        {"name": name, "x": t / 1000, "y": rate}
        for name, rates in stages.items()
        for t, rate in zip(curve.threshold_tokens, rates, strict=True)
        if rate is not None
    ]
    names = tuple(stages)
    style = Style(names, names, width)
    top = 2.2 * max(curve.decode)
    line = (
        alt.Chart(values_of(rows))
        .mark_line(clip=True)
        .encode(
            x=x_axis("x:Q", "threshold, thousand tokens", width),
            y=alt.Y("y:Q", title="sustained rate, requests/s", scale=alt.Scale(domain=[0, top])),
            color=style.colour(),
            strokeDash=style.dash(),
        )
    )
    point = measured_point(run)
    if point is None:
        return finish(line, width)
    mark = (
        alt.Chart(values_of([{"x": point[0] / 1000, "y": point[1]}]))
        .mark_point(shape="diamond", size=140, color=theme.INK, filled=True)
        .encode(x="x:Q", y="y:Q")
    )
    return finish(line + mark, width)


def cost(run: RunData, width: int) -> Spec | None:
    key = "per 1,000 requests"
    rows: list[dict[str, Any]] = [
        {"name": name, "value": costs[key], "label": f"{costs[key]:.2f}", "model": None}
        for name, costs in run.extras.cost.items()
        if key in costs
    ]
    if not rows:
        return None
    title = f"cost of 1,000 requests, {run.extras.currency or 'relative'}"
    return _bars(run, rows, title, width)
