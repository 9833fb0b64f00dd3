"""The speed benchmark measures what it says; how fast it is decides no test."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed.py"


@pytest.fixture(scope="module")
def speed():
    spec = importlib.util.spec_from_file_location("speed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["speed"] = module
    spec.loader.exec_module(module)
    return module


def test_fleets_grow_in_proportion(speed):
    small = speed.instance_specs(speed.Case("x", 12))
    large = speed.instance_specs(speed.Case("x", 1250))
    assert len(small) == 12 and len(large) == 1250
    count = {
        (cluster, role): sum(spec.cluster == cluster and spec.role == role for spec in large)
        for cluster, role in [("prfaas", "prefill"), ("pd", "prefill"), ("pd", "decode")]
    }
    assert list(count.values()) == [417, 312, 521]


def test_a_measurement_simulates_and_writes_every_request(speed, tmp_path):
    case = speed.Case("small", 12, requests=300)
    cost = speed.measure(case, tmp_path)
    assert (cost.requests, cost.failed) == (300, 0)
    assert cost.cpu_s > 0 and cost.simulated_s > 60
    requests = pq.read_table(tmp_path / "run" / "requests.parquet")
    tokens = pq.read_table(tmp_path / "run" / "tokens.parquet")
    assert requests.num_rows == tokens.num_rows == 300
    table = speed.report([(case, cost), (case, cost)])
    assert "300" in table and "1.00x" in table


def test_a_case_runs_in_a_process_of_its_own(speed):
    case = speed.Case("tiny", 12, duration_s=20.0)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--case", json.dumps(asdict(case))],
        capture_output=True,
        text=True,
        check=True,
    )
    cost = speed.Cost(**json.loads(done.stdout))
    assert cost.requests > 20 and cost.failed == 0
