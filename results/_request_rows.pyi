from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from results.records import RequestRecord

class Copier:
    def __new__(
        cls,
        record_type: type[RequestRecord],
        times: tuple[str, ...],
        counts: tuple[str, ...],
        others: tuple[str, ...],
        runs: str,
        on_full: Callable[[], None],
    ) -> Copier: ...
    @property
    def rows(self) -> int: ...
    def begin(
        self,
        times_us: NDArray[np.int64],
        counts: NDArray[np.int64],
        codes: NDArray[np.int32],
        runs_each: NDArray[np.int64],
        max_runs: int,
        /,
    ) -> None: ...
    def add(self, record: RequestRecord, configuration: str, phase: str, /) -> None: ...
    def take(
        self,
    ) -> tuple[list[tuple[str, str, int]], list[bytes | None], list[list[Any]], bytes]: ...
