"""Latency histograms for figures while a run goes, and for merging across processes.

HDR histograms of three significant digits (error at most 0.1 %), 1 us to 10 hours. Two of them are
merged, and percentiles are only ever taken of the merged one, never averaged.
"""

from __future__ import annotations

import math

import numpy as np
from hdrh.histogram import HdrHistogram

from results.metrics import Floats, sample_floor

_LOWEST_US = 1
_HIGHEST_US = 36_000_000_000
_DIGITS = 3
# Sub-buckets at three digits: 2,048 values are told apart in each octave (HdrHistogram's layout).
_SUB_BUCKET_BITS = 11
_HALF = 1 << (_SUB_BUCKET_BITS - 1)


class LiveHistogram:
    """Samples in seconds. Negative ones count as the lowest, NaN is left out."""

    def __init__(self, counts: HdrHistogram | None = None) -> None:
        self._counts = counts or HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)
        #: The histogram's own counters: its methods are loops in Python over as many.
        self._cells = np.frombuffer(self._counts.counts, np.uint64)

    @property
    def count(self) -> int:
        return int(self._counts.get_total_count())

    def record(self, sample_s: float) -> None:
        if not math.isnan(sample_s):
            value = round(sample_s * 1e6)
            self._counts.record_value(min(max(value, _LOWEST_US), _HIGHEST_US))

    def record_many(self, samples_s: Floats) -> None:
        """The same for many at once."""
        present = samples_s[~np.isnan(samples_s)]
        if not len(present):
            return
        values = np.clip(np.rint(present * 1e6), _LOWEST_US, _HIGHEST_US).astype(np.int64)
        # The octave, and within it the leading bits, as HdrHistogram's _counts_index_for has it.
        octave = np.frexp((values | (2 * _HALF - 1)).astype(np.float64))[1] - _SUB_BUCKET_BITS
        found = np.bincount((octave + 1) * _HALF + (values >> octave) - _HALF)
        self._cells[: len(found)] += found.astype(np.uint64)
        counts = self._counts
        counts.total_count += len(values)
        counts.min_value = min(counts.min_value, int(values.min()))
        counts.max_value = max(counts.max_value, int(values.max()))

    def merge(self, other: LiveHistogram) -> None:
        """Add the samples of `other`, exactly."""
        self._counts.add(other._counts)

    def percentile(self, q: float) -> float | None:
        """`q` quantile (0..1) in seconds; None below its sample floor."""
        if self.count < sample_floor(q):
            return None
        counts = self._counts
        rank = counts.get_target_count_at_percentile(q * 100)
        value = counts.get_value_from_index(int(np.searchsorted(np.cumsum(self._cells), rank)))
        return float(counts.get_highest_equivalent_value(value)) / 1e6

    def mean(self) -> float | None:
        return float(self._counts.get_mean_value()) / 1e6 if self.count else None

    def encode(self) -> bytes:
        """HdrHistogram's own compressed form, readable by its other implementations."""
        return bytes(self._counts.encode())

    @classmethod
    def decode(cls, data: bytes) -> LiveHistogram:
        return cls(HdrHistogram.decode(data))
