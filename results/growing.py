"""A Parquet file that is readable after every row group, and whatever happens after that.

Parquet keeps its index (the footer) at the end, so a file whose writer died has none. Here each row
group is followed by the footer of all row groups so far: the file only ever grows, every
prefix that ends with a footer is a whole Parquet file, and readers skip the older footers, which no
offset names. A write that was cut off leaves a torn tail, which `sound_length` finds.
"""

from __future__ import annotations

import io
import mmap
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MAGIC = b"PAR1"
_TAIL = 8  # footer length (4 bytes, little endian) and magic


class _Appending:
    """What Arrow needs of a file: its `tell` is the place in the real file, so the offsets that a
    row group's own writer notes are those of the whole. `close` leaves the file open.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.closed = False

    def write(self, data: bytes) -> int:
        # A raw write may be short; Arrow takes the count as all.
        view = memoryview(data)
        done = 0
        while done < len(view):
            done += self._file.write(view[done:]) or 0
        return done

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def _delta_encoded(schema: pa.Schema) -> dict[str, str]:
    """Leaf column path -> encoding: integers hold deltas; names have dictionaries; floats split."""
    encodings: dict[str, str] = {}

    def walk(path: str, kind: pa.DataType) -> None:
        if pa.types.is_list(kind):
            walk(f"{path}.list.element", kind.value_type)
        elif pa.types.is_struct(kind):
            for each in kind:
                walk(f"{path}.{each.name}", each.type)
        elif pa.types.is_integer(kind):
            encodings[path] = "DELTA_BINARY_PACKED"
        elif pa.types.is_floating(kind):
            encodings[path] = "BYTE_STREAM_SPLIT"

    for each in schema:
        walk(each.name, each.type)
    return encodings


def _dictionaries(schema: pa.Schema) -> list[str]:
    return [each.name for each in schema if pa.types.is_dictionary(each.type)]


class GrowingParquet:
    """Appends row groups of `schema` to a new file at `path`. Raises OSError."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._encodings = _delta_encoded(schema)
        self._dictionaries = _dictionaries(schema)
        self._metadata: pq.FileMetaData | None = None
        self.rows = 0
        self._file = io.FileIO(path, "x")
        self._append(schema.empty_table(), schema)

    def append(self, table: pa.Table) -> None:
        """One row group, readable on return by any process on this machine."""
        if table.num_rows:
            self._append(table, self.schema)
            self.rows += table.num_rows

    def close(self, extra: dict[str, str] | None = None) -> None:
        """Write the last footer, with `extra` added to the key-value metadata. Idempotent."""
        if self._file.closed:
            return
        if extra:
            schema = self.schema.with_metadata({**(self.schema.metadata or {}), **extra})
            older, self._metadata = self._metadata, None
            self._append(schema.empty_table(), schema, older)
        os.fsync(self._file.fileno())
        self._file.close()

    def _append(
        self, table: pa.Table, schema: pa.Schema, older: pq.FileMetaData | None = None
    ) -> None:
        writer = pq.ParquetWriter(
            pa.PythonFile(_Appending(self._file), mode="w"),
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=self._dictionaries,
            column_encoding=self._encodings,
            write_statistics=[name for name in schema.names if name.endswith(("_us", "id"))],
            data_page_size=1 << 20,
            version="2.6",
        )
        if table.num_rows:
            writer.write_table(table, row_group_size=table.num_rows)
        writer.close()
        written = writer.writer.metadata
        if older is not None:
            written.append_row_groups(older)
        if self._metadata is None:
            self._metadata = written
            # The writer's own footer is that of the whole, unless older groups were added.
            if older is None:
                return
        else:
            self._metadata.append_row_groups(written)
        footer = io.BytesIO()
        self._metadata.write_metadata_file(footer)
        _Appending(self._file).write(footer.getvalue()[len(MAGIC) :])


def sound_length(path: Path) -> int:
    """Length of the longest prefix of the file that is a whole Parquet file; 0 when none is."""
    if path.stat().st_size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = len(data)
        while (at := data.rfind(MAGIC, 0, end)) >= _TAIL:
            stop = at + len(MAGIC)
            if _is_whole(data, stop):
                return stop
            end = stop - 1
    return 0


def _is_whole(data: mmap.mmap, stop: int) -> bool:
    length = int.from_bytes(data[stop - _TAIL : stop - len(MAGIC)], "little")
    start = stop - _TAIL - length
    if start < len(MAGIC):
        return False
    # Only the footer is looked at: the offsets in it point before it, and files only grow.
    footer = MAGIC + data[start:stop]
    try:
        pq.read_metadata(pa.BufferReader(footer))
    except (pa.ArrowException, OSError):
        return False
    return True
