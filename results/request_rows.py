"""Requests on their way to columns: fields are taken from a record at once, while it is still in a
processor's cache, and the record is let go.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pyarrow as pa

from results import columns
from results.records import RequestRecord
from results.schemas import REQUESTS

_FIELDS = [(field.name, columns.converter(field)) for field in list(REQUESTS)[2:]]
_take = attrgetter(
    *(f"{name[:-3]}_s" if name.endswith("_us") else name for name, _ in _FIELDS), "token_runs"
)
_WIDTH = len(_FIELDS) + 1


class RequestRows:
    """Rows not yet converted, one after the other. `runs` counts the runs of tokens in them."""

    __slots__ = ("_values", "rows", "runs")

    def __init__(self) -> None:
        self._values: list[Any] = []
        self.rows = self.runs = 0

    def add(self, record: RequestRecord) -> None:
        self._values.extend(_take(record))
        self.rows += 1
        self.runs += len(record.token_runs)

    def take(self) -> tuple[list[pa.Array], list[pa.Array]]:
        """The columns of requests.parquet after the first two, and those of tokens.parquet; no rows
        are left.
        """
        values, self._values = self._values, []
        self.rows = self.runs = 0
        found = {name: convert(values[at::_WIDTH]) for at, (name, convert) in enumerate(_FIELDS)}
        timing, runs, gaps_us = columns.token_columns(values[_WIDTH - 1 :: _WIDTH])
        tokens = [found["id"], timing, found["first_token_us"], runs, gaps_us]
        return list(found.values()), tokens
