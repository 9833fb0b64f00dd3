"""From a workload's configuration to its requests and its length distribution.

Randomness comes from one seed through independent streams, one a purpose: changing what one of them
feeds (the arrival process, say) leaves the draws of the others as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, repeat, takewhile
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from workloads import arrivals as processes
from workloads.documents import document_requests
from workloads.draws import endless
from workloads.drift import drifting, lengths_at, lengths_over_a_period
from workloads.errors import InputError
from workloads.kinds import (
    ArrivalSpec,
    DocumentsWorkload,
    DriftWorkload,
    ExponentialShape,
    FixedWorkload,
    LinearShape,
    LogNormalLengths,
    LogNormalWorkload,
    OnOffShape,
    SessionsWorkload,
    StepsShape,
    TraceWorkload,
    WorkloadSpec,
)
from workloads.lengths import Empirical, Fixed, LengthDistribution
from workloads.request import Request
from workloads.retime import dequantised, slowed, window
from workloads.reuse import PrefixCache
from workloads.sessions import mean_session_turns, session_requests
from workloads.traces.readers import open_trace

__all__ = [
    "ArrivalSpec",
    "DocumentsWorkload",
    "DriftWorkload",
    "FixedWorkload",
    "LogNormalLengths",
    "LogNormalWorkload",
    "SessionsWorkload",
    "TraceWorkload",
    "WorkloadSpec",
    "arrival_times",
    "check",
    "generate",
    "length_distribution",
    "lengths_at",
    "notes",
    "parse_arrivals",
    "parse_workload",
]

#: Requests looked at where a workload's length distribution has no closed form.
PILOT_REQUESTS = 8192


@dataclass(frozen=True, slots=True)
class Streams:
    """One random generator a purpose. Append only: an order change changes every workload."""

    lengths: np.random.Generator
    outputs: np.random.Generator
    arrivals: np.random.Generator
    prefixes: np.random.Generator
    tenants: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Streams:
        spawned = np.random.SeedSequence(seed).spawn(5)
        return cls(*(np.random.Generator(np.random.PCG64(sequence)) for sequence in spawned))


def parse_workload(data: dict[str, Any]) -> WorkloadSpec:
    """A workload from a table such as {"kind": "lognormal", "mu": 9.9}. Raises InputError."""
    workload: WorkloadSpec = _parse(TypeAdapter(WorkloadSpec), data, "workload")
    return workload


def parse_arrivals(data: dict[str, Any]) -> ArrivalSpec:
    """An arrival process from a table such as {"process": "gamma", "burstiness": 0.1}."""
    arrivals: ArrivalSpec = _parse(TypeAdapter(ArrivalSpec), data, "arrivals")
    return arrivals


def _parse(adapter: TypeAdapter[Any], data: dict[str, Any], name: str) -> Any:
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([name, *(str(part) for part in first["loc"])])
        what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise InputError(f"{where}: {what}; found {first['input']!r}"[:300]) from None


def rate_shape(arrivals: ArrivalSpec, request_rate: float) -> processes.Shape:
    """The rate over time that `arrivals` means at `request_rate` requests a second."""
    match arrivals.shape:
        case OnOffShape(on_s=on_s, off_s=off_s):
            return processes.on_off(request_rate, on_s, off_s)
        case LinearShape(from_factor=start, to_factor=end, over_s=over_s):
            return processes.LinearRamp(start * request_rate, end * request_rate, over_s)
        case ExponentialShape(from_factor=start, to_factor=end, over_s=over_s):
            return processes.ExponentialRamp(start * request_rate, end * request_rate, over_s)
        case StepsShape(steps=steps):
            return processes.Steps(
                tuple((step.duration_s, step.factor * request_rate) for step in steps)
            )
        case _:
            return processes.Steady(request_rate)


def arrival_times(
    arrivals: ArrivalSpec, request_rate: float, rng: np.random.Generator
) -> Iterator[float]:
    """Arrival times in seconds, ascending and without end. Not for process "trace"."""
    if arrivals.process == "constant":
        process = processes.constant_process()
    else:
        process = processes.gamma_process(rng, arrivals.burstiness)
    return processes.scheduled(process, rate_shape(arrivals, request_rate))


def generate(
    workload: WorkloadSpec,
    arrivals: ArrivalSpec,
    seed: int,
    *,
    request_rate: float | None = None,
    duration_s: float | None = None,
    count: int | None = None,
) -> Iterator[Request]:
    """The requests of a workload in arrival order, lazily, the same for the same arguments.

    It ends before `duration_s` (s) and after `count` requests, where given; a trace also ends with
    its rows. `request_rate` (requests/s) drives every process but "trace", whose times are the
    rows' own and which takes none. A trace under another process keeps its rows in their order and
    arrives by that process. Raises InputError for arguments that do not go together.
    """
    check(workload, arrivals, request_rate, duration_s, count)
    streams = Streams.of(seed)
    if arrivals.process == "trace":
        assert isinstance(workload, TraceWorkload)
        requests = slowed(
            _dequantised(trace_rows(workload), arrivals, streams),
            arrivals.slow_down,
            arrivals.offset_s,
        )
    else:
        assert request_rate is not None
        rate = request_rate
        if isinstance(workload, SessionsWorkload):
            rate /= mean_session_turns(workload)
        times = arrival_times(arrivals, rate, streams.arrivals)
        if arrivals.exact_rate:
            wanted = count if count is not None else max(1, round(rate * (duration_s or 0.0)))
            times = iter(processes.exactly(times, wanted, rate))
        if _needs_no_finish(workload):
            # In C, as the requests are made: the generator below would be resumed for each.
            if duration_s is not None:
                times = takewhile(float(duration_s).__gt__, times)
            return islice(_requests(workload, times, streams), count)
        requests = _requests(workload, times, streams)
    return _finished(workload, requests, streams, duration_s, count)


def check(
    workload: WorkloadSpec,
    arrivals: ArrivalSpec,
    request_rate: float | None,
    duration_s: float | None,
    count: int | None = None,
) -> None:
    """Raises InputError for arguments of `generate` that do not go together."""
    if arrivals.process == "trace":
        if not isinstance(workload, TraceWorkload):
            raise InputError(
                f"arrivals.process: 'trace' needs a trace's stamps, and workload.kind is "
                f"{workload.kind!r}; use 'poisson', 'constant' or 'gamma'"
            )
        if request_rate is not None:
            raise InputError(
                "request_rate: arrivals.process 'trace' keeps the trace's own times; leave the "
                "rate out and use arrivals.slow_down, or use another process"
            )
    elif request_rate is None or not request_rate > 0 or math.isinf(request_rate):
        raise InputError(f"request_rate: found {request_rate}, needs a positive number")
    if arrivals.exact_rate and duration_s is None and count is None:
        raise InputError("arrivals.exact_rate: needs a duration or a count")
    if arrivals.exact_rate and arrivals.shape.kind != "steady":
        raise InputError(
            f"arrivals.exact_rate: needs a steady shape, found {arrivals.shape.kind!r}"
        )
    if arrivals.exact_rate and isinstance(workload, SessionsWorkload):
        raise InputError("arrivals.exact_rate: sessions start at the rate, their turns do not")


def trace_rows(workload: TraceWorkload) -> Iterator[Request]:
    """The rows that a trace workload selects, with times from its window's start."""
    rows = window(open_trace(workload.path, workload.format), workload.start_s, workload.end_s)
    longest = workload.max_input_tokens
    return rows if longest is None else (row for row in rows if row.input_tokens <= longest)


def _dequantised(
    rows: Iterator[Request], arrivals: ArrivalSpec, streams: Streams
) -> Iterator[Request]:
    if not arrivals.dequantise_s:
        return rows
    return dequantised(rows, arrivals.dequantise_s, streams.arrivals)


def _requests(
    workload: WorkloadSpec, times: Iterator[float], streams: Streams
) -> Iterator[Request]:
    # Requests of most kinds are made in C: a generator would be resumed for each.
    match workload:
        case TraceWorkload():
            rows = trace_rows(workload)
            return (replace(row, arrival_s=t) for row, t in zip(rows, times, strict=False))
        case SessionsWorkload():
            turns = session_requests(workload, times, streams.lengths, streams.prefixes)
            return window(turns, workload.warm_s)
        case DocumentsWorkload():
            return document_requests(
                workload, times, streams.lengths, streams.outputs, streams.prefixes
            )
        case DriftWorkload():
            outputs = endless(workload.output_tokens, streams.outputs)
            arrived = zip(drifting(workload, times, streams.lengths), outputs, strict=False)
            return (
                Request(number, arrival_s, tokens, output)
                for number, ((arrival_s, tokens), output) in enumerate(arrived)
            )
        case FixedWorkload(input_tokens=tokens):
            lengths: Iterator[int] = repeat(tokens)
        case LogNormalWorkload():
            lengths = endless(workload, streams.lengths, workload.stratified)
    outputs = endless(workload.output_tokens, streams.outputs)
    return map(Request, count(), times, lengths, outputs)


def _needs_no_finish(workload: WorkloadSpec) -> bool:
    """Its requests are numbered and in order of arrival as they are made, and all are alike."""
    return (
        isinstance(workload, FixedWorkload | LogNormalWorkload)
        and not workload.tenants
        and not workload.slo_class
    )


def _finished(
    workload: WorkloadSpec,
    requests: Iterator[Request],
    streams: Streams,
    duration_s: float | None,
    count: int | None,
) -> Iterator[Request]:
    """Numbers the requests, assigns tenants and SLO class, and ends in time."""
    tenants: Iterator[str] | None = None
    if workload.tenants:
        tenants = _tenants(workload.tenants, streams.tenants)
    slo_class, end_s = workload.slo_class, math.inf if duration_s is None else duration_s
    for number, request in enumerate(islice(requests, count)):
        if request.arrival_s >= end_s:
            return
        if tenants is not None or slo_class or request.id != number:
            request = replace(
                request,
                id=number,
                tenant=next(tenants) if tenants is not None else request.tenant,
                slo_class=slo_class or request.slo_class,
            )
        yield request


def _tenants(weights: dict[str, float], rng: np.random.Generator) -> Iterator[str]:
    names = list(weights)
    edges = np.cumsum(np.fromiter(weights.values(), float))
    while True:
        for index in np.searchsorted(edges, rng.random(1024) * edges[-1], side="right").tolist():
            yield names[min(index, len(names) - 1)]


def length_distribution(workload: WorkloadSpec, *, uncached: bool = False) -> LengthDistribution:
    """The lengths that arrive, for the planner: whole prompts, or with `uncached` what is left of
    each after the hit in an unbounded prefix cache.

    Closed form for log-normal, exact for fixed and traces, the period's mixture for drift, and
    measured on the first PILOT_REQUESTS requests of a fixed seed for sessions and documents.
    """
    match workload:
        case LogNormalWorkload():
            return workload.distribution()
        case FixedWorkload(input_tokens=tokens):
            return Fixed(tokens)
        case DriftWorkload():
            return lengths_over_a_period(workload)
        case TraceWorkload():
            rows = trace_rows(workload)
        case _:
            rows = generate(workload, ArrivalSpec(), 0, request_rate=1.0, count=PILOT_REQUESTS)
    if not uncached:
        lengths = np.fromiter((row.input_tokens for row in rows), np.int64)
    else:
        cache = PrefixCache()
        lengths = np.fromiter((row.input_tokens - cache.serve(row) for row in rows), np.int64)
    if lengths.size == 0:
        raise InputError("workload: selects no request; widen its window or max_input_tokens")
    return Empirical(lengths)


def notes(workload: WorkloadSpec, arrivals: ArrivalSpec) -> list[str]:
    """What the settings did to the workload that a reader of results must know, one line each."""
    said = []
    if arrivals.dequantise_s:
        said.append(
            f"arrival times were spread at random over the {arrivals.dequantise_s:g} s interval "
            "that each trace stamp stands for; times inside an interval are not the trace's"
        )
    if arrivals.slow_down != 1.0:
        said.append(f"trace time was multiplied by {arrivals.slow_down:g}")
    if isinstance(workload, TraceWorkload) and arrivals.process != "trace":
        said.append(f"the trace's arrival times were replaced by a {arrivals.process} process")
    if isinstance(workload, TraceWorkload) and workload.max_input_tokens is not None:
        said.append(f"rows of more than {workload.max_input_tokens} input tokens were left out")
    if isinstance(workload, LogNormalWorkload | DriftWorkload | DocumentsWorkload) and (
        workload.stratified
    ):
        said.append("lengths were drawn stratified: variance between short runs is reduced")
    if arrivals.exact_rate:
        said.append("the schedule was stretched to the exact request rate")
    return said
