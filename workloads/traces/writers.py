"""Saves requests as a trace: our Parquet form, or Mooncake JSONL for other tools."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from workloads.errors import InputError
from workloads.request import Request
from workloads.traces import parquet_form
from workloads.traces.mooncake import BLOCK_TOKENS
from workloads.traces.rows import unwritable

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")


def save(path: str | Path, requests: Iterable[Request], notes: Iterable[str] = ()) -> int:
    """Write `requests` (in arrival order) by the suffix of `path`; returns their number. The file
    appears under its name only when whole. Mooncake JSONL drops sessions, tenants, classes, notes.
    """
    path = Path(path)
    if path.name.endswith(".parquet"):
        return parquet_form.write(path, requests, notes)
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"{path}: needs a name that ends in {', '.join(SUFFIXES)}")
    partial = path.with_name(path.name + ".partial")
    count = 0
    try:
        with _create(partial, path.name) as stream:
            for request in requests:
                stream.write(json.dumps(_mooncake_row(request)).encode() + b"\n")
                count += 1
        partial.replace(path)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        partial.unlink(missing_ok=True)
    return count


def _create(partial: Path, name: str) -> BinaryIO:
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(partial, "wb"))
    if name.endswith(".zst"):
        return cast(BinaryIO, zstandard.open(partial, "wb"))
    return partial.open("wb")


def _mooncake_row(request: Request) -> dict[str, object]:
    row: dict[str, object] = {
        "timestamp": round(request.arrival_s * 1000, 4),
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
    }
    if request.block_ids:
        if request.block_tokens != BLOCK_TOKENS:
            raise InputError(
                f"request {request.id}: has blocks of {request.block_tokens} tokens, Mooncake "
                f"JSONL holds blocks of {BLOCK_TOKENS}; write .parquet instead"
            )
        row["hash_ids"] = list(request.block_ids)
    return row
