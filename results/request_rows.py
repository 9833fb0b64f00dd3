"""Requests on their way to columns: fields are taken from a record at once, while it is still in a
processor's cache, and the record is let go.
"""

from __future__ import annotations

from array import array
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from results import columns
from results.records import RequestRecord
from results.schemas import REQUESTS

_NAMES = REQUESTS.names[2:]
_TIMES = [name for name in _NAMES if name.endswith("_us")]
_OTHERS = [name for name in _NAMES if not name.endswith("_us")]
_get_times = attrgetter(*(f"{name[:-3]}_s" for name in _TIMES))
_get_others = attrgetter(*_OTHERS, "token_runs")
_WIDTH = len(_OTHERS) + 1


class RequestRows:
    """Rows not yet converted. `runs` counts the runs of tokens in them."""

    __slots__ = ("_others", "_times", "rows", "runs")

    def __init__(self) -> None:
        self._times = array("d")
        self._others: list[Any] = []
        self.rows = self.runs = 0

    def add(self, record: RequestRecord) -> None:
        times = _get_times(record)
        try:
            self._times.extend(times)
        except TypeError:  # an event has not happened; what came before it was already taken
            del self._times[self.rows * len(_TIMES) :]
            self._times.extend([np.nan if time is None else time for time in times])
        self._others.extend(_get_others(record))
        self.rows += 1
        self.runs += len(record.token_runs)

    def take(self) -> tuple[list[pa.Array], list[pa.Array]]:
        """The columns of requests.parquet after the first two, and those of tokens.parquet; no rows
        are left.
        """
        seconds = np.frombuffer(self._times).reshape(-1, len(_TIMES)).T
        found = {name: columns.times_of(row) for name, row in zip(_TIMES, seconds, strict=True)}
        values = [self._others[at::_WIDTH] for at in range(_WIDTH)]
        for name, column in zip(_OTHERS, values, strict=False):
            found[name] = columns.converter(REQUESTS.field(name))(column)
        self._times, self._others = array("d"), []
        self.rows = self.runs = 0
        timing, runs, gaps_us = columns.token_columns(values[-1])
        tokens = [found["id"], timing, found["first_token_us"], runs, gaps_us]
        return [found[name] for name in _NAMES], tokens
