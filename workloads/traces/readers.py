"""Opens a trace of any known format as requests in arrival order, in bounded memory.

Order: rows are sorted stably by stamp through a window of WINDOW rows, so equal stamps keep file
order. A file of up to WINDOW rows is therefore sorted whole, however shuffled; a longer one may
have rows out of place by up to WINDOW rows, and a row further away is an error that names its line.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from workloads.errors import InputError
from workloads.request import Request
from workloads.traces import azure, bailian, burstgpt, mooncake, parquet_form, sharegpt
from workloads.traces.rows import DAMAGED, Place, TraceError, open_bytes

#: Rows held for sorting (about 200 MB of Mooncake rows, 20 MB of Azure's).
WINDOW = 65_536

Reader = Callable[[str], Iterator[tuple[Place, Request]]]

FORMATS: dict[str, Reader] = {
    "mooncake": mooncake.read,
    "azure": azure.read,
    "burstgpt": burstgpt.read,
    "bailian": bailian.read,
    "sharegpt": sharegpt.read,
    "parquet": parquet_form.read,
}


def detect(path: str) -> str:
    """The format's name, from the first bytes."""
    try:
        with open_bytes(path) as stream:
            head = stream.read(8192)
    except DAMAGED as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    text = head.decode("utf-8-sig", "replace").lstrip()
    first, _, _ = text.partition("\n")
    if not head:
        raise TraceError(f"{path}: is empty, needs at least one request")
    if head.startswith(b"PAR1"):
        return "parquet"
    if '"conversations"' in text or '"messages"' in text:
        return "sharegpt"
    if first.startswith("{") and '"chat_id"' in first:
        return "bailian"
    if first.startswith("{") and '"input_length"' in first:
        return "mooncake"
    if "ContextTokens" in first:
        return "azure"
    if "Request tokens" in first:
        return "burstgpt"
    raise TraceError(
        f"{path}:1: no known trace format begins with {first[:40]!r}; "
        f"name one of {', '.join(FORMATS)}"
    )


def open_trace(path: str | Path, format: str = "auto") -> Iterator[Request]:
    """Requests in arrival order, from 0 s, with ids from 0. Errors are TraceErrors.

    A missing file, an unknown format or a bad row near the start raises here, a later one
    when it is reached.
    """
    path = str(path)
    name = detect(path) if format == "auto" else format
    if name not in FORMATS:
        raise InputError(f"format: found {name!r}, needs auto or one of {', '.join(FORMATS)}")
    ordered = in_order(FORMATS[name](path), WINDOW)
    first = next(ordered, None)
    if first is None:
        raise TraceError(f"{path}: holds no request, needs at least one")

    def requests() -> Iterator[Request]:
        origin_s = first.arrival_s
        yield replace(first, id=0, arrival_s=0.0)
        for number, request in enumerate(ordered, 1):
            yield replace(request, id=number, arrival_s=request.arrival_s - origin_s)

    return requests()


def in_order(rows: Iterator[tuple[Place, Request]], window: int) -> Iterator[Request]:
    """Stable sort by arrival through a heap of `window` rows."""
    heap: list[tuple[float, int, Request]] = []
    last_s = float("-inf")
    for number, (place, request) in enumerate(rows):
        if request.arrival_s < last_s:
            raise place.error(
                f"stamp lies {last_s - request.arrival_s:g} s before one that is {window} rows or "
                "more above; sort the file by time"
            )
        heapq.heappush(heap, (request.arrival_s, number, request))
        if len(heap) > window:
            last_s, _, due = heapq.heappop(heap)
            yield due
    while heap:
        yield heapq.heappop(heap)[2]
