"""The throughput model's figures for the shipped preset, as literals of the paper."""

import pytest

from harness.experiment import load_experiment
from harness.phases import plan_phases
from harness.planner import tpot_s
from harness.planner.experiment import deployment_of
from harness.prediction import predict, predict_phase, reference_capacity


@pytest.fixture(scope="module")
def predictions():
    experiment = load_experiment("bench")
    deployment = deployment_of(experiment)
    return experiment, {each.name: predict(each, deployment) for each in experiment.configurations}


@pytest.mark.parametrize(
    ("name", "capacity"),
    [("homogeneous", 2.031), ("naive", 2.390), ("balanced", 3.067), ("prfaas", 3.187)],
)
def test_capacities_of_the_work_reading(predictions, name: str, capacity: float) -> None:
    assert predictions[1][name].capacity.requests_per_s == pytest.approx(capacity, abs=6e-4)


def test_the_planned_threshold_is_the_papers(predictions) -> None:
    prediction = predictions[1]["prfaas"]
    assert prediction.threshold_tokens == 19_400
    assert prediction.capacity.offloaded_share == pytest.approx(0.4957, abs=1e-4)


def test_all_configurations_meet_one_latency_rate(predictions) -> None:
    experiment, each = predictions
    reference = reference_capacity(experiment, each["prfaas"].deployment)
    rates = {
        plan_phases(experiment.measure, prediction.capacity.requests_per_s, reference)[
            1
        ].request_rate
        for prediction in each.values()
    }
    assert len(rates) == 1
    assert rates.pop() == pytest.approx(0.8 * 2.0305, abs=1e-3)


def test_the_order_of_tails_at_the_common_rate(predictions) -> None:
    experiment, each = predictions
    reference = reference_capacity(experiment, each["prfaas"].deployment)
    p90 = {}
    for name, prediction in each.items():
        phase = plan_phases(experiment.measure, prediction.capacity.requests_per_s, reference)[1]
        p90[name] = predict_phase(experiment, prediction, phase)["ttft_p90"]
    assert max(p90, key=lambda name: p90[name]) == "homogeneous"
    assert p90["prfaas"] < p90["naive"] < p90["balanced"] < p90["homogeneous"]


@pytest.mark.parametrize(
    ("profile", "requests_per_s", "ms"),
    [
        # 0.0155 / (1 - 1.62 / 3 x 1,024 x 0.0005), and of 20 sequences at most.
        ("1t-h20-step15", 1.62, 21.4230),
        ("1t-h20-step15", 3.0, 25.0),
        ("1t-h20-step15", 0.0, 15.5),
        ("1t-h20", 1.62, 25.0),
    ],
)
def test_a_fuller_batch_steps_slower(profile: str, requests_per_s: float, ms: float) -> None:
    deployment = deployment_of(load_experiment("paper", {"profiles.pd": profile}))
    assert tpot_s(deployment, 3, requests_per_s) * 1e3 == pytest.approx(ms, abs=1e-4)


def test_the_tpot_of_a_phase_is_that_of_its_batch() -> None:
    experiment = load_experiment("paper", {"profiles.pd": "1t-h20-step15"})
    deployment = deployment_of(experiment)
    (prediction,) = (
        predict(each, deployment)
        for each in experiment.configurations
        if each.name == "homogeneous"
    )
    tpots = {
        phase.name: predict_phase(experiment, prediction, phase)["tpot_mean"] * 1e3
        for phase in plan_phases(experiment.measure, prediction.capacity.requests_per_s, 2.0305)
    }
    assert tpots["unloaded"] == pytest.approx(15.5)
    assert tpots["latency"] == pytest.approx(21.445, abs=1e-2)  # 0.8 x 2.0305 req/s
    assert tpots["capacity"] == pytest.approx(23.720, abs=1e-2)  # 2.0305 req/s
