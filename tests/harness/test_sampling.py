"""What samples of instances say is what became of the requests."""

from __future__ import annotations

from collections import defaultdict

import pytest

from harness.execution import execute
from harness.experiment import load_experiment
from results import reader

SHORT = {
    "measure.capacity_warmup_s": 30,
    "measure.capacity_window_s": 60,
    "measure.latency_warmup_s": 0,
    "measure.latency_window_s": 120,
    "measure.load_fractions": [],
    "measure.unloaded": False,
    "measure.slo_search": False,
}


def test_busy_time_and_caches_of_instances_are_those_of_their_requests(tmp_path):
    experiment = load_experiment("paper", SHORT)
    kept = tuple(row for row in experiment.configurations if row.name == "prfaas")
    run = execute(experiment.model_copy(update={"configurations": kept}), tmp_path, "test")
    prefills, decodes = defaultdict(list), defaultdict(list)
    for row in reader.read(run.directory, "requests").to_pylist():
        took_us = (row["prefill_finished_us"] or 0) - (row["prefill_started_us"] or 0)
        prefills[row["phase"], row["prefill_instance"]].append((row["delivered_us"], took_us))
        tokens = row["input_tokens"] + row["output_tokens"]
        times = (row["sent_us"], row["ended_us"])
        decodes[row["phase"], row["decode_instance"]].append((*times, tokens))
    samples = reader.read(run.directory, "instances").to_pylist()
    first_us: dict[tuple[str, str], int] = {}
    for row in samples:
        place, at_us = (row["phase"], row["instance"]), row["time_us"]
        if row["role"] == "prefill":
            took = sum(us for ended_us, us in prefills[place] if ended_us and ended_us <= at_us)
            # Each request's times are rounded on their own.
            busy_us = row["busy_us"] - first_us.setdefault(place, row["busy_us"])
            assert busy_us == pytest.approx(took, abs=len(prefills[place]) + 1)
            assert row["cache_tokens"] is None
        else:
            held = [n for sent_us, ended_us, n in decodes[place] if sent_us <= at_us < ended_us]
            assert (row["running"], row["cache_tokens"]) == (len(held), sum(held))
            assert row["busy_us"] is None
    assert max(row["busy_us"] or 0 for row in samples) > 60_000_000
    assert max(row["cache_tokens"] or 0 for row in samples) > 100_000
