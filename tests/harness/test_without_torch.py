"""Planning and simulation in an environment that has no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import sys
sys.modules["torch"] = None  # an import of it fails as if it were not there
from harness.cli.main import main
code = main(sys.argv[1:])
assert sys.modules["torch"] is None
sys.exit(code)
"""
SHORT = [
    *("--set", "measure.load_fractions=[]"),
    *("--set", "measure.unloaded=false", "--set", "measure.slo_search=false"),
    *("--set", "measure.capacity_warmup_s=30", "--set", "measure.capacity_window_s=60"),
    *("--set", "measure.latency_warmup_s=0", "--set", "measure.latency_window_s=60"),
]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "paper", "--json"],
        ["run", "paper", "--mode", "simulate", *SHORT, "--out", "OUT"],
        ["sweep", "paper", "--axis", "link.rate_gbps=5", "--jobs", "1", *SHORT, "--out", "OUT"],
    ],
    ids=["plan", "run", "sweep"],
)
def test_plan_simulate_and_sweep_work_without_torch(arguments, tmp_path):
    done = command(*(str(tmp_path) if each == "OUT" else each for each in arguments))
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stderr


def test_what_needs_torch_fails_here():
    """That the block works: a worker's engine cannot be imported."""
    script = 'import sys; sys.modules["torch"] = None; import engine.runner'
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode != 0
