"""What all trace formats share: places for errors, decompression, checked fields."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from workloads.errors import InputError

#: What reading text that is not UTF-8 or not whole raises.
DAMAGED = (UnicodeDecodeError, EOFError, OSError, zlib.error, zstandard.ZstdError)


#: No prompt or answer is longer: tables hold them as int32.
MOST_TOKENS = (1 << 31) - 1

_GZIP_MAGIC, _ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
#: Of a header, in an error.
_SHOWN_CHARACTERS = 200

_READ_BYTES = 1 << 18
_COMPRESSED_BYTES = 1 << 16


class TraceError(InputError):
    """A trace that cannot be read: file:line, the field, what was found, what would do."""


def unwritable(path: Path, error: OSError) -> Exception:
    """A full disk stays what it is: the input was not at fault."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OSError(error.errno, os.strerror(error.errno), str(path))
    return TraceError(f"{path}: cannot be written: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a trace (1 is the first), for errors."""

    path: str
    line: int

    def error(self, what: str) -> TraceError:
        return TraceError(f"{self.path}:{self.line}: {what}")


class _ZstdReader(io.RawIOBase):
    """The content of all frames of a zstd file; EOFError when the last frame is cut short (which
    zstandard's own stream reader takes for the end).
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False
        self._pending = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            data = self._raw.read(_COMPRESSED_BYTES)
            if not data:
                if self._inside:
                    raise EOFError("the compressed file ends before its end mark")
                return 0
            parts = []
            while data:
                parts.append(self._frame.decompress(data))
                self._inside = not self._frame.eof
                data = self._frame.unused_data
                if not self._inside:
                    self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._pending = b"".join(parts)
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size


def open_bytes(path: str) -> BinaryIO:
    """The decompressed bytes of a plain, gzip or zstd file, whatever its name, as a stream."""
    try:
        raw = Path(path).open("rb")  # noqa: SIM115 (the caller closes it)
        head = raw.peek(len(_ZSTD_MAGIC))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    if head.startswith(_GZIP_MAGIC):
        raw.close()
        return cast(BinaryIO, gzip.open(path, "rb"))
    if head.startswith(_ZSTD_MAGIC):
        return cast(BinaryIO, io.BufferedReader(_ZstdReader(raw), _READ_BYTES))
    return raw


def open_text(path: str) -> io.TextIOWrapper:
    """The decompressed text of a UTF-8 file, line ends as they are."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="\n")


def lines(path: str) -> Iterator[tuple[Place, str]]:
    """Each line that is not blank, without its end (LF or CRLF)."""
    number = 0
    with open_bytes(path) as stream:
        try:
            for number, data in enumerate(stream, 1):
                line = data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if line:
                    yield Place(path, number), line
        except UnicodeDecodeError as error:
            raise Place(path, number).error(f"is not UTF-8 text: {error.reason}") from None
        except DAMAGED as error:
            raise Place(path, number + 1).error(f"cannot be read further: {error}") from None


def json_rows(path: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The objects of a JSONL file."""
    for place, line in lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise place.error(f"is not JSON ({error}); needs one object a line") from None
        if not isinstance(row, dict):
            raise place.error(f"found a JSON {type(row).__name__}, needs one object a line")
        yield place, row


def csv_rows(path: str, needed: tuple[str, ...]) -> Iterator[tuple[Place, dict[str, str]]]:
    """The rows of a CSV file as column name -> text. `needed` columns must be in its header."""
    header: list[str] | None = None
    for place, line in lines(path):
        try:
            cells = [cell.strip() for cell in next(csv.reader([line]))]
        except csv.Error as error:
            raise place.error(f"is not CSV: {error}") from None
        if header is None:
            missing = [name for name in needed if name not in cells]
            if missing:
                found = _printable(", ".join(cells)[:_SHOWN_CHARACTERS])
                raise place.error(f"the header has no column {', '.join(missing)}; found {found}")
            header = cells
        elif len(cells) != len(header):
            raise place.error(f"found {len(cells)} fields, needs {len(header)} as in the header")
        else:
            yield place, dict(zip(header, cells, strict=True))


def tokens_field(place: Place, row: dict[str, Any], name: str) -> int:
    """A count of tokens, 1 to MOST_TOKENS."""
    value = row.get(name)
    if isinstance(value, str):
        with suppress(ValueError):
            value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
        needs = f"a whole number of at least 1, at most {MOST_TOKENS}"
        raise place.error(f"{name}: found {_show(row, name)}, needs {needs}")
    return value


def number_field(place: Place, row: dict[str, Any], name: str) -> float:
    """A finite number of at least 0."""
    value = row.get(name)
    if isinstance(value, str):
        with suppress(ValueError):
            value = float(value)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value < float("inf"):  # type: ignore[operator]
        raise place.error(f"{name}: found {_show(row, name)}, needs a number of at least 0")
    return value  # type: ignore[return-value]


def block_ids_field(
    place: Place,
    row: dict[str, Any],
    name: str,
    input_tokens: int,
    block_tokens: int,
    partial_optional: bool = False,
) -> tuple[int, ...]:
    """One whole number a block of the prompt; their count must fit the prompt's length. With
    `partial_optional` a last block that is not full may have no id.
    """
    value = row.get(name)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise place.error(f"{name}: found {_show(row, name)}, needs a list of whole numbers")
    needed = -(-input_tokens // block_tokens)
    least = input_tokens // block_tokens if partial_optional else needed
    if not least <= len(value) <= needed:
        raise place.error(
            f"{name}: found {len(value)} ids of {block_tokens}-token blocks for {input_tokens} "
            f"input tokens, needs {needed if least == needed else f'{least} or {needed}'}"
        )
    return tuple(value)


def _printable(text: str) -> str:
    """`text` with what would act on a terminal escaped."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _show(row: dict[str, Any], name: str) -> str:
    return repr(row[name])[:60] if name in row else "nothing"
