"""One set of tables from those of several client processes, row group by row group."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from harness.load.tables import TABLES, schema
from results.growing import GrowingParquet
from results.recorder import COMPLETE_KEY


def merge(parts: Sequence[Path], into: Path, meta: dict[str, str], complete: bool) -> None:
    """Write requests, tokens and client .parquet of `parts` to `into`, then remove `parts`.

    Rows keep the order in which each client wrote them, one client after the other. Memory holds
    one row group at a time.
    """
    for table in TABLES:
        out = GrowingParquet(into / f"{table}.parquet", schema(table, meta))
        for part in parts:
            with pq.ParquetFile(part / f"{table}.parquet") as file:
                for group in range(file.num_row_groups):
                    out.append(file.read_row_group(group).cast(out.schema))
        out.close({COMPLETE_KEY: "true" if complete else "false"})
    for part in parts:
        shutil.rmtree(part)
