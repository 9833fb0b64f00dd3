"""The throughput model's figures for the shipped preset, as literals of the paper."""

import pytest

from harness.experiment import load_experiment
from harness.phases import plan_phases
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
