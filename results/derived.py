"""requests.parquet with the metrics of each request beside its times, by `results.metrics`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from results import metrics
from results.metrics import Floats
from results.reader import as_requests


def _column(values: Floats) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def with_metrics(table: pa.Table) -> pa.Table:
    """`table` with ttft_s, tpot_s, e2e_s, lateness_s and the parts of TTFT; null where undefined.
    Seconds are those of the run.
    """
    requests = as_requests(table)
    added = {
        "ttft_s": metrics.ttft_s(requests),
        "tpot_s": metrics.tpot_s(requests),
        "e2e_s": metrics.e2e_s(requests),
        "lateness_s": metrics.lateness_s(requests),
        **{f"{part}_s": values for part, values in metrics.ttft_split_s(requests).items()},
    }
    for name, values in added.items():
        unit, definition = metrics.DEFINITIONS[name[:-2]]
        field = pa.field(name, pa.float64(), metadata={"unit": unit, "definition": definition})
        table = table.append_column(field, _column(values))
    return table
