"""Experiments are refused with one line that names file and field."""

from pathlib import Path

import pytest

from harness.cli.main import main
from harness.errors import BadInput
from harness.execution import plan_run, to_toml
from harness.experiment import load_experiment, parse_override, presets


def refuse(tmp_path: Path, text: str) -> str:
    path = tmp_path / "e.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_experiment(str(path))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


MINIMAL = """
name = "x"
[workload]
kind = "fixed"
input_tokens = 1000
[[configurations]]
name = "a"
policy = "homogeneous"
n_prefill = 1
n_decode = 1
"""


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_load_and_survive_their_own_toml(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(experiment))
    assert load_experiment(str(path)) == experiment


def test_minimal_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text(MINIMAL)
    assert load_experiment(str(path)).configurations[0].n_prefill == 1


def test_unknown_key(tmp_path: Path) -> None:
    assert "wrokload: unknown key" in refuse(tmp_path, MINIMAL + "\n[wrokload]\n")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("slo.ttf_s", "slo.ttft_s"),
        ("measure.overlod", "measure.overload"),
        ("rate_gbps", "link.rate_gbps"),
        ("link.queue", "link.queue_ms"),
        ("workload.mue", "workload.mu"),
        ("queue", "configurations.NAME.queue.discipline"),
        ("configurations.prfaas.treshold_tokens", "configurations.prfaas.threshold_tokens"),
        ("configurations.prfaas.queue.dicipline", "configurations.prfaas.queue.discipline"),
    ],
)
def test_an_unknown_key_names_the_whole_key_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_experiment("paper", {key: 1})
    assert str(caught.value).endswith(f"{key}: unknown key; did you mean {meant}?")


@pytest.mark.parametrize(
    "setting",
    [
        "seed=true",
        "slo.ttft_s=true",
        "link.rate_gbps=false",
        "workload.output_tokens=true",
        "workload.tenants={a=true}",
        "measure.load_fractions=[0.5, true]",
        "configurations.prfaas.threshold_tokens=true",
    ],
)
def test_true_is_no_number(setting: str) -> None:
    key, value = parse_override(setting)
    with pytest.raises(BadInput, match=f"{key}: must be a number, not true or false$"):
        load_experiment("paper", {key: value})


def test_booleans_stay_where_they_belong() -> None:
    experiment = load_experiment("paper", {"workload.stratified": False, "measure.unloaded": False})
    assert not experiment.workload.stratified and not experiment.measure.unloaded


def test_a_value_in_place_of_a_table() -> None:
    with pytest.raises(BadInput, match=r"slo: must be a table \(found 3\)$"):
        load_experiment("paper", {"slo": 3})


def test_impossible_value_names_field_and_value(tmp_path: Path) -> None:
    message = refuse(tmp_path, MINIMAL.replace("n_decode = 1", "n_decode = 0"))
    assert "configurations.a.n_decode" in message and "found 0" in message


def test_a_configuration_needs_prefill(tmp_path: Path) -> None:
    message = refuse(tmp_path, MINIMAL.replace("n_prefill = 1", "n_prefill = 0"))
    assert "at least one instance must prefill" in message


def test_names_are_unique(tmp_path: Path) -> None:
    twice = MINIMAL[MINIMAL.index("[[") :]
    assert "names must be unique" in refuse(tmp_path, MINIMAL + twice)


def test_not_toml(tmp_path: Path) -> None:
    assert "not valid TOML" in refuse(tmp_path, "name = ")


def test_missing_file_lists_presets() -> None:
    with pytest.raises(BadInput, match=r"no such preset or file \(presets: .*bench"):
        load_experiment("nowhere.toml")


def test_overrides_reach_nested_tables_and_configurations() -> None:
    experiment = load_experiment(
        "bench", {"link.rate_gbps": 10.0, "configurations.prfaas.threshold_tokens": 5000}
    )
    assert experiment.link.rate_gbps == 10.0
    assert experiment.configurations[-1].threshold_tokens == 5000


def test_an_override_of_an_unknown_configuration_names_those_there_are() -> None:
    with pytest.raises(BadInput, match="there are: homogeneous, naive, balanced, prfaas"):
        load_experiment("bench", {"configurations.best.n_decode": 1})


@pytest.mark.parametrize(
    ("text", "value"), [("a=1", 1), ("a=1.5", 1.5), ("a=true", True), ("a=word", "word")]
)
def test_override_values_are_toml_or_words(text: str, value: object) -> None:
    assert parse_override(text) == ("a", value)


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(BadInput, match="KEY=VALUE"):
        parse_override("nonsense")


def test_a_bad_override_is_blamed_on_the_command_line_not_on_the_file() -> None:
    with pytest.raises(BadInput, match=r"^on the command line: slo.ttft_s: must be greater than 0"):
        load_experiment("bench", {"slo.ttft_s": -1})


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("workload.min_tokens=200000", "workload: min_tokens, max_tokens: found 200000, 131072;"),
        ("workload.max_tokens=128", "workload: min_tokens, max_tokens: found 128, 128;"),
        ("workload.mu=1000", "workload: mu: found 1000.0, which leaves no probability"),
        ("workload.output_tokens={mu=1000}", "workload.output_tokens: mu: found 1000.0, which"),
        ("workload.output_tokens={mu='x'}", "workload.output_tokens.mu: must be a valid number"),
        ("workload={kind='trace'}", "workload.path: Field required"),
        ("workload={}", "workload.kind: Field required"),
        ("configurations.best.n_decode=1", "configurations.best.n_decode: no configuration"),
        ("measure.flow_rates=true", "experiment: measure.flow_rates: only simulate"),
    ],
)
def test_an_override_that_does_not_fit_the_file_is_to_blame(setting: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_experiment("bench", dict([parse_override(setting)]))
    assert str(caught.value).startswith(f"on the command line: {says}")


def test_a_fault_that_the_file_has_alone_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text(MINIMAL.replace("n_prefill = 1", "n_prefill = 0"))
    with pytest.raises(BadInput, match=f"^{path}: configurations.a: n_prfaas"):
        load_experiment(str(path), {"configurations.a.n_decode": 2})
    path.write_text(MINIMAL + "[slo]\nttft_s = -1\n")
    with pytest.raises(BadInput, match=f"^{path}: slo.ttft_s: must"):
        load_experiment(str(path), {"seed": 2})
    with pytest.raises(BadInput, match=r"^on the command line: slo.ttft_s: .* \(found -2\)$"):
        load_experiment(str(path), {"slo.ttft_s": -2})


def test_an_override_that_another_field_of_the_file_does_not_fit_names_both() -> None:
    says = r"bench.toml with what is set on the command line: workload.mu: no key of this kind$"
    with pytest.raises(BadInput, match=says):
        load_experiment("bench", {"workload.kind": "fixed"})


def test_an_override_is_blamed_where_it_was_given() -> None:
    places = {"slo.ttft_s": "s.toml: [set]"}
    with pytest.raises(BadInput, match=r"^s.toml: \[set\]: slo.ttft_s: must be greater"):
        load_experiment("bench", {"slo.ttft_s": -1, "seed": 2}, places)
    with pytest.raises(BadInput, match=r"^s.toml: \[set\]: slo.ttft_s.x: slo.ttft_s is a value"):
        load_experiment("bench", {"slo.ttft_s.x": 1}, {"slo.ttft_s.x": "s.toml: [set]"})


@pytest.mark.parametrize("command", ["run", "plan", "ablate"])
def test_a_mode_that_no_run_has_is_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode, says in (("live", "'emulate'; a deployment there is, is driven"), ("x", "'emulate'")):
        assert main([command, "paper", "--set", f"mode={mode}"]) == 2
        error = capsys.readouterr().err
        assert "on the command line: mode: must be 'simulate' or " + says in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1e300", "1e300", "1e18"])
@pytest.mark.parametrize("preset", ["bench", "paper"])
def test_no_number_is_infinite_or_beyond_all_measure(preset: str, value: str) -> None:
    whole = load_experiment(preset).model_dump(exclude={"configurations", "seed"})
    fields = [
        f"{section}.{name}"
        for section, table in whole.items()
        if isinstance(table, dict)
        for name, found in table.items()
        if isinstance(found, (int, float)) and not isinstance(found, bool)
    ]
    assert len(fields) > 25
    for field in [*fields, "measure.request_rate", "configurations.prfaas.threshold_tokens"]:
        with pytest.raises(BadInput, match=f"^on the command line: {field}: must") as caught:
            load_experiment(preset, dict([parse_override(f"{field}={value}")]))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("workload.max_tokens=1e12", "workload.max_tokens: must be at most 2,147,483,647"),
        ("workload.max_tokens=9223372036854775808", "must be at most 2,147,483,647"),
        ("workload.sigma=1e-300", "workload.sigma: must be greater than or equal to 0.001"),
        ("slo.ttft_s=1e-300", "slo.ttft_s: must be 0 or at least 1e-15"),
        ("slo.tokens_per_s=1e9", "planned capacity is 0 req/s"),
        ("measure.request_rate=1e9", "would offer"),
        ("measure.load_fractions=[0.5, inf]", "measure.load_fractions.1: must be a finite number"),
        ("workload.tenants={a=1e300}", "workload.tenants: a must be at most"),
        ("link.sine={period_s=1e-9, amplitude=0.5, until_s=1e6}", "at most 100,000 would do"),
        ("configurations.prfaas.n_decode=1e8", "less than or equal to 100000"),
    ],
)
def test_a_run_that_cannot_be_planned_is_one_line(
    setting: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "paper", "--dry-run", "--set", setting]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("value", ["inf", "nan", "1e300", "-1"])
@pytest.mark.parametrize("name", ["search_interval_s", "least_samples"])
def test_parameters_of_the_schedulers_are_looked_at_before_a_run(name: str, value: str) -> None:
    given = dict(
        [
            parse_override("configurations.prfaas.policy='prfaas'"),
            parse_override(f"configurations.prfaas.parameters.{name}={value}"),
        ]
    )
    with pytest.raises(BadInput, match=f"{name}: (found|must)|{name} must"):
        plan_run(load_experiment("paper", given))


def test_the_widest_lengths_are_planned_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "bench", "--dry-run", "--set", "workload.max_tokens=2147483647"]) == 0
    assert "# prfaas: latency at" in capsys.readouterr().out


def test_an_unknown_kind_lists_those_there_are() -> None:
    with pytest.raises(BadInput, match=r"workload.kind: 'x' is unknown \(there are: lognormal"):
        load_experiment("bench", {"workload.kind": "x"})


def test_a_folder_is_not_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a file"):
        load_experiment(str(tmp_path))
