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


class LiveHistogram:
    """Samples in seconds. Negative ones count as the lowest, NaN is left out."""

    def __init__(self) -> None:
        self._counts = HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)

    @property
    def count(self) -> int:
        return int(self._counts.get_total_count())

    def record(self, sample_s: float) -> None:
        if not math.isnan(sample_s):
            value = round(sample_s * 1e6)
            self._counts.record_value(min(max(value, _LOWEST_US), _HIGHEST_US))

    def record_many(self, samples_s: Floats) -> None:
        """The same, bucketed in numpy first: one Python call for each distinct bucket."""
        present = samples_s[~np.isnan(samples_s)]
        values = np.clip(np.rint(present * 1e6), _LOWEST_US, _HIGHEST_US).astype(np.int64)
        # Bits below the sub-bucket's width do not matter: drop them, so equal buckets are equal.
        exponent = np.frexp(values.astype(np.float64))[1]
        shift = np.maximum(exponent - _SUB_BUCKET_BITS, 0)
        distinct, counts = np.unique((values >> shift) << shift, return_counts=True)
        for value, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            self._counts.record_value(value, count)

    def merge(self, other: LiveHistogram) -> None:
        """Add the samples of `other`, exactly."""
        self._counts.add(other._counts)

    def percentile(self, q: float) -> float | None:
        """`q` quantile (0..1) in seconds; None below its sample floor."""
        if self.count < sample_floor(q):
            return None
        return float(self._counts.get_value_at_percentile(q * 100)) / 1e6

    def mean(self) -> float | None:
        return float(self._counts.get_mean_value()) / 1e6 if self.count else None

    def encode(self) -> bytes:
        """HdrHistogram's own compressed form, readable by its other implementations."""
        return bytes(self._counts.encode())

    @classmethod
    def decode(cls, data: bytes) -> LiveHistogram:
        made = cls()
        made._counts = HdrHistogram.decode(data)
        return made
