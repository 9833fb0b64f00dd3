"""Trace stamps as a schedule: windows, slow-down, offset, and spreading of quantised stamps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

from workloads.request import Request


def window(
    requests: Iterator[Request], start_s: float = 0.0, end_s: float | None = None
) -> Iterator[Request]:
    """The requests of [start_s, end_s), whose times then count from start_s."""
    for request in requests:
        if end_s is not None and request.arrival_s >= end_s:
            return
        if request.arrival_s >= start_s:
            yield replace(request, arrival_s=request.arrival_s - start_s)


def slowed(requests: Iterator[Request], factor: float, offset_s: float) -> Iterator[Request]:
    """Times multiplied by `factor`, then moved by `offset_s`."""
    for request in requests:
        yield replace(request, arrival_s=request.arrival_s * factor + offset_s)


def dequantised(
    requests: Iterator[Request], quantum_s: float, rng: np.random.Generator
) -> Iterator[Request]:
    """Spreads stamps that are multiples of `quantum_s` (within 1 %) over the interval each one
    stands for: uniform random times in ascending order, so file order stays.

    The times inside an interval are invented; only its count of arrivals is the trace's.
    """

    def interval(request: Request) -> int:
        return int(request.arrival_s / quantum_s + 0.01)

    for index, group in groupby(requests, interval):
        members = list(group)
        spread = np.sort(rng.random(len(members))).tolist()
        for request, share in zip(members, spread, strict=True):
            yield replace(request, arrival_s=(index + share) * quantum_s)
