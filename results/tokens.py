"""Token times out of tokens.parquet: inter-token latencies as weighted values, and exact times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from results.metrics import Floats, sample_floor


@dataclass(frozen=True, slots=True)
class Gaps:
    """`weights[i]` gaps of `values_s[i]` between tokens of one request. `chunked` says that some
    servers sent several tokens at one instant: then these are chunk gaps, not ITL.
    """

    values_s: Floats
    weights: NDArray[np.int64]
    chunked: bool

    @property
    def count(self) -> int:
        return int(self.weights.sum())

    def mean(self) -> float | None:
        return float(np.average(self.values_s, weights=self.weights)) if self.count else None

    def percentile(self, q: float) -> float | None:
        """Nearest-rank `q` quantile (0..1) over all gaps; None below the sample floor."""
        if self.count < sample_floor(q):
            return None
        order = np.argsort(self.values_s, kind="stable")
        below = np.cumsum(self.weights[order])
        rank = max(1, int(np.ceil(q * below[-1] - 1e-9)))
        return float(self.values_s[order][np.searchsorted(below, rank)])


def _numpy(array: pa.Array) -> NDArray:
    return np.asarray(array.to_numpy(zero_copy_only=False))


def gaps(table: pa.Table) -> Gaps:
    """All gaps of the requests in `table`; evenly spaced runs stay one value with their weight.

    A chunk of several tokens at one instant counts as one arrival, so its inner gaps are none.
    """
    values: list[NDArray] = []
    weights: list[NDArray] = []
    chunked = bool(pc.any(pc.equal(table["timing"].cast(pa.string()), "chunks")).as_py())
    for runs in table["runs"].chunks:
        structs = runs.flatten()
        gap_us, n, span_us = (_numpy(each).astype(np.int64) for each in structs.flatten())
        lengths = _numpy(pc.fill_null(pc.list_value_length(runs), 0))
        starts = (np.cumsum(lengths) - lengths)[lengths > 0]
        between = np.ones(len(gap_us), np.bool_)
        between[starts] = False
        values.append(gap_us[between] / 1e6)
        weights.append(np.ones(int(between.sum()), np.int64))
        several = (n > 1) & (span_us > 0)
        values.append(span_us[several] / (n[several] - 1) / 1e6)
        weights.append(n[several] - 1)
    for lists in table["gaps_us"].chunks:
        distinct, counts = np.unique(_numpy(lists.flatten()), return_counts=True)
        if chunked:
            distinct, counts = distinct[distinct > 0], counts[distinct > 0]
        values.append(distinct / 1e6)
        weights.append(counts)
    if not values:
        return Gaps(np.empty(0), np.empty(0, np.int64), chunked)
    return Gaps(np.concatenate(values), np.concatenate(weights).astype(np.int64), chunked)


def times_us(row: dict[str, object]) -> list[int]:
    """Time of each token of one row (as from `Table.to_pylist`), in microseconds of the run."""
    now = row["first_us"]
    if now is None:
        return []
    assert isinstance(now, int)
    if row["gaps_us"] is not None:
        out = [now]
        for gap in row["gaps_us"]:  # type: ignore[attr-defined]
            out.append(out[-1] + gap)
        return out
    out = []
    for run in row["runs"] or ():  # type: ignore[attr-defined]
        now += run["gap_us"]
        steps = max(run["n"] - 1, 1)
        out += [now + (2 * k * run["span_us"] + steps) // (2 * steps) for k in range(run["n"])]
        now += run["span_us"]
    return out
