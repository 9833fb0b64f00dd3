"""Measured gaps between tokens, counted: a percentile over millions of tokens is one small sum."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from results.schemas import GAP_COUNTS

#: Gaps are counted by a table of all values between least and greatest while that is at most this
#: many times as long as there are gaps; wider ones are sorted.
_SPARSE = 4
_SMALL = 1 << 16


def _counted(gaps_us: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct values, ascending, and how often each occurs."""
    low, high = int(gaps_us.min()), int(gaps_us.max())
    if high - low > max(_SMALL, _SPARSE * len(gaps_us)):
        values, counts = np.unique(gaps_us, return_counts=True)
        return values.astype(np.int64), counts.astype(np.int64)
    every = np.bincount(gaps_us - low)
    present = np.flatnonzero(every)
    return present + low, every[present].astype(np.int64)


def columns(configuration: pa.Array, phase: pa.Array, gaps_us: pa.Array) -> list[pa.Array]:
    """The columns of gaps.parquet for rows of tokens.parquet, whose names are dictionary arrays.

    Rows of one configuration and phase that follow one another are counted together. [] when none
    has measured gaps.
    """
    if gaps_us.null_count == len(gaps_us):
        return []
    codes = np.column_stack([np.asarray(each.indices) for each in (configuration, phase)])
    begins = np.flatnonzero(np.append(True, (codes[1:] != codes[:-1]).any(axis=1)))
    ends = np.append(begins[1:], len(gaps_us))
    found, at = [], []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        values = np.asarray(gaps_us.slice(begin, end - begin).flatten())
        if len(values):
            found.append(_counted(values))
            at.append(np.full(len(found[-1][0]), begin))
    if not found:
        return []
    rows = pa.array(np.concatenate(at))
    return [
        configuration.take(rows),
        phase.take(rows),
        pa.array(np.concatenate([values for values, _ in found])),
        pa.array(np.concatenate([counts for _, counts in found])),
    ]


def of_tokens(tokens: pa.Table) -> pa.Table:
    """The rows of gaps.parquet from those of tokens.parquet, for runs that were written without."""
    parts = [GAP_COUNTS.empty_table()]
    whole = tokens.select(["configuration", "phase", "gaps_us"]).unify_dictionaries()
    for batch in whole.to_batches():
        made = columns(*batch.columns)
        if made:
            parts.append(pa.Table.from_arrays(made, schema=GAP_COUNTS))
    return pa.concat_tables(parts).unify_dictionaries()
