"""One set of tables from those of several client processes, row group by row group."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from harness.load.tables import TABLES, schema
from results.growing import GrowingParquet, sound_length
from results.recorder import COMPLETE_KEY


def merge(parts: Sequence[Path], into: Path, meta: dict[str, str], complete: bool) -> None:
    """Write requests, tokens and client .parquet of `parts` to `into`, then remove `parts`.

    Rows keep the order in which each client wrote them, one client after the other. Of a file whose
    writer was killed they are those before its torn end, or none. Memory holds one row group at a
    time.
    """
    for table in TABLES:
        out = GrowingParquet(into / f"{table}.parquet", schema(table, meta))
        for part in parts:
            path = part / f"{table}.parquet"
            length = sound_length(path) if path.exists() else 0
            if not length:
                continue
            os.truncate(path, length)
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    out.append(file.read_row_group(group).cast(out.schema))
        out.close({COMPLETE_KEY: "true" if complete else "false"})
    for part in parts:
        shutil.rmtree(part)
