"""Columns of Python values to Arrow arrays, in bulk: the recorder's share of a simulation's time.

`None` becomes null. Seconds become whole microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from results.schemas import ALTERNATIVES, GAPS, RUNS

Column = Sequence[Any]
#: (configuration, phase, first row) of rows that follow one another.
Span = tuple[str, str, int]
_INT32_LIMIT = 2**31 - 1
_TIMINGS = pa.array(["runs", "gaps", "chunks", ""])


def plain(values: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """Numbers where they lie, one after the other; null where they are missing."""
    valid = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])


def to_us(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Nearest microsecond. No NaN."""
    return np.rint(seconds * 1e6).astype(np.int64)


def times(values: Column) -> pa.Array:
    """Seconds, or None, to int64 microseconds."""
    return times_of(np.array(values, dtype=np.float64))


def times_of(seconds: NDArray[np.float64]) -> pa.Array:
    """Seconds to int64 microseconds; NaN is null."""
    missing = np.isnan(seconds)
    if missing.any():
        return plain(to_us(np.where(missing, 0.0, seconds)), missing)
    return plain(to_us(seconds))


def integers(values: Column, kind: pa.DataType) -> pa.Array:
    try:
        return plain(np.array(values, dtype=np.int64)).cast(kind)
    except TypeError:
        return pa.array([None if each is None else int(each) for each in values], kind)


def numbers(values: Column) -> pa.Array:
    floats = np.array(values, dtype=np.float64)
    missing = np.isnan(floats)
    return plain(floats, missing if missing.any() else None)


def booleans(values: Column) -> pa.Array:
    return pa.array(values, pa.bool_())


def names(values: Column) -> pa.Array:
    """Strings as a dictionary in order of first appearance."""
    if values.count(values[0]) == len(values):
        codes = {values[0]: 0}
        indices = np.zeros(len(values), np.int32)
    else:
        codes = {name: code for code, name in enumerate(dict.fromkeys(values))}
        indices = np.fromiter(map(codes.__getitem__, values), np.int32, len(values))
    return pa.DictionaryArray.from_arrays(
        plain(indices), pa.array(list(map(str, codes)), pa.string())
    )


def converter(field: pa.Field) -> Callable[[Column], pa.Array]:
    """How the column of a schema's field is made from values of rows."""
    kind = field.type
    if field.name.endswith("_us"):
        return times
    if pa.types.is_dictionary(kind):
        return names
    if pa.types.is_integer(kind):
        return lambda values: integers(values, kind)
    if pa.types.is_floating(kind):
        return numbers
    if pa.types.is_boolean(kind):
        return booleans
    if pa.types.is_string(kind):
        return lambda values: pa.array(values, kind)
    return alternatives


def repeated(spans: Iterable[tuple[str, int]]) -> pa.Array:
    """A dictionary column from (name, how many rows) spans."""
    spans = list(spans)
    codes = {name: code for code, name in enumerate(dict.fromkeys(name for name, _ in spans))}
    indices = np.repeat(
        np.array([codes[name] for name, _ in spans], np.int32),
        np.array([count for _, count in spans], np.int64),
    )
    return pa.DictionaryArray.from_arrays(plain(indices), pa.array(list(codes), pa.string()))


def where(spans: Sequence[Span], rows: int) -> list[pa.Array]:
    """The configuration and phase columns of `rows` rows."""
    ends = [first for _, _, first in spans[1:]] + [rows]
    counts = [end - first for (_, _, first), end in zip(spans, ends, strict=False)]
    return [
        repeated(zip([configuration for configuration, _, _ in spans], counts, strict=True)),
        repeated(zip([phase for _, phase, _ in spans], counts, strict=True)),
    ]


def alternatives(values: Column) -> pa.Array:
    """Tuples of (cluster, seconds) to a list of structs."""
    lengths = np.fromiter(map(len, values), np.int32, len(values))
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = list(chain.from_iterable(values))
    pairs = pa.StructArray.from_arrays(
        [
            pa.array([cluster for cluster, _ in flat], pa.string()),
            times([seconds for _, seconds in flat]),
        ],
        fields=list(ALTERNATIVES.value_type),
    )
    return pa.ListArray.from_arrays(plain(offsets), pairs).cast(ALTERNATIVES)


def token_columns(
    per_record: NDArray[np.int64], flat: NDArray[np.float64]
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """The `timing`, `runs` and `gaps_us` columns of tokens.parquet from how many runs each record
    has, and the (time_s, step_s, count) of all runs as rows.

    A record is kept as runs when these are at most half as many as its tokens, else as gaps. Both
    are exact to the microsecond at the ends of every run, whatever its length.
    """
    records, total = len(per_record), len(flat)
    count = flat[:, 2].astype(np.int64)
    start_us = to_us(flat[:, 0])
    end_us = to_us(flat[:, 0] + flat[:, 1] * (count - 1))
    span_us = end_us - start_us
    if total and (per_record == 1).all() and count.min() > 1 and span_us.all():
        return _one_run_each(count, span_us)

    owner = np.repeat(np.arange(records), per_record)
    is_first = np.ones(total, np.bool_)
    is_first[1:] = owner[1:] != owner[:-1]
    gap_us = np.zeros(total, np.int64)
    gap_us[1:] = start_us[1:] - end_us[:-1]
    gap_us[is_first] = 0

    tokens = np.bincount(owner, weights=count, minlength=records).astype(np.int64)
    longest = np.zeros(records, np.int64)
    np.maximum.at(longest, owner, np.maximum(gap_us, span_us))
    as_gaps = (2 * per_record > tokens) & (longest <= _INT32_LIMIT) & (per_record > 0)
    chunked = np.bincount(owner, weights=(span_us == 0) & (count > 1), minlength=records) > 0

    timing = np.where(per_record == 0, 3, np.where(chunked, 2, np.where(as_gaps, 1, 0)))
    as_gaps_run = as_gaps[owner]
    return (
        pa.DictionaryArray.from_arrays(plain(timing.astype(np.int32)), _TIMINGS),
        _runs(per_record, as_gaps, gap_us, count, span_us, as_gaps_run),
        _gaps(tokens, as_gaps, is_first, gap_us, count, span_us, as_gaps_run),
    )


def _one_run_each(
    count: NDArray[np.int64], span_us: NDArray[np.int64]
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """What simulated requests mostly are, in a third of the time: all are kept as runs."""
    records = len(count)
    structs = pa.StructArray.from_arrays(
        [plain(np.zeros(records, np.int64)), plain(count.astype(np.int32)), plain(span_us)],
        fields=list(RUNS.value_type),
    )
    offsets = plain(np.arange(records + 1, dtype=np.int32))
    return (
        pa.DictionaryArray.from_arrays(plain(np.zeros(records, np.int32)), _TIMINGS),
        pa.ListArray.from_arrays(offsets, structs, type=RUNS),
        pa.nulls(records, GAPS),
    )


def _offsets(lengths: NDArray[np.int64], present: NDArray[np.bool_]) -> pa.Array:
    """List offsets where the lists that are not present are null."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.where(present, lengths, 0), out=offsets[1:])
    missing = np.append(~present, False)
    return plain(offsets, missing if missing.any() else None)


def _runs(
    per_record: NDArray[np.int64],
    as_gaps: NDArray[np.bool_],
    gap_us: NDArray[np.int64],
    count: NDArray[np.int64],
    span_us: NDArray[np.int64],
    as_gaps_run: NDArray[np.bool_],
) -> pa.Array:
    kept = ~as_gaps_run
    structs = pa.StructArray.from_arrays(
        [
            plain(gap_us[kept]),
            plain(count[kept].astype(np.int32)),
            plain(span_us[kept]),
        ],
        fields=list(RUNS.value_type),
    )
    return pa.ListArray.from_arrays(_offsets(per_record, ~as_gaps), structs, type=RUNS)


def _gaps(
    tokens: NDArray[np.int64],
    as_gaps: NDArray[np.bool_],
    is_first: NDArray[np.bool_],
    gap_us: NDArray[np.int64],
    count: NDArray[np.int64],
    span_us: NDArray[np.int64],
    as_gaps_run: NDArray[np.bool_],
) -> pa.Array:
    """Gap before each token but a record's first, expanded from runs."""
    gap_us, count = gap_us[as_gaps_run], count[as_gaps_run]
    span_us, is_first = span_us[as_gaps_run], is_first[as_gaps_run]
    starts = np.cumsum(count) - count
    total = int(count.sum())
    step = np.arange(total) - np.repeat(starts, count)
    steps = np.repeat(np.maximum(count - 1, 1), count)
    spans = np.repeat(span_us, count)
    # Token k of a run stands at round(k span / (n - 1)), so rounding never adds up.
    at = (2 * step * spans + steps) // (2 * steps)
    gaps = np.empty(total, np.int64)
    gaps[1:] = at[1:] - at[:-1]
    gaps[starts] = gap_us
    keep = np.ones(total, np.bool_)
    keep[starts[is_first]] = False
    lengths = np.maximum(tokens - 1, 0)
    return pa.ListArray.from_arrays(
        _offsets(lengths, as_gaps), plain(gaps[keep].astype(np.int32)), type=GAPS
    )
