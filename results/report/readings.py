"""One sentence for each chart, made from the numbers it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from results.report import charts, errors
from results.report.data import RunData, Series
from results.summary import ConfigurationSummary
from results.table import number

#: Differences from the model up to this many per cent are called near.
_NEAR = 10
#: Throughput of at least this share of what was offered is no sign of a limit.
_KEPT_UP = 0.98


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _plural(names: Sequence[str], verb: str) -> str:
    """Subject and verb of a sentence: `a serves`, `a and b serve`."""
    return f"{_several(names)} {verb}{'s' if len(names) == 1 else ''}"


def capacity(run: RunData) -> str:
    found = [each for each in run.summary.configurations if each.capacity.paper]
    most = number(max(each.capacity.paper or 0.0 for each in found))
    best = [each for each in found if number(each.capacity.paper) == most]
    text = f"{_plural([each.name for each in best], 'sustain')} most, {most} requests/s"
    ratio = best[0].capacity_ratio.paper
    if ratio is not None and len(best) == 1 and best[0].name != "homogeneous":
        text += f", {number(ratio)} times homogeneous"
    below = [each.name for each in found if _kept_up(each, run.summary.capacity_phase)]
    if below:
        return (
            f"{text}. {_plural(below, 'serve')} all that is offered: the rate is not above "
            "capacity, and the bar is not the limit that the model's tick gives."
        )
    errors = [abs(each.capacity.error) for each in found if each.capacity.error is not None]
    if errors:
        worst = 100 * max(errors)
        text += (
            f"; every bar is within {worst:.1f} % of the throughput model"
            if worst <= _NEAR
            else f"; bars and throughput model differ by up to {worst:.0f} %"
        )
    return text + "."


def _kept_up(each: ConfigurationSummary, phase_name: str) -> bool:
    phase = each.phase(phase_name)
    offered = phase.offered_rate.paper if phase else None
    return bool(offered and each.capacity.paper and each.capacity.paper >= _KEPT_UP * offered)


def ttft_distribution(run: RunData) -> str:
    worst: tuple[float, str] | None = None
    best: tuple[float, str] | None = None
    for each in run.summary.configurations:
        phase = each.phase(run.summary.latency_phase)
        p90 = phase.ttft.p90.paper if phase else None
        if p90 is not None:
            worst = max(worst or (p90, each.name), (p90, each.name))
            best = min(best or (p90, each.name), (p90, each.name))
    if worst is None or best is None:
        return "Too few requests for a P90."
    if worst[1] == best[1]:
        return f"P90 of {best[1]} is {number(best[0])} s."
    return (
        f"At the same offered rate P90 is least for {best[1]}, {number(best[0])} s, and greatest "
        f"for {worst[1]}, {number(worst[0])} s; dotted lines mark 50 and 90 %."
    )


def ttft_split(run: RunData) -> str:
    said = []
    for each in run.summary.configurations:
        phase = each.phase(run.summary.latency_phase)
        if phase is None:
            continue
        split = phase.ttft_split
        parts = {
            "queueing": split.queue_s,
            "prefill": split.prefill_s,
            "transfer": split.transfer_s,
            "decode admission": split.decode_admission_s,
        }
        known = {name: value for name, value in parts.items() if value is not None}
        total = sum(known.values())
        if total > 0:
            largest = max(known, key=lambda name: known[name])
            said.append(f"{each.name} {100 * known[largest] / total:.0f} % {largest}")
    return "Largest part of the mean TTFT: " + ", ".join(said) + "."


def ttft_over_load(run: RunData) -> str:
    limit = run.summary.slo.ttft_s
    if not limit:
        return "TTFT rises without bound as the offered rate nears a configuration's capacity."
    held: dict[str, float] = {}
    for row in charts.load_points(run):
        if row["p90"] <= limit:
            held[row["name"]] = max(held.get(row["name"], 0.0), row["rate"])
    if not held:
        return f"No measured rate keeps TTFT P90 under {number(limit)} s (dashed)."
    said = ", ".join(f"{name} {number(rate)}" for name, rate in held.items())
    return (
        f"Highest measured rates (requests/s) with TTFT P90 under {number(limit)} s (dashed): "
        f"{said}."
    )


def egress(run: RunData) -> str:
    said = []
    for name, series in run.egress.items():
        mean, peak = float(np.nanmean(series.values)), float(np.nanmax(series.values))
        said.append(
            f"{name} {number(mean)} Gbps on average, {number(peak)} in its busiest interval"
        )
    text = "; ".join(said)
    if run.link_gbps:
        greatest = max(float(np.nanmax(series.values)) for series in run.egress.values())
        text += f": at most {100 * greatest / run.link_gbps:.0f} % of the link"
    widths = [np.diff(line.times_s).mean() for line in run.egress.values() if len(line.times_s) > 1]
    if widths:
        text += f". Means of {number(float(max(widths)), 2)} s; the table's peak is of shorter ones"
    return text + "."


def utilisation(run: RunData) -> str:
    said = ", ".join(
        f"{name} {100 * float(np.nanmean(series.values)):.0f} %"
        for name, series in run.busy.items()
    )
    return f"Share of the time that prefill instances computed, on average: {said}."


def queued(run: RunData) -> str:
    said = ", ".join(
        f"{name} {np.nanmax(series.values):.0f}" for name, series in run.queued.items()
    )
    return (
        f"Most assigned for prefill at once, waiting or computing: {said}. "
        "A line that keeps rising is a stage that is overloaded."
    )


def decoding(run: RunData) -> str:
    said = ", ".join(
        f"{name} {np.nanmax(series.values):.0f}" for name, series in run.decoding.items()
    )
    return f"Most assigned to decode at once, on their way or in a batch: {said}."


def _changes(lines: Mapping[str, Series]) -> str:
    count = sum(
        int(np.count_nonzero(np.diff(line.values[~np.isnan(line.values)])))
        for line in lines.values()
    )
    return f"{count} change{'' if count == 1 else 's'}"


def _rules(run: RunData, lines: Mapping[str, Series]) -> str:
    """What the vertical lines of a chart over the whole run mean."""
    said = []
    if len(run.begins_s) > 1:
        said.append(f"grey lines mark where phases begin ({', '.join(run.begins_s)})")
    marked = charts.marked_events(run, lines)
    if marked:
        said.append(f"dotted ones what happened ({charts.kinds_of(marked)})")
    return f"; {', '.join(said)}" if said else ""


def threshold(run: RunData) -> str:
    values = [series.values for series in run.thresholds.values()]
    low, high = min(np.nanmin(v) for v in values), max(np.nanmax(v) for v in values)
    rules = _rules(run, run.thresholds)
    if low == high:
        return f"The threshold stayed at {low:,.0f} tokens{rules}."
    return (
        f"The threshold moved between {low:,.0f} and {high:,.0f} tokens "
        f"({_changes(run.thresholds)}){rules}."
    )


def roles(run: RunData) -> str:
    changes = _changes(run.prefill_roles)
    rules = _rules(run, run.prefill_roles)
    if changes.startswith("0"):
        return f"No instance changed its role{rules}."
    return f"Instances moved between prefill and decode: {changes}{rules}."


def figure_5(run: RunData) -> str:
    curve = run.extras.curve
    assert curve is not None
    lowest = [
        min(rate for rate in rates if rate is not None)
        for rates in zip(curve.prfaas, curve.local_prefill, curve.decode, strict=True)
    ]
    at = int(np.argmax(lowest))
    text = (
        f"By the model the stages together sustain most, {number(lowest[at])} requests/s, at a "
        f"threshold of {curve.threshold_tokens[at]:,.0f} tokens, where the two prefill curves cross"
    )
    point = charts.measured_point(run)
    if point is None:
        return text + "."
    return f"{text}; measured (diamond): {number(point[1])} at {point[0]:,.0f}."


def fidelity(run: RunData) -> str:
    rows = errors.model_points(run)
    sizes = np.array([abs(row["error"]) for row in rows])
    worst = rows[int(np.argmax(sizes))]
    return (
        f"Half of the {len(rows)} figures are within {np.median(sizes):.1f} % of the model; the "
        f"farthest is {worst['figure']} of {worst['name']}, {worst['error']:+.1f} %."
    )


def cost(run: RunData) -> str:
    key = "per 1,000 requests"
    costs = {name: values[key] for name, values in run.extras.cost.items() if key in values}
    least = number(min(costs.values()))
    cheapest = [name for name in costs if number(costs[name]) == least]
    text = f"{_plural(cheapest, 'serve')} 1,000 requests for least, {least}"
    base = costs.get("homogeneous")
    if base and "homogeneous" not in cheapest:
        text += f", {100 * (1 - costs[cheapest[0]] / base):.0f} % less than homogeneous"
    return f"{text} ({run.extras.currency or 'relative prices'})."
