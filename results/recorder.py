"""Writes a run's rows to Parquet while it goes, at a few microseconds a request.

Rows are converted to columns in chunks, those of requests mostly in one, which become a row group
when there are `row_group_rows` of them. Each row group is readable from then on
(`results.growing`), so a crash loses at most the open ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from results import columns, gap_counts
from results.growing import GrowingParquet
from results.records import RequestRecord
from results.request_rows import RequestRows
from results.rows import AuditRow, DecisionRow, FlowRow, InstanceRow, LinkRow
from results.schemas import SCHEMAS, with_metadata

COMPLETE_KEY = "prfaas.complete"

#: Rows of other tables, and runs of tokens, that are converted together.
_CHUNK_ROWS = 4096
_CHUNK_RUNS = 250_000
#: A row group is also closed at this size in memory, which bounds it for measured token times.
_GROUP_BYTES = 64 << 20

#: How the columns of a table are made from its rows, after the first two.
_CONVERTERS = {
    table: [columns.converter(field) for field in list(SCHEMAS[table])[2:]]
    for table in ("links", "instances", "decisions", "audit", "flows")
}


class _Where:
    """Where configuration or phase changed among rows not yet converted."""

    __slots__ = ("configuration", "phase", "spans")

    def __init__(self) -> None:
        self.configuration = self.phase = ""
        self.spans: list[columns.Span] = []

    def begin(self, configuration: str, phase: str, row: int) -> None:
        self.spans.append((configuration, phase, row))
        self.configuration, self.phase = configuration, phase

    def take(self, rows: int) -> list[pa.Array]:
        """The configuration and phase columns of `rows` rows, and start anew."""
        spans, self.spans = self.spans, [(self.configuration, self.phase, 0)]
        return columns.where(spans, rows)


class _Rows:
    """Rows of links, instances, decisions, audit or flows not yet converted."""

    __slots__ = ("rows", "table", "where")

    def __init__(self, table: str) -> None:
        self.table = table
        self.rows: list[Any] = []
        self.where = _Where()

    def take(self) -> list[pa.Array]:
        """All columns; no rows are left."""
        where = self.where.take(len(self.rows))
        rows, self.rows = self.rows, []
        # A column at a time: transposing rows at once walks memory the other way.
        return where + [
            convert([row[at] for row in rows]) for at, convert in enumerate(_CONVERTERS[self.table])
        ]


class _Group:
    """The open row group of one file, in converted chunks."""

    def __init__(self, file: GrowingParquet, max_rows: int) -> None:
        self.file = file
        self._max_rows = max_rows
        self._chunks: list[pa.Table] = []
        self._rows = self._bytes = 0

    def add(self, arrays: list[pa.Array]) -> None:
        chunk = pa.Table.from_arrays(arrays, schema=self.file.schema)
        self._chunks.append(chunk)
        self._rows += chunk.num_rows
        self._bytes += chunk.nbytes
        if self._rows >= self._max_rows or self._bytes >= _GROUP_BYTES:
            self.write()

    @property
    def room(self) -> int:
        """Rows until it is full."""
        return self._max_rows - self._rows

    def write(self) -> None:
        if self._chunks:
            whole = self._chunks[0]
            if len(self._chunks) > 1:
                whole = pa.concat_tables(self._chunks).unify_dictionaries().combine_chunks()
            self._chunks = []
            self._rows = self._bytes = 0
            self.file.append(whole)


class Recorder:
    """Creates the tables of results.schemas in `directory`: requests.parquet and so on.

    `meta` goes into each file's key-value metadata (commit, seed, clock mode, scale factors, ...);
    leave out what differs between equal runs where equal bytes are wanted. A record that was handed
    in may be read a little later, with others: it must not change any more. Raises OSError, and
    ValueError for a record whose values do not fit into the columns.
    """

    #: request(record, configuration, phase): a request that ended; its tokens go to tokens.parquet.
    #: The copier's own: a method around it would take a third of the time that it does.
    request: Callable[[RequestRecord, str, str], None]

    def __init__(
        self,
        directory: Path,
        meta: Mapping[str, str],
        *,
        row_group_rows: int = 32_768,
        tables: Collection[str] = tuple(SCHEMAS),
    ) -> None:
        self._chunk_rows = min(_CHUNK_ROWS, row_group_rows)
        self._groups = {
            table: _Group(
                GrowingParquet(directory / f"{table}.parquet", with_metadata(table, meta)),
                row_group_rows,
            )
            for table in SCHEMAS
            if table in tables
        }
        self._requests = RequestRows(self._convert_requests)
        self._begin_requests()
        self.request = self._requests.add
        self._others = {table: _Rows(table) for table in _CONVERTERS}
        self._decisions = self._others["decisions"]

    def decision(self, row: DecisionRow, configuration: str, phase: str) -> None:
        self._add(self._decisions, row, configuration, phase)

    def link(self, row: LinkRow, configuration: str, phase: str) -> None:
        self._add(self._others["links"], row, configuration, phase)

    def instance(self, row: InstanceRow, configuration: str, phase: str) -> None:
        self._add(self._others["instances"], row, configuration, phase)

    def audit(self, row: AuditRow, configuration: str, phase: str) -> None:
        self._add(self._others["audit"], row, configuration, phase)

    def flow(self, row: FlowRow, configuration: str, phase: str) -> None:
        self._add(self._others["flows"], row, configuration, phase)

    def _add(self, waiting: _Rows, row: Any, configuration: str, phase: str) -> None:
        where, rows = waiting.where, waiting.rows
        if configuration is not where.configuration or phase is not where.phase:
            where.begin(configuration, phase, len(rows))
        rows.append(row)
        if len(rows) >= self._chunk_rows:
            self._convert(waiting)

    def flush(self) -> None:
        """Close the open row groups now. In real time, call it every half minute or so."""
        self._convert_requests()
        for waiting in self._others.values():
            self._convert(waiting)
        for group in self._groups.values():
            group.write()
        self._begin_requests()

    def close(self, complete: bool = True) -> None:
        """Write what is left. Only `complete=True` marks the files as those of a whole run."""
        self.flush()
        for group in self._groups.values():
            group.file.close({COMPLETE_KEY: "true" if complete else "false"})

    def _convert_requests(self) -> None:
        if self._requests.rows:
            where, requests, tokens = self._requests.take()
            self._groups["requests"].add(where + requests)
            self._groups["tokens"].add(where + tokens)
            gaps = gap_counts.columns(where[0], where[1], tokens[-1])
            if gaps:
                self._groups["gaps"].add(gaps)
            self._begin_requests()

    def _begin_requests(self) -> None:
        if "requests" in self._groups:
            self._requests.begin(self._groups["requests"].room, _CHUNK_RUNS)

    def _convert(self, waiting: _Rows) -> None:
        if waiting.rows:
            self._groups[waiting.table].add(waiting.take())
