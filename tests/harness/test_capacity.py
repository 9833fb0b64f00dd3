"""Simulated capacity is the planner's `work` reading within 1 %, for all four configurations."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "capacity.py"


@pytest.fixture(scope="module")
def capacity():
    spec = importlib.util.spec_from_file_location("capacity", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["capacity"] = module
    spec.loader.exec_module(module)
    return module


def test_an_overloaded_hour_yields_the_planned_capacity(capacity):
    agreements = capacity.measure([1])
    assert {each.configuration: round(each.work, 3) for each in agreements} == {
        "homogeneous": 2.031,
        "naive": 2.390,
        "balanced": 3.067,
        "prfaas": 3.187,
    }
    for each in agreements:
        assert abs(each.difference) < 0.01, each
    assert capacity.AGREES == 0.01
    assert "prfaas" in capacity.report(agreements)
