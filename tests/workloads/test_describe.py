from pathlib import Path

import pytest

from workloads.describe import describe
from workloads.request import Request
from workloads.spec import (
    ArrivalSpec,
    LogNormalWorkload,
    TraceWorkload,
    generate,
    length_distribution,
)
from workloads.traces.readers import open_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
real = pytest.mark.skipif(not TRACES.is_dir(), reason="needs the real traces beside the checkout")


def test_a_small_workload_by_hand():
    rows = [
        Request(0, 0.0, 600, 10, (1, 2), 512, tenant="a"),
        Request(1, 1.0, 1100, 20, (1, 3, 4), 512, "s", "a"),
        Request(2, 4.0, 100, 30),
    ]
    found = describe(rows, threshold_tokens=500)
    assert (found.requests, found.duration_s, found.rate_rps) == (3, 4.0, 0.5)
    assert found.gap_cv == pytest.approx(0.5)
    assert (found.dispersion, found.peak_rate_rps, found.quantum_s) == (None, None, None)
    assert found.hit_share == pytest.approx(512 / 1800)
    assert found.above_threshold == pytest.approx(2 / 3)
    assert (found.input_tokens.p50, found.input_tokens.maximum) == (600, 1100)
    assert (found.uncached_tokens.minimum, found.uncached_tokens.p99) == (100, 600)
    assert (found.tenants, found.in_sessions) == ({"a": 2}, 1)


def test_one_request_has_no_rate():
    found = describe([Request(0, 5.0, 10, 1)])
    assert (found.rate_rps, found.gap_cv, found.duration_s) == (None, None, 0.0)


def test_poisson_has_unit_burstiness_and_gamma_its_own():
    def of(**arrivals):
        spec = ArrivalSpec(**arrivals)
        return describe(generate(LogNormalWorkload(), spec, 1, request_rate=5.0, count=20_000))

    assert of().gap_cv == pytest.approx(1, abs=0.03)
    assert of().dispersion == pytest.approx(1, abs=0.35)
    assert of(process="gamma", burstiness=0.25).gap_cv == pytest.approx(2, rel=0.05)
    assert of(process="constant").gap_cv == pytest.approx(0, abs=1e-6)


def test_a_bounded_cache_says_so():
    rows = [Request(n, float(n), 512, 1, (n,), 512) for n in range(10)]
    assert describe(rows, max_blocks=4).evicted_blocks == 6


@real
def test_mooncake_conversation():
    path = TRACES / "mooncake_conversation.jsonl"
    found = describe(open_trace(path))
    assert found.requests == 12_031
    assert found.hit_share == pytest.approx(0.37, abs=0.005)
    assert found.above_threshold == pytest.approx(0.097, abs=0.0005)
    assert found.quantum_s == 3.0
    left = length_distribution(TraceWorkload(path=str(path)), uncached=True)
    assert left.tail(19_400) == pytest.approx(found.above_threshold)
    assert left.mean() == pytest.approx(found.uncached_tokens.mean)


@real
def test_azure_conversation():
    found = describe(open_trace(TRACES / "azure_llm_2023_conv.csv"))
    assert (found.requests, found.quantum_s, found.hit_share) == (19_366, None, 0.0)
    assert found.input_tokens.mean == pytest.approx(1154.7, abs=0.05)
