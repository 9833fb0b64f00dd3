"""Requests on their way to columns.

Records are held until there are `HELD`, which are still in a processor's cache, and then copied at
once: between the events of a simulation each step of a copy begins cold, so one call for all costs
two thirds of a call for each. Numbers become bytes, since one that is kept as an object costs four
times the memory and is fetched from afar when it is converted; the rest is the same in most rows,
so a row has the number of a combination.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from results import columns
from results.records import RequestRecord, TokenRun
from results.schemas import REQUESTS

#: Records that are copied together. More would have left the cache by then.
HELD = 128

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
_get_runs = attrgetter("token_runs")
_flat = chain.from_iterable
_WIDTH = len(_TIMES) + len(_COUNTS)
_ROW_BYTES = 8 * _WIDTH
#: Rows whose numbers are converted together: as many as fit in a cache twice.
_BLOCK = 16 * HELD


@cache
def _packer(records: int) -> struct.Struct:
    """Native sizes and order: the others are packed a byte at a time."""
    return struct.Struct(f"{len(_TIMES)}d{len(_COUNTS)}q" * records)


class _Combinations(dict[tuple[Any, ...], int]):
    """Numbers them in order of first appearance."""

    __slots__ = ()

    def __missing__(self, key: tuple[Any, ...]) -> int:
        self[key] = number = len(self)
        return number


class RequestRows:
    """At most `capacity` rows not yet converted. `runs` counts the runs of tokens in them.

    Records are appended to `held`, and then counted and copied by `copy`, which is due when there
    are `HELD` of them.
    """

    __slots__ = (
        "_block",
        "_capacity",
        "_combinations",
        "_counts",
        "_in_block",
        "_missing",
        "_others",
        "_runs",
        "_runs_each",
        "_times_us",
        "held",
        "rows",
        "runs",
    )

    def __init__(self, capacity: int) -> None:
        self.held: list[RequestRecord] = []
        self._capacity = capacity
        #: Rows of numbers as they are packed, `_in_block` of them.
        self._block = bytearray(_BLOCK * _ROW_BYTES)
        self._clear()

    def _clear(self) -> None:
        self._in_block = 0
        # Numbers of earlier blocks by column. Pages that are not written to take no memory.
        self._times_us = np.empty((len(_TIMES), self._capacity), np.int64)
        self._counts = np.empty((len(_COUNTS), self._capacity), np.int64)
        self._missing: NDArray[np.bool_] | None = None
        self._combinations = _Combinations()
        self._others = array("i")
        self._runs = bytearray()
        self._runs_each = array("q")
        self.rows = self.runs = 0

    def copy(self) -> None:
        """What `held` holds, which is empty then."""
        held = self.held
        if not held:
            return
        if self._in_block + len(held) > _BLOCK:
            self._convert_block()
        pack, at = _packer(len(held)).pack_into, self._in_block * _ROW_BYTES
        try:
            pack(self._block, at, *_flat(map(_get_numbers, held)))
        except struct.error:  # an event has not happened
            numbers = _flat(map(_get_numbers, held))
            pack(self._block, at, *[math.nan if n is None else n for n in numbers])
        self._others.extend(map(self._combinations.__getitem__, map(_get_others, held)))
        runs: list[Sequence[TokenRun]] = list(map(_get_runs, held))
        lengths = array("q", map(len, runs))
        count = sum(lengths)
        self._runs_each += lengths
        self._runs += struct.pack(f"{3 * count}d", *_flat(_flat(runs)))
        self._in_block += len(held)
        self.rows += len(held)
        self.runs += count
        held.clear()

    def _convert_block(self) -> None:
        numbers = np.frombuffer(self._block)[: self._in_block * _WIDTH].reshape(-1, _WIDTH)
        block = slice(self.rows - self._in_block, self.rows)
        seconds = numbers[:, : len(_TIMES)].T.copy()
        unknown = np.isnan(seconds)
        if unknown.any():
            if self._missing is None:
                self._missing = np.zeros(self._times_us.shape, np.bool_)
            self._missing[:, block] = unknown
            seconds[unknown] = 0.0
        self._times_us[:, block] = columns.to_us(seconds)
        self._counts[:, block] = numbers[:, len(_TIMES) :].view(np.int64).T
        self._in_block = 0

    def take(self) -> tuple[list[pa.Array], list[pa.Array]]:
        """The columns of requests.parquet after the first two, and those of tokens.parquet, of the
        rows that were copied; none are left.
        """
        found = self._number_columns()
        others = pa.array(np.frombuffer(self._others, np.int32))
        for at, name in enumerate(_OTHERS):
            convert = columns.converter(REQUESTS.field(name))
            distinct = convert([combination[at] for combination in self._combinations])
            found[name] = distinct.take(others)
        timing, runs, gaps_us = columns.token_columns(
            np.frombuffer(self._runs_each, np.int64), np.frombuffer(self._runs).reshape(-1, 3)
        )
        self._clear()
        tokens = [found["id"], timing, found["first_token_us"], runs, gaps_us]
        return [found[field.name] for field in _FIELDS], tokens

    def _number_columns(self) -> dict[str, pa.Array]:
        self._convert_block()
        rows, missing = self.rows, self._missing
        found = {}
        for at, name in enumerate(_TIMES):
            mask = None if missing is None or not missing[at, :rows].any() else missing[at, :rows]
            found[name] = pa.array(self._times_us[at, :rows], mask=mask)
        for at, name in enumerate(_COUNTS):
            found[name] = pa.array(self._counts[at, :rows], REQUESTS.field(name).type)
        return found
