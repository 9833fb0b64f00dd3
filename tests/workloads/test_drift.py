import numpy as np
import pytest

from workloads.spec import ArrivalSpec, DriftWorkload, generate, length_distribution, lengths_at

DAY = DriftWorkload()


def test_the_mean_goes_from_10k_to_60k_and_back():
    assert [round(lengths_at(DAY, hour * 3600).mean()) for hour in (0, 6, 12, 18, 24)] == [
        10_000,
        35_000,
        60_000,
        35_000,
        10_000,
    ]


def test_samples_follow_the_distribution_in_force():
    found = list(generate(DAY, ArrivalSpec(), 4, request_rate=0.5, duration_s=86_400))
    times = np.array([r.arrival_s for r in found])
    lengths = np.array([r.input_tokens for r in found])
    for hour in (1, 6, 12, 20):
        near = np.abs(times - hour * 3600) < 1800
        expected = lengths_at(DAY, hour * 3600).mean()
        assert lengths[near].mean() == pytest.approx(expected, rel=0.08)
    assert length_distribution(DAY).mean() == pytest.approx(35_000, rel=0.005)
    assert lengths.mean() == pytest.approx(35_000, rel=0.02)
