"""The history of nights: a hive-style Parquet dataset, `part=NAME/night=STAMP/data.parquet`.

Each file is written whole or not at all, and a night of a part is written once, so nothing is ever
appended to a file. A file of an older version lacks columns; they read as null.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

HISTORY_VERSION = 1


class HistoryError(ValueError):
    """The history is not readable."""

    exit_code = 2


def _field(name: str, kind: pa.DataType, definition: str) -> pa.Field:
    return pa.field(name, kind, metadata={"definition": definition})


SCHEMA = pa.schema(
    [
        _field("night", pa.string(), "UTC stamp of the night, sorts by time"),
        _field("part", pa.string(), "part of the suite"),
        _field("metric", pa.string(), "name of the figure in its part"),
        _field("unit", pa.string(), "unit of `base` and `candidate`"),
        _field("better", pa.string(), "lower, higher or neither"),
        _field("base", pa.float64(), "median of the baseline's samples"),
        _field("candidate", pa.float64(), "median of the candidate's samples"),
        _field("worse", pa.float64(), "relative change in the bad direction, over pairs"),
        _field("p", pa.float64(), "one-sided p of the gate; null for exact figures"),
        _field("pairs", pa.int32(), "pairs of samples"),
        _field("outcome", pa.string(), "ok, regression, changed or not judged"),
        _field("base_commit", pa.string(), "commit of the baseline"),
        _field("candidate_commit", pa.string(), "commit of the candidate"),
        _field("host", pa.string(), "machine it ran on"),
    ],
    metadata={"prfaas.history_version": str(HISTORY_VERSION)},
)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one night; see SCHEMA."""

    night: str
    part: str
    metric: str
    unit: str
    better: str
    base: float | None
    candidate: float | None
    worse: float | None
    p: float | None
    pairs: int
    outcome: str
    base_commit: str
    candidate_commit: str
    host: str


_NAMES = tuple(each.name for each in fields(Row))


def append(root: Path, rows: Sequence[Row]) -> list[Path]:
    """Add a night. Writing the same night of a part again replaces it. Raises OSError."""
    written = []
    for part, night in dict.fromkeys((row.part, row.night) for row in rows):
        chosen = [row for row in rows if (row.part, row.night) == (part, night)]
        table = pa.Table.from_pylist(
            [{name: getattr(row, name) for name in _NAMES} for row in chosen], schema=SCHEMA
        ).drop_columns(["part", "night"])
        path = root / f"part={part}" / f"night={night}" / "data.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".data.{os.getpid()}")
        pq.write_table(table, hidden, compression="zstd")
        hidden.replace(path)
        written.append(path)
    return written


def read(root: Path) -> list[Row]:
    """All rows, by night, part and order in the night. A missing root is an empty history."""
    tables = []
    for path in sorted(root.glob("part=*/night=*/data.parquet")):
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as error:
            raise HistoryError(f"{path}: not readable: {error}") from error
        for name, value in (
            ("part", path.parent.parent.name.removeprefix("part=")),
            ("night", path.parent.name.removeprefix("night=")),
        ):
            table = table.append_column(name, pa.array([value] * table.num_rows, pa.string()))
        for field in SCHEMA:
            if field.name not in table.schema.names:
                table = table.append_column(field.name, pa.nulls(table.num_rows, field.type))
        tables.append(table.select(SCHEMA.names).cast(SCHEMA))
    if not tables:
        return []
    whole = pa.concat_tables(tables)
    order = pc.sort_indices(whole["night"])
    rows = whole.take(order).to_pylist()
    return [Row(**{name: row[name] for name in _NAMES}) for row in rows]


def series(rows: Sequence[Row], part: str, metric: str) -> list[Row]:
    """The nights of one figure, oldest first."""
    chosen = [row for row in rows if (row.part, row.metric) == (part, metric)]
    return sorted(chosen, key=lambda row: row.night)
