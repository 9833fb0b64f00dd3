"""Our own trace form: one Parquet row a request, written and read in row groups.

Units are in each field's metadata, the version and notes on how the trace was made in the file's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from workloads.request import Request
from workloads.traces.rows import (
    Place,
    TraceError,
    block_ids_field,
    number_field,
    tokens_field,
    unwritable,
)

VERSION = 1
ROWS_PER_GROUP = 8192
_VERSION_KEY, _NOTES_KEY = b"prfaas.trace.version", b"prfaas.trace.notes"


def _field(name: str, kind: pa.DataType, unit: str) -> pa.Field:
    return pa.field(name, kind, nullable=False, metadata={"unit": unit})


_NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        _field("arrival_s", pa.float64(), "s from the start of the trace"),
        _field("input_tokens", pa.int64(), "tokens"),
        _field("output_tokens", pa.int64(), "tokens"),
        _field("block_tokens", pa.int32(), "tokens; 0: no block ids"),
        _field("session", _NAME, "name"),
        _field("tenant", _NAME, "name"),
        _field("slo_class", _NAME, "name"),
        _field("block_ids", pa.list_(pa.int64()), "chain ids of the prompt's blocks"),
    ]
)


def write(path: str | Path, requests: Iterable[Request], notes: Iterable[str] = ()) -> int:
    """Write `requests`, return their number. The file appears under its name only when whole."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    schema = SCHEMA.with_metadata({_VERSION_KEY: str(VERSION), _NOTES_KEY: json.dumps(list(notes))})
    count = 0
    source = iter(requests)
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            while group := list(islice(source, ROWS_PER_GROUP)):
                columns = {
                    name: [getattr(request, name) for request in group] for name in SCHEMA.names
                }
                writer.write_table(pa.table(columns, schema=schema))
                count += len(group)
        partial.replace(path)
    except OSError as error:
        raise unwritable(path, error) from None
    except (pa.ArrowInvalid, OverflowError) as error:
        raise TraceError(f"{path}: a request does not fit the Parquet form: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def _open(path: str) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{path}: cannot be read as Parquet: {error}") from None
    metadata: dict[bytes, bytes] = file.schema_arrow.metadata or {}
    version = metadata.get(_VERSION_KEY, b"none").decode()
    if version != str(VERSION):
        file.close()
        raise TraceError(
            f"{path}: found trace version {version}, this program reads version {VERSION}; "
            "write it with `prfaas trace convert`"
        )
    return file


def notes(path: str) -> list[str]:
    """What the writer said about how the trace was made."""
    with _open(path) as file:
        found: list[str] = json.loads(file.schema_arrow.metadata[_NOTES_KEY])
        return found


def read(path: str) -> Iterator[tuple[Place, Request]]:
    """Rows in file order. A Place's line is the row's number, from 1."""
    number = 0
    with _open(path) as file:
        missing = [name for name in SCHEMA.names if name not in file.schema_arrow.names]
        if missing:
            raise TraceError(f"{path}: has no column {', '.join(missing)}")
        try:
            for batch in file.iter_batches(ROWS_PER_GROUP, columns=SCHEMA.names):
                for row in batch.to_pylist():
                    number += 1
                    place = Place(path, number)
                    yield place, _request(place, number - 1, row)
        except (pa.ArrowInvalid, OSError) as error:
            raise TraceError(f"{path}: is damaged after row {number}: {error}") from None


def _request(place: Place, number: int, row: dict[str, Any]) -> Request:
    input_tokens = tokens_field(place, row, "input_tokens")
    ids: tuple[int, ...] = ()
    if row["block_ids"]:
        size = tokens_field(place, row, "block_tokens")
        ids = block_ids_field(place, row, "block_ids", input_tokens, size, partial_optional=True)
    return Request(
        number,
        number_field(place, row, "arrival_s"),
        input_tokens,
        tokens_field(place, row, "output_tokens"),
        ids,
        row["block_tokens"] if ids else 0,
        row["session"] or "",
        row["tenant"] or "",
        row["slo_class"] or "",
    )
