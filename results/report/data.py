"""What the charts of one run need, read from its directory; times in paper units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from results import metrics, reader, summary
from results.metrics import Floats
from results.summary import RunSummary

#: Points of a distribution, and bins of a series: enough for a line a few hundred pixels wide.
QUANTILES = 160
BINS = 160
#: Bins of utilisation: wide enough to hold several prefills each.
BUSY_BINS = 48


@dataclass(frozen=True, slots=True)
class Series:
    """A line over time: seconds since the phase began, and values (NaN: nothing measured)."""

    times_s: Floats
    values: Floats


@dataclass(frozen=True, slots=True)
class Event:
    """Something that moved a threshold or a role, or may have. `time_s` counts from the start of
    `phase`.
    """

    phase: str
    time_s: float
    what: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Fig 5: rates of all requests (req/s) at which each stage is full, by threshold (tokens)."""

    threshold_tokens: tuple[float, ...]
    prfaas: tuple[float | None, ...]
    local_prefill: tuple[float | None, ...]
    decode: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Extras:
    """What the harness adds that the recorded run does not hold."""

    curve: Curve | None = None
    #: configuration -> {"per 1,000 requests": value, ...}, and in which currency.
    cost: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    currency: str = ""


@dataclass(frozen=True, slots=True)
class RunData:
    """One run. Keys are configuration names; `series_phase` is the phase that series are of, but
    for `busy`, which is of the latency phase: in an overloaded one all instances compute always;
    and for thresholds and roles, which are of the whole run, on the time axis of `begins_s`.
    """

    path: Path
    summary: RunSummary
    ttft: dict[str, Floats]
    series_phase: str
    egress: dict[str, Series]
    link_gbps: float | None
    busy: dict[str, Series]
    queued: dict[str, Series]
    decoding: dict[str, Series]
    thresholds: dict[str, Series]
    prefill_roles: dict[str, Series]
    decode_roles: dict[str, Series]
    events: dict[str, list[Event]]
    #: Where each phase begins when phases follow one another: alike for all configurations, so a
    #: phase has room for the one that took longest.
    begins_s: dict[str, float]
    rows: dict[str, int]
    extras: Extras


def _strings(table: pa.Table, name: str) -> pa.Array:
    return table[name].cast(pa.string())


def _numbers(table: pa.Table, name: str) -> Floats:
    values = pc.cast(table[name], pa.float64()).to_numpy(zero_copy_only=False)
    return np.asarray(values, dtype=np.float64)


def _tables(path: Path) -> dict[str, pa.Table]:
    names = ("requests", "links", "instances", "decisions")
    return {name: reader.read(path, name) for name in names if (path / f"{name}.parquet").exists()}


def load(path: Path, extras: Extras | None = None) -> RunData:
    """Read a run. Raises SummaryError, ReadError."""
    run = summary.read(path)
    tables = _tables(path)
    scale = run.scale
    names = [each.name for each in run.configurations]
    phase = run.capacity_phase
    if all(each.phase(phase) is None for each in run.configurations):
        phase = run.latency_phase
    found = RunData(
        path=path,
        summary=run,
        ttft={},
        series_phase=phase,
        egress={},
        link_gbps=run.link.paper_rate_gbps,
        busy={},
        queued={},
        decoding={},
        thresholds={},
        prefill_roles={},
        decode_roles={},
        events={},
        begins_s=phase_begins(run),
        rows={name: table.num_rows for name, table in tables.items()},
        extras=extras or Extras(),
    )
    for name in names:
        if "requests" in tables:
            part = reader.where(tables["requests"], name, run.latency_phase)
            found.ttft[name] = ecdf(metrics.ttft_s(reader.as_requests(part)) * scale.time)
            busy = prefill_busy(part, scale.time)
            if len(busy.times_s):
                found.busy[name] = busy
        events: list[Event] = []
        for each in found.begins_s:
            if "links" in tables:
                part = reader.where(tables["links"], name, each)
                _add_egress(found, name, each, part, events)
            if "instances" in tables:
                part = reader.where(tables["instances"], name, each)
                _add_instances(found, name, each, part, events)
            if "decisions" in tables:
                part = reader.where(tables["decisions"], name, each)
                _add_thresholds(found, name, each, part, events)
        told = _scheduling(run, name)
        if told:
            # The schedulers say what they did and when; what the samples show of it is left out.
            events = [event for event in events if event.what.startswith("link")] + told
        order = list(found.begins_s)
        found.events[name] = sorted(events, key=lambda e: (order.index(e.phase), e.time_s))
    return found


def _began_s(run: RunSummary, name: str) -> dict[str, float]:
    """When each phase of a configuration began, after its first; where the run does not say, as if
    each had followed the one before at once.
    """
    said = run.extra.get("fleets", {}).get(name, {}).get("phase_began_s")
    if said:
        return {str(phase): float(began_s) for phase, began_s in said.items()}
    found, began_s, now_s = run.configuration(name), {}, 0.0
    for phase in found.phases if found else ():
        began_s[phase.name] = now_s
        now_s += (phase.duration_s or 0.0) * run.scale.time
    return began_s


def phase_begins(run: RunSummary) -> dict[str, float]:
    """Phase -> where it begins on a common axis, in order."""
    longest: dict[str, float] = {}
    for each in run.configurations:
        began_s = _began_s(run, each.name)
        for phase, after in zip_longest(each.phases, each.phases[1:]):
            took_s = (phase.duration_s or 0.0) * run.scale.time
            if after is not None and phase.name in began_s and after.name in began_s:
                took_s = max(took_s, began_s[after.name] - began_s[phase.name])
            longest[phase.name] = max(longest.get(phase.name, 0.0), took_s)
    begins, now_s = {}, 0.0
    for name, took_s in longest.items():
        begins[name] = now_s
        now_s += took_s
    return begins


def _scheduling(run: RunSummary, name: str) -> list[Event]:
    """What the schedulers of a configuration did in its phases. They count from the start of the
    first; what they did while the SLO's rate was searched, after the last, is left out.
    """
    found = run.configuration(name)
    began_s = _began_s(run, name)
    if found is None or not found.phases or not began_s:
        return []
    last = found.phases[-1]
    end_s = began_s.get(last.name, 0.0) + (last.duration_s or np.inf) * run.scale.time
    actions = run.extra.get("fleets", {}).get(name, {}).get("scheduling", [])
    events = []
    for time_s, what in actions:
        phases = [phase for phase, began in began_s.items() if began <= time_s]
        if phases and time_s <= end_s:
            text = re.sub(r"^t (\d+) -> (\d+)$", _threshold_change, str(what))
            events.append(Event(phases[-1], float(time_s) - began_s[phases[-1]], text))
    return events


def _threshold_change(match: re.Match[str]) -> str:
    before, after = (int(group) for group in match.groups())
    return f"threshold {before:,} -> {after:,}"


def ecdf(samples: Floats) -> Floats:
    """Sorted values at evenly spaced shares (0 to 1) of the samples; empty below two of them."""
    present = np.sort(samples[~np.isnan(samples)])
    if len(present) < 2:
        return np.empty(0)
    at = np.linspace(0, len(present) - 1, min(QUANTILES, len(present))).round().astype(int)
    return present[at]


def binned(times_s: Floats, values: Floats, bins: int = BINS) -> Series:
    """Means in equal bins of time; NaN where a bin has no sample."""
    if len(times_s) < 2:
        return Series(times_s, values)
    edges = np.linspace(times_s.min(), times_s.max(), min(bins, len(times_s)) + 1)
    place = np.clip(np.searchsorted(edges, times_s, side="right") - 1, 0, len(edges) - 2)
    count = np.bincount(place, minlength=len(edges) - 1)
    total = np.bincount(place, weights=values, minlength=len(edges) - 1)
    with np.errstate(invalid="ignore"):
        means = total / count
    return Series((edges[:-1] + edges[1:]) / 2, means)


def prefill_busy(requests: pa.Table, time_scale: float) -> Series:
    """Share (0 to 1) of the prefill instances that compute, in bins from the first to the last
    scheduled arrival. An instance counts from its first prefill on, as one whether it computes one
    prompt or several.
    """
    began = _numbers(requests, "prefill_started_us") / 1e6
    ended = _numbers(requests, "prefill_finished_us") / 1e6
    done = ~np.isnan(began) & ~np.isnan(ended)
    scheduled = _numbers(requests, "scheduled_us") / 1e6
    if done.sum() < 2 or np.nanmax(scheduled) <= np.nanmin(scheduled):
        return Series(np.empty(0), np.empty(0))
    places = np.array(_strings(requests, "prefill_instance").to_pylist(), dtype=object)[done]
    began, ended = began[done], ended[done]
    bins = min(BUSY_BINS, int(done.sum()))
    edges = np.linspace(np.nanmin(scheduled), np.nanmax(scheduled), bins + 1)
    instances = sorted(set(places))
    total = np.zeros(len(edges) - 1)
    for instance in instances:
        here = places == instance
        order = np.argsort(began[here], kind="stable")
        starts, stops = began[here][order], np.maximum.accumulate(ended[here][order])
        starts[1:] = np.maximum(starts[1:], stops[:-1])
        stops = np.maximum(starts, stops)
        # Seconds computed until each moment: grows within a prefill, is level between them.
        moments = np.column_stack((starts, stops)).ravel()
        spent = np.column_stack((np.zeros_like(starts), stops - starts)).ravel().cumsum()
        total += np.diff(np.interp(edges, moments, spent))
    share = total / (np.diff(edges) * len(instances))
    return Series((edges[:-1] + edges[1:]) / 2 * time_scale, share)


def _add_egress(
    found: RunData, name: str, phase: str, links: pa.Table, events: list[Event]
) -> None:
    """Rates from the byte counter of the busiest direction, over bins, in the series' phase; what
    became of the link in any.
    """
    best: pa.Table | None = None
    for link in pc.unique(_strings(links, "link")).to_pylist():
        part = links.filter(pc.equal(_strings(links, "link"), link))
        if best is None or pc.max(part["sent_bytes"]).as_py() > pc.max(best["sent_bytes"]).as_py():
            best = part
    if best is None or not pc.max(best["sent_bytes"]).as_py():
        return
    scale = found.summary.scale
    times = _numbers(best, "time_us") / 1e6
    order = np.argsort(times, kind="stable")
    times, sent = times[order], np.maximum.accumulate(_numbers(best, "sent_bytes")[order])
    verdicts = np.array(_strings(best, "verdict").to_pylist(), dtype=object)[order]
    for at in np.flatnonzero(verdicts[1:] != verdicts[:-1]) + 1:
        if verdicts[at] and verdicts[at - 1]:
            events.append(Event(phase, float(times[at]) * scale.time, f"link {verdicts[at]}"))
    edges = np.linspace(times[0], times[-1], min(BINS, len(times)) + 1)
    moved = np.diff(np.interp(edges, times, sent))
    widths = np.diff(edges)
    if phase == found.series_phase and (widths > 0).all():
        gbps = moved * 8e-9 / widths * scale.bytes / scale.time
        found.egress[name] = Series((edges[:-1] + edges[1:]) / 2 * scale.time, gbps)


def _add_instances(
    found: RunData, name: str, phase: str, table: pa.Table, events: list[Event]
) -> None:
    """Requests assigned for prefill and for decode in the series' phase, and how many instances had
    each role in all.
    """
    if not table.num_rows:
        return
    scale = found.summary.scale
    times = _numbers(table, "time_us")
    roles = np.array(_strings(table, "role").to_pylist(), dtype=object)
    moments, at = np.unique(times, return_inverse=True)
    seconds = moments / 1e6 * scale.time
    for role, column, into in (
        ("prefill", "queued", found.queued),
        ("decode", "running", found.decoding),
    ):
        if phase != found.series_phase:
            continue
        here = roles == role
        total = np.bincount(at[here], weights=_numbers(table, column)[here], minlength=len(moments))
        into[name] = binned(seconds, total.astype(np.float64))
    begins_s = found.begins_s[phase]
    for role, whole in (("prefill", found.prefill_roles), ("decode", found.decode_roles)):
        count = np.bincount(at[roles == role], minlength=len(moments)).astype(np.float64)
        steps = _steps(seconds, count)
        whole[name] = _joined(whole.get(name), steps, begins_s)
        if role == "prefill":
            for before, moment, after in _changes(steps):
                what = f"prefill instances {before:.0f} -> {after:.0f}"
                events.append(Event(phase, moment, what))


def _joined(before: Series | None, phase: Series, begins_s: float) -> Series:
    """The line so far and one phase's after it; a gap between them, in which nothing is known."""
    if not len(phase.times_s):
        return before or phase
    times = phase.times_s + begins_s
    if before is None or not len(before.times_s):
        return Series(times, phase.values)
    return Series(
        np.concatenate((before.times_s, times[:1], times)),
        np.concatenate((before.values, [np.nan], phase.values)),
    )


def _changes(steps: Series) -> list[tuple[float, float, float]]:
    """(value before, when it changed, value after) of a step line."""
    return [
        (float(before), float(moment), float(after))
        for before, moment, after in zip(
            steps.values, steps.times_s[1:], steps.values[1:], strict=False
        )
        if after != before
    ]


def _steps(times_s: Floats, values: Floats) -> Series:
    """Only the samples where the value changes, with both ends: a step line."""
    if not len(times_s):
        return Series(times_s, values)
    keep = np.ones(len(times_s), dtype=np.bool_)
    keep[1:-1] = (values[1:-1] != values[:-2]) | (values[1:-1] != values[2:])
    return Series(times_s[keep], values[keep])


def _add_thresholds(
    found: RunData, name: str, phase: str, table: pa.Table, events: list[Event]
) -> None:
    threshold = _numbers(table, "threshold_tokens")
    present = ~np.isnan(threshold)
    if not present.any():
        return
    times = _numbers(table, "time_us")[present] / 1e6 * found.summary.scale.time
    order = np.argsort(times, kind="stable")
    series = _steps(times[order], threshold[present][order])
    moved = _changes(series)
    if len(series.times_s) > 4 * BINS:
        series = binned(times[order], threshold[present][order])
    found.thresholds[name] = _joined(found.thresholds.get(name), series, found.begins_s[phase])
    if len(np.unique(series.values)) <= 8:
        for before, moment, after in moved:
            what = f"threshold {before:,.0f} -> {after:,.0f}"
            events.append(Event(phase, moment, what))
