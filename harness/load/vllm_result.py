"""A load run under the keys of vLLM's benchmark results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.load.execute import LoadDone
from harness.load.figures import PhaseFigures
from results import reader
from results.export import to_vllm


def save_results(done: LoadDone, name: str, *, detailed: bool = False) -> list[Path]:
    """Write `name` into the run: of a search its best trial; of repeats a file for each, with the
    phase before the suffix. Nothing where no phase was measured. Raises ReadError.
    """
    phases = done.phases
    if done.search is not None and phases:
        phases = [done.best]
    paths = []
    for phase in phases:
        path = done.directory / name
        if len(phases) > 1:
            path = path.with_name(f"{path.stem}-{phase.whole.name}{path.suffix}")
        result = vllm_result(done, phase, detailed=detailed)
        path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        paths.append(path)
    return paths


def vllm_result(done: LoadDone, phase: PhaseFigures, *, detailed: bool = False) -> dict[str, Any]:
    """Raises ReadError. Without `detailed` the gaps between tokens come from the histograms that
    the run kept, so that no run is too long for it.
    """
    name = phase.whole.name
    requests = reader.read(done.directory, "requests")
    requests = requests.filter([each == name for each in requests["phase"].to_pylist()])
    tokens = reader.read(done.directory, "tokens")
    tokens = tokens.filter([each == name for each in tokens["phase"].to_pylist()])
    identity, spec = done.summary, done.spec
    made = to_vllm(
        requests,
        tokens if detailed else tokens.slice(0, 0),
        model=identity.model,
        date=done.directory.name.rpartition("-")[2],
        slo=spec.slo.limits(),
        detailed=detailed,
    )
    if not detailed:
        gaps = done.tallies[name].histograms["gap"]
        values = {"mean": gaps.mean(), "median": gaps.percentile(0.5)}
        values |= {f"p{q}": gaps.percentile(q / 100) for q in (50, 90, 95, 99)}
        made |= {
            f"{name}_itl_ms": None if each is None else each * 1e3 for name, each in values.items()
        }
    rate = spec.request_rate
    if done.search is not None:
        rate = next(each.rate for each in done.search.trials if each.phase == name)
    made["request_rate"] = rate or ("inf" if not spec.timed else made["request_rate"])
    constant = spec.arrivals.process == "constant"
    made["burstiness"] = "inf" if constant else spec.arrivals.burstiness
    made["max_concurrency"] = spec.max_concurrency
    return made
