"""SQL over one or more runs: DuckDB on the tables, with metrics as columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from results import reader
from results.derived import with_metrics
from results.schemas import SCHEMAS

if TYPE_CHECKING:
    import duckdb


class QueryError(ValueError):
    """DuckDB is not installed, or did not accept the query."""

    exit_code = 2


def table_of_runs(runs: Sequence[Path], name: str) -> pa.Table:
    """Table `name` of all `runs`, with a first column `run` (the directory's name)."""
    parts = []
    for run in runs:
        table = reader.read(run, name)
        if name == "requests":
            table = with_metrics(table)
        label = pa.array([run.name] * table.num_rows, pa.string()).dictionary_encode()
        parts.append(table.add_column(0, "run", label))
    return pa.concat_tables(parts, promote_options="default").unify_dictionaries()


def connect(runs: Sequence[Path]) -> duckdb.DuckDBPyConnection:
    """A connection in which requests, tokens, links, instances and decisions are those of `runs`.

    Raises QueryError, ReadError.
    """
    try:
        import duckdb
    except ImportError as error:
        raise QueryError(
            "queries need DuckDB: pip install duckdb; or read the Parquet files with pyarrow, "
            "pandas or Polars (`prfaas results describe` shows their columns)"
        ) from error
    connection = duckdb.connect()
    for name in SCHEMAS:
        if any((run / f"{name}.parquet").exists() for run in runs):
            connection.register(name, table_of_runs(runs, name))
    return connection


def query(runs: Sequence[Path], sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of `sql`. Raises QueryError, ReadError."""
    with connect(runs) as connection:
        import duckdb

        try:
            relation = connection.sql(sql)
            if relation is None:
                return [], []
            return list(relation.columns), relation.fetchall()
        except duckdb.Error as error:
            raise QueryError(f"query: {str(error).splitlines()[0]}") from error
