"""Reads the tables of run directories: of this or any older schema, complete or cut off.

A column that an older file lacks is null. A file whose writer died is read to its last whole row
group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from results import gap_counts
from results.growing import sound_length
from results.metrics import TIMES, Bools, Floats, Requests
from results.recorder import COMPLETE_KEY
from results.schemas import SCHEMA_VERSION, SCHEMAS


class ReadError(ValueError):
    """A results file is missing, not Parquet, or of a newer schema."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What a table's file says of itself. `torn_bytes` follow its last whole row group."""

    path: Path
    rows: int
    row_groups: int
    size_bytes: int
    torn_bytes: int
    schema_version: int
    complete: bool
    metadata: dict[str, str]


def _source(path: Path) -> tuple[pa.NativeFile, int]:
    """The sound part of a file, memory-mapped, and how many torn bytes follow it."""
    try:
        length = sound_length(path)
        if length == 0:
            raise ReadError(f"{path}: no whole Parquet footer in it; not a results file")
        size = path.stat().st_size
        mapped = pa.memory_map(str(path))
    except OSError as error:
        raise ReadError(f"{path}: {error.strerror or error}") from error
    buffer = mapped.read_buffer(length)
    return pa.BufferReader(buffer), size - length


def describe(path: Path) -> FileInfo:
    """Raises ReadError."""
    source, torn = _source(path)
    file = pq.ParquetFile(source)
    raw = file.schema_arrow.metadata or {}
    metadata = {key.decode(): value.decode() for key, value in raw.items()}
    return FileInfo(
        path=path,
        rows=file.metadata.num_rows,
        row_groups=file.metadata.num_row_groups,
        size_bytes=path.stat().st_size,
        torn_bytes=torn,
        schema_version=_version(metadata, path),
        complete=metadata.get(COMPLETE_KEY) == "true",
        metadata={key: value for key, value in metadata.items() if key.startswith("prfaas.")},
    )


def _version(metadata: dict[str, str], path: Path) -> int:
    text = metadata.get("prfaas.schema_version", "")
    if not text.isdigit():
        raise ReadError(f"{path}: no prfaas.schema_version in its metadata; not a results file")
    return int(text)


def upgrade(table: pa.Table, name: str) -> pa.Table:
    """`table` with exactly the columns of today's schema `name`: new ones null, unknown ones kept
    at the end, so a file of a newer minor version loses nothing.
    """
    schema = SCHEMAS[name]
    columns = []
    for field in schema:
        at = table.schema.get_field_index(field.name)
        if at < 0:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            columns.append(table.column(at).cast(field.type))
    extra = [each for each in table.schema if each.name not in schema.names]
    columns += [table[each.name] for each in extra]
    fields = [*schema, *extra]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=schema.metadata))


def read(directory: Path, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Table `name` of `SCHEMAS` of a run. Gaps that were not counted when the run was written are
    counted now. Raises ReadError.
    """
    path = directory / f"{name}.parquet"
    if name == "gaps" and not path.exists():
        made = gap_counts.of_tokens(
            read(directory, "tokens", ["configuration", "phase", "gaps_us"])
        )
        return made if columns is None else made.select(list(columns))
    source, _ = _source(path)
    file = pq.ParquetFile(source)
    metadata = file.schema_arrow.metadata or {}
    version = _version({key.decode(): value.decode() for key, value in metadata.items()}, path)
    if version > SCHEMA_VERSION and columns is None:
        raise ReadError(
            f"{path}: schema version {version} is newer than the {SCHEMA_VERSION} this program "
            "reads; update it"
        )
    present = None
    if columns is not None:
        present = [each for each in columns if each in file.schema_arrow.names]
    table = upgrade(file.read(columns=present), name)
    return table if columns is None else table.select(list(columns))


def where(table: pa.Table, configuration: str | None, phase: str | None) -> pa.Table:
    """The rows of one configuration and phase; None takes all."""
    for column, value in (("configuration", configuration), ("phase", phase)):
        if value is not None:
            table = table.filter(pc.equal(table[column].cast(pa.string()), value))
    return table


def parts(table: pa.Table) -> list[tuple[str, str]]:
    """The (configuration, phase) pairs of a table, in order of first appearance."""
    pairs = zip(
        table["configuration"].cast(pa.string()).to_pylist(),
        table["phase"].cast(pa.string()).to_pylist(),
        strict=True,
    )
    return list(dict.fromkeys(pairs))


def _floats(table: pa.Table, name: str) -> Floats:
    column = pc.cast(table[name], pa.float64()).combine_chunks()
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _flags(column: pa.ChunkedArray) -> Bools:
    return np.asarray(pc.fill_null(column, False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def as_requests(table: pa.Table, remote: Collection[str] = ()) -> Requests:
    """The columns that metrics need, from rows of requests.parquet."""
    status = table["status"].cast(pa.string())
    failure = table["failure"].cast(pa.string())
    cluster = table["prefill_cluster"].cast(pa.string())
    times = {name: _floats(table, name[:-2] + "_us") / 1e6 for name in TIMES}
    return Requests(
        **times,
        tokens_asked=_floats(table, "output_tokens"),
        tokens_received=_floats(table, "tokens_received"),
        attempts=_floats(table, "attempts"),
        succeeded=_flags(pc.equal(status, "succeeded")),
        unsent=_flags(pc.equal(status, "unsent")),
        truncated=_flags(pc.starts_with(failure, "truncated")),
        offloaded=_flags(pc.is_in(cluster, pa.array(sorted(remote), pa.string()))),
        verified=_flags(table["verified"]),
        mismatched=_flags(pc.invert(table["verified"])),
    )
