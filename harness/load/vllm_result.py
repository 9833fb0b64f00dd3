"""A load run under the keys of vLLM's benchmark results."""

from __future__ import annotations

from typing import Any

from harness.load.execute import LoadDone
from results import reader
from results.export import to_vllm


def vllm_result(done: LoadDone, *, detailed: bool = False) -> dict[str, Any]:
    """Raises ReadError. Without `detailed` the gaps between tokens come from the histograms that
    the run kept, so that no run is too long for it.
    """
    phases = {each.whole.name for each in done.phases}
    requests = reader.read(done.directory, "requests")
    keep = [each in phases for each in requests["phase"].to_pylist()]
    requests = requests.filter(keep)
    tokens = reader.read(done.directory, "tokens")
    tokens = tokens.filter([each in phases for each in tokens["phase"].to_pylist()])
    identity = done.summary
    made = to_vllm(
        requests,
        tokens if detailed else tokens.slice(0, 0),
        model=identity.model,
        date=done.directory.name.rpartition("-")[2],
        slo=done.spec.slo.limits(),
        detailed=detailed,
    )
    if not detailed:
        gaps = done.tally.histograms["gap"]
        values = {"mean": gaps.mean(), "median": gaps.percentile(0.5)}
        values |= {f"p{q}": gaps.percentile(q / 100) for q in (50, 90, 95, 99)}
        made |= {
            f"{name}_itl_ms": None if each is None else each * 1e3 for name, each in values.items()
        }
    made["request_rate"] = done.spec.request_rate or "inf"
    made["burstiness"] = done.spec.arrivals.burstiness
    made["max_concurrency"] = done.spec.max_concurrency
    return made
