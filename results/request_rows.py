"""Requests on their way to columns: what a record holds is copied at once, while it is still in a
processor's cache. Its numbers become bytes, since a number that is kept as an object costs four
times the memory and is fetched from afar when it is converted.
"""

from __future__ import annotations

import math
import struct
from array import array
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from results import columns
from results.records import RequestRecord
from results.schemas import REQUESTS

_FIELDS = list(REQUESTS)[2:]
_TIMES = [field.name for field in _FIELDS if field.name.endswith("_us")]
_COUNTS = [
    field.name
    for field in _FIELDS
    if pa.types.is_integer(field.type) and not field.name.endswith("_us")
]
_OTHERS = [field.name for field in _FIELDS if field.name not in {*_TIMES, *_COUNTS}]

_get_numbers = attrgetter(*(f"{name[:-3]}_s" for name in _TIMES), *_COUNTS)
_get_others = attrgetter(*_OTHERS)
_pack_numbers = struct.Struct(f"={len(_TIMES)}d{len(_COUNTS)}q").pack
_NUMBERS = np.dtype([(name, "f8") for name in _TIMES] + [(name, "i8") for name in _COUNTS])
_pack_run = struct.Struct("=3d").pack


class RequestRows:
    """Rows not yet converted. `runs` counts the runs of tokens in them."""

    __slots__ = ("_numbers", "_others", "_runs", "_runs_each", "rows", "runs")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._numbers = bytearray()
        self._others: list[Any] = []
        self._runs = bytearray()
        self._runs_each = array("q")
        self.rows = self.runs = 0

    def add(self, record: RequestRecord) -> None:
        numbers = _get_numbers(record)
        try:
            self._numbers += _pack_numbers(*numbers)
        except struct.error:  # an event has not happened
            self._numbers += _pack_numbers(*[math.nan if n is None else n for n in numbers])
        self._others.extend(_get_others(record))
        runs = record.token_runs
        for run in runs:
            self._runs += _pack_run(*run)
        self._runs_each.append(len(runs))
        self.rows += 1
        self.runs += len(runs)

    def take(self) -> tuple[list[pa.Array], list[pa.Array]]:
        """The columns of requests.parquet after the first two, and those of tokens.parquet; no rows
        are left.
        """
        numbers = np.frombuffer(self._numbers, _NUMBERS)
        found = {name: columns.times_of(numbers[name]) for name in _TIMES}
        for name in _COUNTS:
            found[name] = pa.array(numbers[name].copy(), REQUESTS.field(name).type)
        for at, name in enumerate(_OTHERS):
            convert = columns.converter(REQUESTS.field(name))
            found[name] = convert(self._others[at :: len(_OTHERS)])
        timing, runs, gaps_us = columns.token_columns(
            np.frombuffer(self._runs_each, np.int64), np.frombuffer(self._runs).reshape(-1, 3)
        )
        self._clear()
        tokens = [found["id"], timing, found["first_token_us"], runs, gaps_us]
        return [found[field.name] for field in _FIELDS], tokens
