"""Requests on their way to columns.

A copier takes what records hold as they end. Numbers leave their objects, which cost four times
the memory and would be fetched from afar later; the rest repeats itself, so a row has numbers of
values. The copier in `_request_rows.c` copies each record at once: one that is freed later than it
would be leaves its memory cold, which costs a simulation more than the copy. Its twin here holds
records until there are `HELD`: in Python a call for all costs two thirds of a call for each.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from native import require
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
_SECONDS = [f"{name[:-3]}_s" for name in _TIMES]

_get_numbers = attrgetter(*_SECONDS, *_COUNTS)
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


class _Numbers(dict[Any, int]):
    """Numbers values in order of first appearance."""

    __slots__ = ()

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class Copier(Protocol):
    """Copies records to columns."""

    @property
    def rows(self) -> int:
        """Records added since `begin`."""

    def begin(
        self,
        times_us: NDArray[np.int64],
        counts: NDArray[np.int64],
        codes: NDArray[np.int32],
        runs_each: NDArray[np.int64],
        max_runs: int,
        /,
    ) -> None:
        """Copy to these from their first row on: (times, rows), (counts, rows), (others, rows) and
        (rows,). `max_runs` runs of tokens make them full as well.
        """

    def add(self, record: RequestRecord, configuration: str, phase: str, /) -> None:
        """Calls `on_full`, with which it was made, when that has made it full. Raises ValueError
        for what does not fit into a column, here or when the record is read, in `take` at the
        latest.
        """

    def take(
        self,
    ) -> tuple[list[columns.Span], list[bytes | None], list[list[Any]], bytes]:
        """Of the rows since `begin`: where they are from; by time, a byte a row that is 1 where it
        is missing (None: nowhere); by other column, the value of each code, in order of first
        appearance; and the three numbers of each run, as doubles.
        """


class PythonCopier:
    """Packs `HELD` records with one call of `struct`, and converts them in blocks."""

    __slots__ = (
        "_block",
        "_capacity",
        "_codes",
        "_combinations",
        "_configuration",
        "_copied",
        "_counts",
        "_held",
        "_in_block",
        "_max_runs",
        "_missing",
        "_on_full",
        "_others",
        "_phase",
        "_run_count",
        "_runs",
        "_runs_each",
        "_spans",
        "_times_us",
    )

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        #: Rows of numbers as they are packed, `_in_block` of them.
        self._block = bytearray(_BLOCK * _ROW_BYTES)
        self._held: list[RequestRecord] = []
        self._copied = 0

    @property
    def rows(self) -> int:
        return self._copied + len(self._held)

    def begin(
        self,
        times_us: NDArray[np.int64],
        counts: NDArray[np.int64],
        codes: NDArray[np.int32],
        runs_each: NDArray[np.int64],
        max_runs: int,
    ) -> None:
        self._times_us, self._counts, self._codes = times_us, counts, codes
        self._runs_each = runs_each
        self._capacity, self._max_runs = len(runs_each), max_runs
        self._missing: NDArray[np.bool_] | None = None
        #: Numbers of what all the others of a row are together.
        self._combinations = _Numbers()
        self._others = array("i")
        self._runs = bytearray()
        self._copied = self._in_block = self._run_count = 0
        self._held.clear()
        #: Of the last row.
        self._configuration: str | None = None
        self._phase: str | None = None
        self._spans: list[columns.Span] = []

    def add(self, record: RequestRecord, configuration: str, phase: str) -> None:
        held = self._held
        try:
            self._run_count += len(record.token_runs)
        except TypeError as error:
            raise _refusal([record]) from error
        if configuration is not self._configuration or phase is not self._phase:
            self._spans.append((configuration, phase, self.rows))
            self._configuration, self._phase = configuration, phase
        held.append(record)
        full = self._copied + len(held) >= self._capacity or self._run_count >= self._max_runs
        if full or len(held) >= HELD:
            self._copy()
        if full:
            self._on_full()

    def _copy(self) -> None:
        """What is held, of which nothing is then."""
        held = self._held
        records = len(held)
        if self._in_block + records > _BLOCK:
            self._convert_block()
        pack, at = _packer(records).pack_into, self._in_block * _ROW_BYTES
        runs: list[Sequence[TokenRun]] = list(map(_get_runs, held))
        lengths = list(map(len, runs))
        try:
            try:
                pack(self._block, at, *_flat(map(_get_numbers, held)))
            except struct.error:  # an event has not happened
                numbers = _flat(map(_get_numbers, held))
                pack(self._block, at, *[math.nan if n is None else n for n in numbers])
            packed_runs = struct.pack(f"{3 * sum(lengths)}d", *_flat(_flat(runs)))
        except (struct.error, TypeError) as error:
            raise _refusal(held) from error
        others = list(map(self._combinations.__getitem__, map(_get_others, held)))
        self._others.extend(others)
        self._runs += packed_runs
        self._runs_each[self._copied : self._copied + records] = lengths
        self._in_block += records
        self._copied += records
        held.clear()

    def _convert_block(self) -> None:
        numbers = np.frombuffer(self._block)[: self._in_block * _WIDTH].reshape(-1, _WIDTH)
        block = slice(self._copied - self._in_block, self._copied)
        seconds = numbers[:, : len(_TIMES)].T.copy()
        unknown = np.isnan(seconds)
        if unknown.any():
            if self._missing is None:
                self._missing = np.zeros(self._times_us.shape, np.bool_)
            self._missing[:, block] = unknown
            seconds[unknown] = 0.0
        latest_s = float(np.abs(seconds).max(initial=0.0))
        if latest_s * 1e6 >= 2**63:
            raise ValueError(f"a time of a request cannot be recorded: {latest_s} s")
        self._times_us[:, block] = columns.to_us(seconds)
        self._counts[:, block] = numbers[:, len(_TIMES) :].view(np.int64).T
        self._in_block = 0

    def take(
        self,
    ) -> tuple[list[columns.Span], list[bytes | None], list[list[Any]], bytes]:
        self._copy()
        self._convert_block()
        rows, values = self._copied, []
        others = np.frombuffer(self._others, np.int32)
        for at in range(len(_OTHERS)):
            numbers = _Numbers()
            codes = [numbers[combination[at]] for combination in self._combinations]
            self._codes[at, :rows] = np.array(codes, np.int32)[others]
            values.append(list(numbers))
        masks = [None] * len(_TIMES) if self._missing is None else self._missing[:, :rows]
        missing = [None if each is None or not each.any() else each.tobytes() for each in masks]
        return self._spans, missing, values, bytes(self._runs)


def _refusal(held: list[RequestRecord]) -> ValueError:
    """Says what of which record does not fit into a column."""
    for record in held:
        for name, kind in [*((name, "d") for name in _SECONDS), *((name, "q") for name in _COUNTS)]:
            value = getattr(record, name)
            try:
                struct.pack(kind, math.nan if kind == "d" and value is None else value)
            except struct.error:
                return ValueError(f"{name} of request {record.id} cannot be recorded: {value!r}")
        try:
            for run in record.token_runs:
                struct.pack("3d", *run)
        except (struct.error, TypeError):
            runs = record.token_runs
            return ValueError(f"token_runs of request {record.id} cannot be recorded: {runs!r}")
    return ValueError("a record changed while it was recorded")


try:
    require("results._request_rows")
    from results import _request_rows

    def _c_copier(on_full: Callable[[], None]) -> Copier:
        return _request_rows.Copier(
            RequestRecord, tuple(_SECONDS), tuple(_COUNTS), tuple(_OTHERS), "token_runs", on_full
        )

    make_copier: Callable[[Callable[[], None]], Copier] = _c_copier
except ImportError:
    make_copier = PythonCopier


class RequestRows:
    """Rows not yet converted, from `begin` to `take`."""

    __slots__ = ("_codes", "_copier", "_counts", "_runs_each", "_times_us", "add")

    def __init__(
        self,
        on_full: Callable[[], None],
        make: Callable[[Callable[[], None]], Copier] = make_copier,
    ) -> None:
        self._copier = make(on_full)
        #: The copier's own, which is called for every request. A record that was handed in must not
        #: change any more.
        self.add = self._copier.add

    @property
    def rows(self) -> int:
        return self._copier.rows

    def begin(self, capacity: int, max_runs: int) -> None:
        """For at most `capacity` rows, and few more than `max_runs` runs of tokens."""
        # Pages that are not written to take no memory.
        self._times_us = np.empty((len(_TIMES), capacity), np.int64)
        self._counts = np.empty((len(_COUNTS), capacity), np.int64)
        self._codes = np.empty((len(_OTHERS), capacity), np.int32)
        self._runs_each = np.empty(capacity, np.int64)
        self._copier.begin(self._times_us, self._counts, self._codes, self._runs_each, max_runs)

    def take(self) -> tuple[list[pa.Array], list[pa.Array], list[pa.Array]]:
        """The first two columns of requests.parquet and of tokens.parquet, the others of the one
        and those of the other, of all rows. What comes next is `begin`.
        """
        rows = self._copier.rows
        spans, missing, values, runs = self._copier.take()
        found = {}
        for name, times, absent in zip(_TIMES, self._times_us, missing, strict=True):
            mask = None if absent is None else np.frombuffer(absent, np.bool_)
            found[name] = columns.plain(times[:rows], mask)
        for name, numbers in zip(_COUNTS, self._counts, strict=True):
            found[name] = columns.plain(numbers[:rows]).cast(REQUESTS.field(name).type)
        for name, codes, distinct in zip(_OTHERS, self._codes, values, strict=True):
            found[name] = _coded(REQUESTS.field(name), columns.plain(codes[:rows]), distinct)
        timing, token_runs, gaps_us = columns.token_columns(
            self._runs_each[:rows], np.frombuffer(runs).reshape(-1, 3)
        )
        tokens = [found["id"], timing, found["first_token_us"], token_runs, gaps_us]
        return columns.where(spans, rows), [found[field.name] for field in _FIELDS], tokens


def _coded(field: pa.Field, codes: pa.Array, values: list[Any]) -> pa.Array:
    """The column of `field` from the numbers of `values` that its rows have."""
    if pa.types.is_dictionary(field.type):
        return pa.DictionaryArray.from_arrays(codes, pa.array(map(str, values), pa.string()))
    return columns.converter(field)(values).take(codes)
