"""A Parquet file that is readable after every row group, and whatever happens after that.

Parquet keeps its index (the footer) at the end, so a file whose writer died has none. Here each row
group is followed by the footer of all row groups so far: the file only ever grows, every
prefix that ends with a footer is a whole Parquet file, and readers skip the older footers, which no
offset names. A write that was cut off leaves a torn tail, which `sound_length` finds.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MAGIC = b"PAR1"
_TAIL = 8  # footer length (4 bytes, little endian) and magic

#: Key-value metadata of a row group's own footer, which does not know of those before it.
_PART = {b"growing": b"part"}

#: What a writer writes is gathered to this size.
_WRITE_BYTES = 1 << 16


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, pa.DataType]]:
    """Path and type of each leaf column."""

    def walk(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
        if pa.types.is_list(kind):
            yield from walk(f"{path}.list.element", kind.value_type)
        elif pa.types.is_struct(kind):
            for each in kind:
                yield from walk(f"{path}.{each.name}", each.type)
        else:
            yield path, kind

    for each in schema:
        yield from walk(each.name, each.type)


def _encodings(schema: pa.Schema) -> dict[str, str]:
    """By leaf: integers hold deltas; names have dictionaries; floats split."""
    encodings: dict[str, str] = {}
    for path, kind in _leaves(schema):
        if pa.types.is_integer(kind):
            encodings[path] = "DELTA_BINARY_PACKED"
        elif pa.types.is_floating(kind):
            encodings[path] = "BYTE_STREAM_SPLIT"
    return encodings


def _compressions(schema: pa.Schema) -> dict[str, str]:
    """By leaf: zstd, but not for the integers that a row has one of. Their deltas would become a
    fortieth smaller, and a third of the time that writing takes would go into that.
    """
    return {
        path: "none" if pa.types.is_integer(kind) and path in schema.names else "zstd"
        for path, kind in _leaves(schema)
    }


def _dictionaries(schema: pa.Schema) -> list[str]:
    return [each.name for each in schema if pa.types.is_dictionary(each.type)]


class GrowingParquet:
    """Appends row groups of `schema` to a new file at `path`. Raises OSError."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        compressions = _compressions(schema)
        self._properties = {
            "compression": compressions,
            "compression_level": {path: 1 for path, each in compressions.items() if each == "zstd"},
            "use_dictionary": _dictionaries(schema),
            "column_encoding": _encodings(schema),
            "write_statistics": [name for name in schema.names if name.endswith(("_us", "id"))],
            "version": "2.6",
        }
        self._open = True
        path.open("xb").close()
        self._metadata = self._empty(schema)
        self._append_footer()

    def append(self, table: pa.Table) -> None:
        """One row group, readable on return by any process on this machine."""
        if table.num_rows:
            self._append(table)

    def close(self, extra: dict[str, str] | None = None) -> None:
        """Write the last footer, with `extra` added to the key-value metadata. Idempotent."""
        if self._open and extra:
            last = self._empty(self.schema.with_metadata({**(self.schema.metadata or {}), **extra}))
            last.append_row_groups(self._metadata)
            self._metadata = last
            self._append_footer()
        self._open = False

    def _empty(self, schema: pa.Schema) -> pq.FileMetaData:
        """Metadata of no rows, with the key-value metadata of `schema`."""
        sink = pa.BufferOutputStream()
        self._writer(sink, schema).close()
        return pq.read_metadata(pa.BufferReader(sink.getvalue()))

    def _writer(self, sink: pa.NativeFile, schema: pa.Schema) -> pq.ParquetWriter:
        return pq.ParquetWriter(sink, schema, **self._properties)

    def _footer(self) -> bytes:
        """Of all row groups so far, with the magic that begins and the one that ends a file."""
        footer = io.BytesIO()
        self._metadata.write_metadata_file(footer)
        return footer.getvalue()

    def _append_footer(self) -> None:
        """No rows; a file that is empty begins here."""
        with _whole_or_as_before(self.path) as end, self.path.open("r+b") as file:
            file.seek(end)
            file.write(self._footer()[len(MAGIC) if end else 0 :])

    def _append(self, table: pa.Table) -> None:
        """Append `table` as a Parquet file of its own, then put the footer of the whole over its
        footer. A writer insists on starting at 0 and trusts the sink's position for its offsets: so
        it starts there, writing the magic that is there already, and is then moved to the end.

        Pages that are gathered and then written cost half of those of a mapping, which are cleared
        and faulted in one by one.
        """
        try:
            with (
                _whole_or_as_before(self.path) as end,
                _to_overwrite(self.path) as (file, descriptor),
                pa.BufferedOutputStream(file, _WRITE_BYTES) as sink,
            ):
                with self._writer(sink, self.schema.with_metadata(_PART)) as writer:
                    sink.flush()
                    os.lseek(descriptor, end, os.SEEK_SET)
                    writer.write_table(table, row_group_size=table.num_rows)
                sink.flush()
                part: pq.FileMetaData = writer.writer.metadata
                os.lseek(descriptor, -_TAIL - part.serialized_size, os.SEEK_CUR)
                self._metadata.append_row_groups(part)
                sink.write(self._footer()[len(MAGIC) :])
                sink.flush()
                os.truncate(descriptor, sink.tell())
        except BaseException:
            self._metadata = pq.read_metadata(self.path)
            raise


@contextmanager
def _to_overwrite(path: Path) -> Iterator[tuple[pa.NativeFile, int]]:
    """The file as it is, to write from its first byte on, and its descriptor. One that may only be
    appended to is what can be had without truncating it.
    """
    with pa.OSFile(str(path), "ab") as file:
        descriptor = _descriptor(file, path)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_APPEND)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield file, descriptor


def _descriptor(file: pa.OSFile, path: Path) -> int:
    """Of a file that is appended to; nothing else has it open so."""
    with suppress(AttributeError):  # before pyarrow 24, of all that are written to
        return int(file.fileno())
    for each in (int(link.name) for link in Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # the listing's own is closed
            appends = fcntl.fcntl(each, fcntl.F_GETFL) & os.O_APPEND
            if appends and os.path.samestat(os.fstat(each), path.stat()):
                return each
    raise OSError(f"{path} is not open")


@contextmanager
def _whole_or_as_before(path: Path) -> Iterator[int]:
    """The file's length, which it has again where what is done meanwhile fails. Raises OSError that
    names the file.
    """
    length = path.stat().st_size
    try:
        yield length
    except BaseException as error:
        os.truncate(path, length)
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


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
        metadata = pq.read_metadata(pa.BufferReader(footer)).metadata or {}
    except (pa.ArrowException, OSError):
        return False
    return metadata.items().isdisjoint(_PART.items())
