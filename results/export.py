"""Other forms of a run: CSV of its requests, and JSON with the keys of vLLM's benchmark results."""

from __future__ import annotations

import csv
import io
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from results import metrics, reader, tokens
from results.derived import with_metrics
from results.metrics import Floats, Slo


def to_csv(table: pa.Table) -> str:
    """One line a request, with the metrics' columns; null is empty."""
    full = with_metrics(table)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(full.schema.names)
    columns = [full[name].to_pylist() for name in full.schema.names]
    for row in zip(*columns, strict=True):
        writer.writerow(["" if value is None else value for value in row])
    return out.getvalue()


def _statistics(name: str, samples_s: Floats) -> dict[str, float | None]:
    """vLLM's keys for one latency, in ms; null below a percentile's sample floor."""
    present = samples_s[~np.isnan(samples_s)]

    def ms(value: float | None) -> float | None:
        return None if value is None else value * 1e3

    return {
        f"mean_{name}_ms": ms(metrics.mean(present)),
        f"median_{name}_ms": ms(metrics.percentile(present, 0.50)),
        f"std_{name}_ms": ms(float(present.std())) if len(present) else None,
        **{f"p{q}_{name}_ms": ms(metrics.percentile(present, q / 100)) for q in (50, 90, 95, 99)},
    }


def _itls(table: pa.Table) -> list[list[float]]:
    out = []
    for row in table.to_pylist():
        times = tokens.times_us(row)
        out.append([(b - a) / 1e6 for a, b in pairwise(times)])
    return out


def to_vllm(
    requests: pa.Table,
    token_table: pa.Table,
    *,
    model: str = "",
    date: str = "",
    slo: Slo | None = None,
    detailed: bool = False,
) -> dict[str, Any]:
    """The result of one phase under the keys that `vllm bench serve --save-result` writes.

    Rates and sums are over the requests that succeeded, as there. What differs is our definitions:
    latencies count from the scheduled arrival, percentiles are nearest-rank and null below their
    sample floor. `detailed` adds the per-request lists.
    """
    columns = reader.as_requests(requests)
    done = columns.succeeded
    count = int(done.sum())
    inputs = np.asarray(requests["input_tokens"].to_numpy())
    begun_s = float(columns.scheduled_s.min()) if len(columns) else 0.0
    ended = columns.ended_s[~np.isnan(columns.ended_s)]
    duration_s = float(ended.max()) - begun_s if len(ended) else 0.0
    total_input, total_output = int(inputs[done].sum()), int(columns.tokens_received[done].sum())
    found_gaps = tokens.gaps(token_table)

    def rate(amount: float) -> float | None:
        return amount / duration_s if duration_s > 0 else None

    def gap_ms(value: float | None) -> float | None:
        return None if value is None else value * 1e3

    made: dict[str, Any] = {
        "date": date,
        "backend": "prfaas",
        "model_id": model,
        "num_prompts": len(columns),
        "request_rate": metrics.offered_rate(columns),
        "duration": duration_s,
        "completed": count,
        "failed": len(columns) - count,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": rate(count),
        "output_throughput": rate(total_output),
        "total_token_throughput": rate(total_input + total_output),
    }
    if slo is not None:
        made["request_goodput"] = rate(float(metrics.met_slo(columns, slo).sum()))
    made |= _statistics("ttft", metrics.ttft_s(columns))
    made |= _statistics("tpot", metrics.tpot_s(columns))
    made |= {
        "mean_itl_ms": gap_ms(found_gaps.mean()),
        "median_itl_ms": gap_ms(found_gaps.percentile(0.5)),
        **{f"p{q}_itl_ms": gap_ms(found_gaps.percentile(q / 100)) for q in (50, 90, 95, 99)},
    }
    made |= _statistics("e2el", metrics.e2e_s(columns))
    if detailed:
        made |= {
            "input_lens": inputs.tolist(),
            "output_lens": columns.tokens_received.astype(int).tolist(),
            "ttfts": [0.0 if np.isnan(each) else each for each in metrics.ttft_s(columns).tolist()],
            "itls": _itls(token_table),
            "errors": requests["failure"].cast(pa.string()).to_pylist(),
        }
    return made
