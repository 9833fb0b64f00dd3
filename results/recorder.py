"""Writes a run's rows to Parquet while it goes, at a few microseconds a request.

Rows are kept as they come and become one row group when there are `row_group_rows` of them; each
row group is readable from then on (`results.growing`), so a crash loses at most the open ones.
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


class _Buffer:
    """Rows since the last row group, and where configuration or phase changed among them."""

    __slots__ = ("configuration", "phase", "rows", "spans")

    def __init__(self) -> None:
        self.configuration = self.phase = ""
        self.rows: list[Any] = []
        self.spans: list[tuple[str, str, int]] = []

    def begin(self, configuration: str, phase: str) -> None:
        self.spans.append((configuration, phase, len(self.rows)))
        self.configuration, self.phase = configuration, phase

    def where(self) -> tuple[pa.Array, pa.Array]:
        """The configuration and phase columns."""
        ends = [first for _, _, first in self.spans[1:]] + [len(self.rows)]
        counts = [end - first for (_, _, first), end in zip(self.spans, ends, strict=True)]
        return (
            columns.repeated((span[0], n) for span, n in zip(self.spans, counts, strict=True)),
            columns.repeated((span[1], n) for span, n in zip(self.spans, counts, strict=True)),
        )

    def clear(self) -> None:
        self.rows = []
        self.spans = [(self.configuration, self.phase, 0)]


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
        self._limit = row_group_rows
        self._files = {
            table: GrowingParquet(directory / f"{table}.parquet", with_metadata(table, meta))
            for table in SCHEMAS
        }
        self._requests = _Buffer()
        self._others = {table: _Buffer() for table in ("links", "instances", "decisions")}
        self._decisions = self._others["decisions"]

    def request(self, record: RequestRecord, configuration: str, phase: str) -> None:
        """A request that ended; its tokens go to tokens.parquet."""
        buffer = self._requests
        if configuration is not buffer.configuration or phase is not buffer.phase:
            buffer.begin(configuration, phase)
        rows = buffer.rows
        rows.append(record)
        if len(rows) >= self._limit:
            self._flush_requests()

    def decision(self, row: DecisionRow, configuration: str, phase: str) -> None:
        buffer = self._decisions
        if configuration is not buffer.configuration or phase is not buffer.phase:
            buffer.begin(configuration, phase)
        rows = buffer.rows
        rows.append(row)
        if len(rows) >= self._limit:
            self._flush("decisions")

    def link(self, row: LinkRow, configuration: str, phase: str) -> None:
        self._add("links", row, configuration, phase)

    def instance(self, row: InstanceRow, configuration: str, phase: str) -> None:
        self._add("instances", row, configuration, phase)

    def _add(self, table: str, row: Any, configuration: str, phase: str) -> None:
        buffer = self._others[table]
        if configuration != buffer.configuration or phase != buffer.phase:
            buffer.begin(configuration, phase)
        buffer.rows.append(row)
        if len(buffer.rows) >= self._limit:
            self._flush(table)

    def flush(self) -> None:
        """Close the open row groups now. In real time, call it every half minute or so."""
        self._flush_requests()
        for table in self._others:
            self._flush(table)

    def close(self, complete: bool = True) -> None:
        """Write what is left. Only `complete=True` marks the files as those of a whole run."""
        self.flush()
        for file in self._files.values():
            file.close({COMPLETE_KEY: "true" if complete else "false"})

    def _flush_requests(self) -> None:
        buffer = self._requests
        if not buffer.rows:
            return
        records: list[RequestRecord] = buffer.rows
        where = buffer.where()
        buffer.clear()
        table = self._write("requests", where, records)
        ids, first_us = table["id"].chunk(0), table["first_token_us"].chunk(0)
        timing, runs, gaps_us = columns.token_columns(records)
        file = self._files["tokens"]
        file.append(
            pa.Table.from_arrays([*where, ids, timing, first_us, runs, gaps_us], schema=file.schema)
        )

    def _flush(self, table: str) -> None:
        buffer = self._others[table]
        if buffer.rows:
            where = buffer.where()
            rows = buffer.rows
            buffer.clear()
            self._write(table, where, rows)

    def _write(self, table: str, where: tuple[pa.Array, pa.Array], rows: Sequence[Any]) -> pa.Table:
        file = self._files[table]
        made = [
            convert(list(map(get, rows)))
            for convert, get in zip(_CONVERTERS[table], _GETTERS[table], strict=True)
        ]
        group = pa.Table.from_arrays([*where, *made], schema=file.schema)
        file.append(group)
        return group
