"""What a user writes, and the shapes it resolves to."""

from __future__ import annotations

import pytest

from harness.errors import BadInput
from harness.links.shape import LossModel
from harness.links.spec import LinkSpec, parse_link


def test_preset_is_overridden_by_given_fields() -> None:
    spec = parse_link({"preset": "continental", "rate_gbps": 10})
    shape = spec.initial()
    assert (
        shape.forward.rate_bps,
        shape.forward.delay_s,
        shape.reverse.delay_s,
    ) == (10e9, 0.020, 0.020)


@pytest.mark.parametrize(
    ("preset", "rtt_s"),
    [("vpc-100g", 0.0005), ("metro", 0.002), ("continental", 0.040), ("intercontinental", 0.120)],
)
def test_presets(preset: str, rtt_s: float) -> None:
    shape = parse_link({"preset": preset}).initial()
    assert shape.forward.rate_bps == 100e9
    assert rtt_s == pytest.approx(shape.rtt_s)


def test_default_queue_is_one_rtt_of_rate_and_at_least_five_ms() -> None:
    assert parse_link({"rate_gbps": 1, "rtt_ms": 40}).initial().forward.queue_bytes == 5_000_000
    assert parse_link({"rate_gbps": 1, "rtt_ms": 2}).initial().forward.queue_bytes == 625_000
    assert parse_link({"rate_gbps": 0.01}).initial().forward.queue_bytes == 131_072
    assert parse_link({"rate_gbps": 1, "queue_ms": 2}).initial().forward.queue_bytes == 250_000


def test_reverse_overrides_only_what_it_names() -> None:
    spec = parse_link(
        {
            "rate_gbps": 1,
            "rtt_ms": 10,
            "loss": {"model": "independent", "probability": 0.01},
            "reverse": {
                "rate_gbps": 0.25,
                "delay_ms": 7,
                "loss": {
                    "model": "gilbert-elliott",
                    "good_to_bad": 0.01,
                    "bad_to_good": 0.09,
                },
            },
        }
    )
    shape = spec.initial()
    assert (
        shape.reverse.rate_bps,
        shape.reverse.delay_s,
        pytest.approx(shape.forward.delay_s),
    ) == (0.25e9, 0.007, 0.003)
    assert LossModel(loss_good=0.01) == shape.forward.loss
    assert pytest.approx(shape.reverse.loss.mean) == 0.1


def test_schedule_keeps_fields_that_a_step_leaves_out() -> None:
    spec = parse_link(
        {
            "rate_gbps": 1,
            "rtt_ms": 4,
            "reverse": {"rate_gbps": 0.5},
            "schedule": [
                {"at_s": 10, "rate_gbps": 0.4},
                {"at_s": 20, "down": True},
                {"at_s": 25, "down": False, "rtt_ms": 8},
            ],
        }
    )
    seen = [
        (
            timed.at_s,
            timed.shape.forward.rate_bps / 1e9,
            timed.shape.reverse.rate_bps / 1e9,
            timed.shape.rtt_s,
            timed.shape.forward.down,
        )
        for timed in spec.timeline()
    ]
    assert seen == [
        (0.0, 1.0, 0.5, 0.004, False),
        (10.0, 0.4, 0.2, 0.004, False),
        (20.0, 0.4, 0.2, 0.004, True),
        (25.0, 0.4, 0.2, 0.008, False),
    ]


def test_sine_becomes_steps_about_the_rate() -> None:
    spec = parse_link(
        {"rate_gbps": 2, "sine": {"period_s": 4, "amplitude": 0.5, "until_s": 4, "step_s": 1}}
    )
    rates = [round(timed.shape.forward.rate_bps / 1e9, 4) for timed in spec.timeline()]
    assert rates == [2.7071, 2.7071, 1.2929, 1.2929, 2.7071]


def test_a_sine_may_stand_amid_a_schedule() -> None:
    sine = {"from_s": 10, "until_s": 11, "period_s": 4, "amplitude": 0.5, "step_s": 1}
    schedule = [{"at_s": 5, "rate_gbps": 1}, {"at_s": 10, "rtt_ms": 4}, {"at_s": 12, "down": True}]
    spec = parse_link({"rate_gbps": 2, "sine": {**sine, "rate_gbps": 8}, "schedule": schedule})
    found = [
        (t.at_s, round(t.shape.forward.rate_bps / 1e9, 3), t.shape.rtt_s, t.shape.forward.down)
        for t in spec.timeline()
    ]
    assert found == [
        (0.0, 2.0, 0.0, False),
        (5.0, 1.0, 0.0, False),
        (10.0, 10.828, 0.004, False),
        (11.0, 10.828, 0.004, False),
        (12.0, 10.828, 0.004, True),
    ]
    assert spec.scaled(2, 10).timeline()[3].at_s == 1.1
    assert spec.scaled(2, 10).timeline()[3].shape.forward.rate_bps == pytest.approx(5.414e9, 1e-3)


def test_scaled_divides_rates_and_durations() -> None:
    spec = LinkSpec(rate_gbps=100, rtt_ms=40, jitter_ms=4, queue_bytes=10_000_000).scaled(50, 2)
    shape = spec.initial()
    assert (
        shape.forward.rate_bps,
        shape.forward.delay_s,
        shape.forward.jitter_s,
        shape.forward.queue_bytes,
    ) == (2e9, 0.010, 0.002, 100_000)
    stepped = parse_link({"rate_gbps": 10, "schedule": [{"at_s": 8, "rate_gbps": 4}]}).scaled(2, 4)
    assert [(timed.at_s, timed.shape.forward.rate_bps) for timed in stepped.timeline()] == [
        (0.0, 5e9),
        (2.0, 2e9),
    ]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rate": 1}, "link.rate: Extra inputs are not permitted (found 1)"),
        ({"rate_gbps": -1}, "link.rate_gbps: Input should be greater than 0 (found -1)"),
        ({"preset": "moon"}, "link.preset: Input should be 'vpc-100g', "),
        (
            {"loss": {"model": "independent", "probability": 2}},
            "link.loss.probability: Input should be less than 1 (found 2)",
        ),
        (
            {"schedule": [{"at_s": 3}, {"at_s": 1}]},
            "link: schedule is not in order of at_s",
        ),
        ({"schedule": [{"at_s": 3, "rtt": 1}]}, "link.schedule.0.rtt: Extra inputs"),
        ({"queue_ms": 1, "queue_bytes": 1}, "link: queue_ms and queue_bytes are both given"),
        (
            {"bundle_segments": 4, "loss": {"model": "independent", "probability": 0.1}},
            "link: bundle_segments above 1 would lose whole bundles",
        ),
        ({"rtt_ms": 1, "reverse": {"delay_ms": 2}}, "link: reverse.delay_ms 2.0 exceeds rtt_ms 1"),
    ],
)
def test_errors_name_the_field(table: dict, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_link(table)
    assert str(caught.value).startswith(message)


def test_every_field_is_documented() -> None:
    for name, field in LinkSpec.model_fields.items():
        assert field.description, name
