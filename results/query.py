"""SQL over one or more runs: DuckDB on the tables, with metrics as columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from results import reader
from results.derived import with_metrics
from results.schemas import ASKED, REAL, SCHEMAS

if TYPE_CHECKING:
    import duckdb


class QueryError(ValueError):
    """DuckDB is not installed, or did not accept the query."""

    exit_code = 2


def table_of_runs(runs: Sequence[Path], name: str) -> pa.Table:
    """Table `name` of `runs`, with a first column `run` (the directory's name). A run without it
    has no rows of it, where not every run has such a table; at least one has it."""
    parts = []
    for run in runs:
        if name in REAL | ASKED and name not in _tables(run):
            continue
        table = reader.read(run, name)
        if name == "requests":
            table = with_metrics(table)
        label = pa.array([run.name] * table.num_rows, pa.string()).dictionary_encode()
        parts.append(table.add_column(0, "run", label))
    return pa.concat_tables(parts, promote_options="default").unify_dictionaries()


def _tables(run: Path) -> list[str]:
    """Names of the tables that a run has. Raises QueryError when it has none."""
    found = [name for name in SCHEMAS if (run / f"{name}.parquet").exists()]
    if not found:
        missing = "not a directory" if run.exists() else "no such directory"
        what = "no results files in it" if run.is_dir() else missing
        raise QueryError(f"{run}: {what}; name run directories, as `prfaas runs list` shows them")
    return [*found, "gaps"] if "tokens" in found else found


def connect(runs: Sequence[Path], sql: str) -> duckdb.DuckDBPyConnection:
    """A connection in which the tables that `sql` names (all, if it names none: `show tables`) are
    those of `runs`.

    Raises QueryError, ReadError.
    """
    try:
        import duckdb
    except ImportError as error:
        raise QueryError(
            "queries need DuckDB: pip install duckdb; or read the Parquet files with pyarrow, "
            "pandas or Polars (`prfaas results describe` shows their columns)"
        ) from error
    if not sql.strip():
        raise QueryError('query: empty; e.g. "select count(*) from requests"')
    present = {name for run in runs for name in _tables(run)}
    connection = duckdb.connect()
    # Only what is asked for is read: token times can be a hundred times the rest.
    named = present.intersection(re.findall(r"\w+", sql.lower()))
    for name in named or present:
        connection.register(name, table_of_runs(runs, name))
    return connection


def query(runs: Sequence[Path], sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of `sql`. Raises QueryError, ReadError."""
    with connect(runs, sql) as connection:
        import duckdb

        try:
            relation = connection.sql(sql)
            if relation is None:
                return [], []
            return list(relation.columns), relation.fetchall()
        except duckdb.Error as error:
            raise QueryError(f"query: {_in_one_line(error)}") from error


def _in_one_line(error: duckdb.Error) -> str:
    """What is wrong and what would do, without the statement that is printed below it."""
    lines = str(error).split("\n\nLINE")[0].splitlines()
    return " ".join(line.strip() for line in lines if line.strip() and not line.startswith("LINE"))
