"""Writes a run's rows to Parquet while it goes, at a few microseconds a request.

Rows are kept as they come, converted to columns in chunks while they are still in the processor's
cache, and become a row group when there are `row_group_rows` of them. Each row group is readable
from then on (`results.growing`), so a crash loses at most the open ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from results import columns
from results.growing import GrowingParquet
from results.records import RequestRecord
from results.rows import DecisionRow, InstanceRow, LinkRow
from results.schemas import SCHEMAS, with_metadata

COMPLETE_KEY = "prfaas.complete"

#: Rows, and runs of tokens in them, that are converted together.
_CHUNK_ROWS = 4096
_CHUNK_RUNS = 250_000
#: A row group is also closed at this size in memory, which bounds it for measured token times.
_GROUP_BYTES = 64 << 20

Convert = Callable[[Sequence[Any]], pa.Array]


def _converter(field: pa.Field) -> Convert:
    kind = field.type
    if field.name.endswith("_us"):
        return columns.times
    if pa.types.is_dictionary(kind):
        return columns.names
    if pa.types.is_integer(kind):
        return lambda values: columns.integers(values, kind)
    if pa.types.is_floating(kind):
        return columns.numbers
    if pa.types.is_boolean(kind):
        return columns.booleans
    return columns.alternatives


#: schema field -> how its column is made from the values of the rows, after the first two fields.
_CONVERTERS = {
    table: [_converter(field) for field in list(schema)[2:]]
    for table, schema in SCHEMAS.items()
    if table != "tokens"
}


def _attribute(column: str) -> str:
    return column[:-3] + "_s" if column.endswith("_us") else column


def _getters(table: str) -> list[Callable[[Any], Any]]:
    names = SCHEMAS[table].names[2:]
    if table == "requests":
        return [attrgetter(_attribute(name)) for name in names]
    return [itemgetter(at) for at in range(len(names))]


# A column at a time: a tuple of all fields a row would be garbage that the collector walks.
_GETTERS = {table: _getters(table) for table in _CONVERTERS}


class _Rows:
    """Rows not yet converted, and where configuration or phase changed among them."""

    __slots__ = ("configuration", "phase", "rows", "spans")

    def __init__(self) -> None:
        self.configuration = self.phase = ""
        self.rows: list[Any] = []
        self.spans: list[tuple[str, str, int]] = []

    def begin(self, configuration: str, phase: str) -> None:
        self.spans.append((configuration, phase, len(self.rows)))
        self.configuration, self.phase = configuration, phase

    def take(self) -> tuple[list[Any], list[pa.Array]]:
        """The rows, with their configuration and phase columns; none are left."""
        ends = [first for _, _, first in self.spans[1:]] + [len(self.rows)]
        counts = [end - first for (_, _, first), end in zip(self.spans, ends, strict=True)]
        where = [
            columns.repeated([(each[0], n) for each, n in zip(self.spans, counts, strict=True)]),
            columns.repeated([(each[1], n) for each, n in zip(self.spans, counts, strict=True)]),
        ]
        rows, self.rows = self.rows, []
        self.spans = [(self.configuration, self.phase, 0)]
        return rows, where


class _Group:
    """The open row group of one file, in converted chunks."""

    def __init__(self, file: GrowingParquet, max_rows: int) -> None:
        self.file = file
        self._max_rows = max_rows
        self._chunks: list[pa.Table] = []
        self._rows = self._bytes = 0

    def add(self, arrays: list[pa.Array]) -> pa.Table:
        chunk = pa.Table.from_arrays(arrays, schema=self.file.schema)
        self._chunks.append(chunk)
        self._rows += chunk.num_rows
        self._bytes += chunk.nbytes
        if self._rows >= self._max_rows or self._bytes >= _GROUP_BYTES:
            self.write()
        return chunk

    def write(self) -> None:
        if self._chunks:
            whole = pa.concat_tables(self._chunks).unify_dictionaries().combine_chunks()
            self._chunks = []
            self._rows = self._bytes = 0
            self.file.append(whole)


class Recorder:
    """Creates requests, tokens, links, instances and decisions .parquet in `directory`.

    `meta` goes into each file's key-value metadata (commit, seed, clock mode, scale factors, ...);
    leave out what differs between equal runs where equal bytes are wanted. A record handed in must
    not change any more. Raises OSError.
    """

    def __init__(
        self,
        directory: Path,
        meta: Mapping[str, str],
        *,
        row_group_rows: int = 32_768,
    ) -> None:
        self._chunk_rows = min(_CHUNK_ROWS, row_group_rows)
        self._groups = {
            table: _Group(
                GrowingParquet(directory / f"{table}.parquet", with_metadata(table, meta)),
                row_group_rows,
            )
            for table in SCHEMAS
        }
        self._requests = _Rows()
        self._runs = 0
        self._others = {table: _Rows() for table in ("links", "instances", "decisions")}
        self._decisions = self._others["decisions"]

    def request(self, record: RequestRecord, configuration: str, phase: str) -> None:
        """A request that ended; its tokens go to tokens.parquet."""
        waiting = self._requests
        if configuration is not waiting.configuration or phase is not waiting.phase:
            waiting.begin(configuration, phase)
        rows = waiting.rows
        rows.append(record)
        self._runs += len(record.token_runs)
        if len(rows) >= self._chunk_rows or self._runs >= _CHUNK_RUNS:
            self._convert_requests()

    def decision(self, row: DecisionRow, configuration: str, phase: str) -> None:
        waiting = self._decisions
        if configuration is not waiting.configuration or phase is not waiting.phase:
            waiting.begin(configuration, phase)
        rows = waiting.rows
        rows.append(row)
        if len(rows) >= self._chunk_rows:
            self._convert("decisions", waiting)

    def link(self, row: LinkRow, configuration: str, phase: str) -> None:
        self._add("links", row, configuration, phase)

    def instance(self, row: InstanceRow, configuration: str, phase: str) -> None:
        self._add("instances", row, configuration, phase)

    def _add(self, table: str, row: Any, configuration: str, phase: str) -> None:
        waiting = self._others[table]
        if configuration != waiting.configuration or phase != waiting.phase:
            waiting.begin(configuration, phase)
        waiting.rows.append(row)
        if len(waiting.rows) >= self._chunk_rows:
            self._convert(table, waiting)

    def flush(self) -> None:
        """Close the open row groups now. In real time, call it every half minute or so."""
        self._convert_requests()
        for table, waiting in self._others.items():
            self._convert(table, waiting)
        for group in self._groups.values():
            group.write()

    def close(self, complete: bool = True) -> None:
        """Write what is left. Only `complete=True` marks the files as those of a whole run."""
        self.flush()
        for group in self._groups.values():
            group.file.close({COMPLETE_KEY: "true" if complete else "false"})

    def _convert_requests(self) -> None:
        if not self._requests.rows:
            return
        self._runs = 0
        records, where = self._requests.take()
        chunk = self._groups["requests"].add(where + _columns("requests", records))
        ids, first_us = chunk["id"].chunk(0), chunk["first_token_us"].chunk(0)
        timing, runs, gaps_us = columns.token_columns(records)
        self._groups["tokens"].add([*where, ids, timing, first_us, runs, gaps_us])

    def _convert(self, table: str, waiting: _Rows) -> None:
        if waiting.rows:
            rows, where = waiting.take()
            self._groups[table].add(where + _columns(table, rows))


def _columns(table: str, rows: list[Any]) -> list[pa.Array]:
    return [
        convert(list(map(get, rows)))
        for convert, get in zip(_CONVERTERS[table], _GETTERS[table], strict=True)
    ]
