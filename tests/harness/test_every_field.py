"""Every field of an experiment has an effect in virtual time, by each path that simulates it, or is
on a list of those that have none there, with the reason.

An effect is a change of a figure of summary.json (`prfaas run`) and of a row (`prfaas sweep`)."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from harness.execution import execute
from harness.experiment import Experiment, _keys, load_experiment
from harness.fleets.local import LocalFleets
from harness.fleets.worker_words import pacing_of
from harness.sweep.evaluate import evaluate
from harness.sweep.study import AxisSpec, Study, points

Settings = dict[str, Any]

SHORT: Settings = {
    "measure.capacity_warmup_s": 20.0,
    "measure.capacity_window_s": 40.0,
    "measure.latency_warmup_s": 10.0,
    "measure.latency_window_s": 60.0,
    "configurations.prfaas.policy": "prfaas",
}
#: What the plan would else give: so that it is the simulation that a field changes.
GIVEN: Settings = {
    "measure.capacity_rate": 4.0,
    "measure.request_rate": 2.0,
    "configurations.prfaas.threshold_tokens": 19_400,
}
MEASURED = (
    "phase",
    "slo_rate_per_s",
    "throughput_per_s",
    "goodput",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "tpot_p90_s",
    "offloaded_share",
    "egress_gbps",
)
#: Fields of the plan's.
PLANNED = ("measure.overload", "measure.rate_fraction")
LOADED = {"measure.request_rate": 3.0}
NARROW = {"link.rate_gbps": 12.0}
SESSIONS = {"workload": {"kind": "sessions", "think_s": 3.0, "response_s": 2.0}}
DOCUMENTS = {"workload": {"kind": "documents"}, "measure.request_rate": 3.0}
DRIFT = {"workload": {"kind": "drift", "period_s": 40.0}}
SINE = {"period_s": 20.0, "amplitude": 0.9, "until_s": 200.0}
STEP = {"at_s": 20.0, "rate_gbps": 4.0}
SHORTEST = {"configurations.prfaas.queue.discipline": "shortest-first", **LOADED}
BURSTY = {"model": "gilbert-elliott", "good_to_bad": 0.01, "bad_to_good": 0.2}
LENGTHS = {"mu": 6.0, "sigma": 0.5, "min_tokens": 16, "max_tokens": 2000}
Changes = list[tuple[str, Settings, Any]]


def lengths(table: str, base: Settings) -> Changes:
    """The four fields of a log-normal."""
    kind = {**base, table: LENGTHS} if "workload" not in base else base
    given = {**base.get("workload", {}), table.removeprefix("workload."): LENGTHS}
    kind = {**base, "workload": {"kind": "lognormal", **given}}
    changed = {"mu": 6.5, "sigma": 0.2, "min_tokens": 500, "max_tokens": 500}
    return [(f"{table}.{name}", kind, value) for name, value in changed.items()]


#: (field, what is set beside it, its other value).
CHANGES: Changes = [
    ("seed", {}, 2),
    ("workload.kind", {"workload": {"kind": "fixed"}}, "lognormal"),
    ("workload.mu", {}, 9.0),
    ("workload.sigma", {}, 0.5),
    ("workload.min_tokens", {}, 5000),
    ("workload.max_tokens", {}, 50_000),
    ("workload.stratified", {}, False),
    *lengths("workload.output_tokens", {}),
    ("workload.input_tokens", {"workload": {"kind": "fixed"}}, 10_000),
    *[
        (f"workload.{name}", SESSIONS, value)
        for name, value in {
            "system_tokens": 9000,
            "mean_turns": 2.0,
            "max_turns": 2,
            "max_input_tokens": 20_000,
            "response_s": 0.5,
            "warm_s": 20.0,
            "think_s": 0.5,
            "block_tokens": 4096,
        }.items()
    ],
    *lengths("workload.first_message", SESSIONS),
    *lengths("workload.later_message", SESSIONS),
    *[
        (f"workload.{name}", DOCUMENTS, value)
        for name, value in {"reuse": 0.1, "live_documents": 2, "skew": 0.0}.items()
    ],
    ("workload.tenants", DOCUMENTS, {"a": 1.0, "b": 1.0}),
    *lengths("workload.document", DOCUMENTS),
    *lengths("workload.question", DOCUMENTS),
    *[
        (f"workload.{name}", DRIFT, value)
        for name, value in {"mean_from": 30_000, "mean_to": 20_000, "period_s": 70.0}.items()
    ],
    ("arrivals.process", {}, "constant"),
    ("arrivals.burstiness", {"arrivals.process": "gamma"}, 0.1),
    ("arrivals.exact_rate", {}, True),
    ("arrivals.shape.kind", {}, "on-off"),
    ("arrivals.shape.on_s", {"arrivals.shape": {"kind": "on-off"}}, 10.0),
    ("arrivals.shape.off_s", {"arrivals.shape": {"kind": "on-off"}}, 10.0),
    ("arrivals.shape.from_factor", {"arrivals.shape": {"kind": "linear"}}, 0.5),
    ("arrivals.shape.to_factor", {"arrivals.shape": {"kind": "linear"}}, 2.0),
    ("arrivals.shape.over_s", {"arrivals.shape": {"kind": "linear"}}, 20.0),
    ("arrivals.shape.steps", {"arrivals.shape": {"kind": "steps", "steps": [
        {"duration_s": 10.0, "factor": 2.0}, {"duration_s": 10.0, "factor": 0.5}]}},
        [{"duration_s": 20.0, "factor": 2.0}, {"duration_s": 10.0, "factor": 0.2}]),
    ("link.preset", {}, "continental"),
    ("link.rate_gbps", {}, 5.0),
    ("link.rtt_ms", {}, 100.0),
    ("link.loss", {}, {"model": "independent", "probability": 0.02}),
    *[
        (f"link.loss.{name}", {"link.loss": BURSTY, "link.rtt_ms": 20.0}, value)
        for name, value in {
            "good_to_bad": 0.05, "bad_to_good": 0.9, "loss_bad": 0.2, "loss_good": 0.1,
        }.items()
    ],
    ("link.reverse.delay_ms", {"link.rtt_ms": 100.0}, 90.0),
    ("link.schedule", {}, [STEP]),
    ("link.schedule", {"link.schedule": [STEP]}, [{**STEP, "at_s": 40.0}]),
    ("link.schedule", {"link.schedule": [STEP]}, [{**STEP, "rtt_ms": 200.0}]),
    ("link.schedule", {"link.schedule": [STEP]},
        [{**STEP, "loss": {"model": "independent", "probability": 0.02}}]),
    ("link.schedule", {"link.schedule": [STEP]},
        [{**STEP, "down": True}, {"at_s": 30.0, "down": False}]),
    ("link.sine", {}, SINE),
    *[
        (f"link.sine.{name}", {**NARROW, "link.sine": SINE}, value)
        for name, value in {
            "from_s": 15.0, "rate_gbps": 4.0, "period_s": 50.0, "amplitude": 0.3,
            "until_s": 30.0, "step_s": 5.0,
        }.items()
    ],
    ("slo.ttft_s", {}, 1.0),
    ("slo.tokens_per_s", {"profiles.pd": "1t-h20-step5"}, 80.0),
    ("slo.tolerance", {"profiles.pd": "1t-h20-step5", "slo.tokens_per_s": 80.0}, 0.5),
    ("profiles.prfaas", {}, "ring-2.5-1t-h200"),
    ("profiles.pd", {}, "ring-2.5-1t-h20"),
    ("measure.overload", {}, 1.5),
    ("measure.capacity_rate", {}, 5.0),
    ("measure.capacity_warmup_s", {}, 30.0),
    ("measure.capacity_window_s", {}, 50.0),
    ("measure.rate_fraction", {}, 0.5),
    ("measure.request_rate", {}, 1.0),
    ("measure.latency_warmup_s", {}, 20.0),
    ("measure.latency_window_s", {}, 80.0),
    ("measure.max_window_requests", {}, 20),
    ("measure.load_fractions", {}, [0.5]),
    ("measure.unloaded", {}, True),
    ("measure.slo_search", {}, True),
    ("measure.drain_s", {}, 2.0),
    ("measure.sample_s", {}, 7.0),
    ("cache.enabled", DOCUMENTS, False),
    ("cache.blocks", DOCUMENTS, 20),
    ("cache.states", DOCUMENTS, 2),
    ("cache.interval_blocks", DOCUMENTS, 1),
    ("cache.prompt_end", DOCUMENTS, False),
    ("cache.junction", DOCUMENTS, False),
    ("cache.directory_entries", DOCUMENTS, 20),
    ("configurations.prfaas.policy", {}, "eft"),
    ("configurations.prfaas.n_prfaas", {}, 3),
    ("configurations.prfaas.n_prefill", {}, 2),
    ("configurations.prfaas.n_decode", {}, 4),
    ("configurations.prfaas.threshold_tokens", {}, 60_000),
    ("configurations.prfaas.parameters.band", {}, 1.0),
    ("configurations.prfaas.queue.discipline", LOADED, "shortest-first"),
    ("configurations.prfaas.queue.ageing", SHORTEST, 50.0),
    ("configurations.prfaas.queue.chunk_tokens", SHORTEST, 1024),
]  # fmt: skip

#: Fields without an effect on these figures, and why.
NONE_HERE = {
    "name": "names the run",
    "mode": "which way the experiment is run",
    "configurations.NAME.name": "names a column",
    "workload.slo_class": "recorded",
    "workload.path": "a trace's file; tests/workloads",
    "workload.format": "of a trace's file; tests/workloads",
    "workload.start_s": "of a trace's file; tests/workloads",
    "workload.end_s": "of a trace's file; tests/workloads",
    "arrivals.slow_down": "of a trace's own times, which an experiment refuses",
    "arrivals.offset_s": "of a trace's own times, which an experiment refuses",
    "arrivals.dequantise_s": "of a trace's own times, which an experiment refuses",
    "link.jitter_ms": "not modelled: a warning of the run (harness.passed_over)",
    "link.reverse.jitter_ms": "not modelled: a warning of the run (harness.passed_over)",
    "link.queue_ms": "a signal only (RTT under load): a fluid loses nothing to a full queue",
    "link.queue_bytes": "as queue_ms",
    "link.reverse.queue_ms": "as queue_ms",
    "link.reverse.queue_bytes": "as queue_ms",
    "link.reverse.rate_gbps": "of fetched prefixes; tests/harness/test_modelled_fleet.py",
    "link.reverse.loss": "of fetched prefixes; tests/harness/test_modelled_fleet.py",
    "link.bundle_segments": "of emulate only: netem",
    "link.backend": "of emulate only: what shapes the link",
    "measure.flow_rates": "writes a table, changes no figure; tests/harness/test_flow_rates.py",
    **{
        f"emulate.{name}": "of emulate only"
        for name in Experiment.model_fields["emulate"].annotation.model_fields  # type: ignore[union-attr]
    },
}  # fmt: skip


def test_every_field_is_changed_here_or_listed_with_a_reason():
    changed = {field.replace(".prfaas.", ".NAME.") for field, _, _ in CHANGES}
    changed = {"profiles.prfaas" if field == "profiles.NAME" else field for field in changed}
    for key, first in _keys(Experiment):
        if first or key in changed or key in NONE_HERE:
            continue
        above = ["link.loss", "link.reverse.loss", "link.schedule", "arrivals.shape.steps"]
        assert any(
            key.startswith(f"{each}.") and (each in changed or each in NONE_HERE) for each in above
        ) or any(field.startswith(f"{key}.") for field in changed), f"{key}: is it simulated?"


@pytest.mark.parametrize(("field", "base", "value"), CHANGES, ids=[row[0] for row in CHANGES])
def test_a_changed_field_changes_what_run_and_sweep_simulate(field, base, value):
    base = {**SHORT, **({} if field in PLANNED else GIVEN), **base}
    changed = {**base, field: value}
    assert swept(json.dumps(changed)) != swept(json.dumps(base))
    assert run(json.dumps(changed)) != run(json.dumps(base))


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch):
    monkeypatch.setattr("harness.phases.UNLOADED_REQUESTS", 50)
    monkeypatch.setattr("harness.slo_search.REQUESTS", 50)


@functools.cache
def swept(settings: str) -> list[tuple[Any, ...]]:
    """Measured figures of each phase, by `prfaas sweep`."""
    axis = AxisSpec(key="slo.ttft_s", values=(json.loads(settings).get("slo.ttft_s", 10.0),))
    study = Study(name="s", base="bench", mode="simulate", configurations=("prfaas",), axis=(axis,))
    (point,) = points(study.model_copy(update={"set": json.loads(settings)}))
    return [tuple(getattr(row, name) for name in MEASURED) for row in evaluate(point, best=False)]


@functools.cache
def run(settings: str) -> list[Any]:
    """The same by `prfaas run`: what is measured, not what was predicted."""
    experiment = load_experiment("bench", {**json.loads(settings), "mode": "simulate"})
    prfaas = tuple(row for row in experiment.configurations if row.name == "prfaas")
    experiment = experiment.model_copy(update={"configurations": prfaas})
    with TemporaryDirectory() as folder:
        (made,) = execute(experiment, Path(folder), "test").summary.configurations
    return [made.slo_rate.paper, *(_measured(asdict(phase)) for phase in made.phases)]


def _measured(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _measured(each) if isinstance(each, dict) else each
        for name, each in figures.items()
        if name != "predicted"
    }


def test_workers_keep_the_decode_batch_that_keeps_the_slo(tmp_path):
    # 5 ms + 1 ms a sequence: 7 sequences at 80 tokens/s, of the profile's 20.
    given = {"profiles.pd": "1t-h20-step5", "slo.tokens_per_s": 80.0}
    fleets = LocalFleets(load_experiment("bench", given), tmp_path)
    assert pacing_of(fleets.profiles["pd"], fleets.scale)["decode"]["max_batch"] == 7
    assert LocalFleets(load_experiment("bench"), tmp_path).profiles["pd"].max_batch == 20
