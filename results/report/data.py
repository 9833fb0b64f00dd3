"""What the charts of one run need, read from its directory; times in paper units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Something that moved a threshold or a role, or may have."""

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
    for `busy`, which is of the latency phase: in an overloaded one all instances compute always.
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
        if "links" in tables:
            part = reader.where(tables["links"], name, phase)
            _add_egress(found, name, part, events)
        if "instances" in tables:
            _add_instances(found, name, reader.where(tables["instances"], name, phase), events)
        if "decisions" in tables:
            _add_thresholds(found, name, reader.where(tables["decisions"], name, phase), events)
        told = _scheduling(run, name, phase)
        if told:
            # The schedulers say what they did and when; what the samples show of it is left out.
            events = [event for event in events if event.what.startswith("link")] + told
        found.events[name] = sorted(events, key=lambda event: event.time_s)
    return found


def _scheduling(run: RunSummary, name: str, phase: str) -> list[Event]:
    """What the schedulers of a configuration did in `phase`, if it was the first of its phases:
    they count from the start of that one.
    """
    found = run.configuration(name)
    if found is None or not found.phases or found.phases[0].name != phase:
        return []
    end_s = found.phases[0].duration_s or np.inf
    fleets = run.extra.get("fleets", {})
    actions = fleets.get(name, {}).get("scheduling", [])
    return [
        Event(float(time_s), re.sub(r"^t (\d+) -> (\d+)$", _threshold_change, str(what)))
        for time_s, what in actions
        if time_s <= end_s
    ]


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


def _add_egress(found: RunData, name: str, links: pa.Table, events: list[Event]) -> None:
    """Rates from the byte counter of the busiest direction, over bins."""
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
    edges = np.linspace(times[0], times[-1], min(BINS, len(times)) + 1)
    moved = np.diff(np.interp(edges, times, sent))
    widths = np.diff(edges)
    if (widths <= 0).any():
        return
    gbps = moved * 8e-9 / widths * scale.bytes / scale.time
    found.egress[name] = Series((edges[:-1] + edges[1:]) / 2 * scale.time, gbps)
    verdicts = np.array(_strings(best, "verdict").to_pylist(), dtype=object)[order]
    for at in np.flatnonzero(verdicts[1:] != verdicts[:-1]) + 1:
        if verdicts[at] and verdicts[at - 1]:
            events.append(Event(float(times[at]) * scale.time, f"link {verdicts[at]}"))


def _add_instances(found: RunData, name: str, table: pa.Table, events: list[Event]) -> None:
    """Requests assigned for prefill and for decode, and how many instances had each role."""
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
        here = roles == role
        total = np.bincount(at[here], weights=_numbers(table, column)[here], minlength=len(moments))
        into[name] = binned(seconds, total.astype(np.float64))
    for role, into in (("prefill", found.prefill_roles), ("decode", found.decode_roles)):
        count = np.bincount(at[roles == role], minlength=len(moments)).astype(np.float64)
        into[name] = _steps(seconds, count)
    changed = found.prefill_roles[name]
    for before, moment, after in zip(
        changed.values, changed.times_s[1:], changed.values[1:], strict=False
    ):
        if after != before:
            events.append(Event(float(moment), f"prefill instances {before:.0f} -> {after:.0f}"))


def _steps(times_s: Floats, values: Floats) -> Series:
    """Only the samples where the value changes, with both ends: a step line."""
    if not len(times_s):
        return Series(times_s, values)
    keep = np.ones(len(times_s), dtype=np.bool_)
    keep[1:-1] = (values[1:-1] != values[:-2]) | (values[1:-1] != values[2:])
    return Series(times_s[keep], values[keep])


def _add_thresholds(found: RunData, name: str, table: pa.Table, events: list[Event]) -> None:
    threshold = _numbers(table, "threshold_tokens")
    present = ~np.isnan(threshold)
    if not present.any():
        return
    times = _numbers(table, "time_us")[present] / 1e6 * found.summary.scale.time
    order = np.argsort(times, kind="stable")
    series = _steps(times[order], threshold[present][order])
    if len(series.times_s) > 4 * BINS:
        series = binned(times[order], threshold[present][order])
    found.thresholds[name] = series
    if len(np.unique(series.values)) > 8:
        return
    for before, moment, after in zip(
        series.values, series.times_s[1:], series.values[1:], strict=False
    ):
        if after != before:
            events.append(Event(float(moment), f"threshold {before:,.0f} -> {after:,.0f}"))
