"""Experiments are refused with one line that names file and field."""

from pathlib import Path

import pytest

from harness.errors import BadInput
from harness.execution import to_toml
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


def test_an_unknown_key_suggests_a_known_one() -> None:
    with pytest.raises(BadInput, match=r"measure\.overlod: unknown key; did you mean overload"):
        load_experiment("bench", {"measure.overlod": 2})


def test_an_unknown_kind_lists_those_there_are() -> None:
    with pytest.raises(BadInput, match=r"workload.kind: 'x' is unknown \(there are: lognormal"):
        load_experiment("bench", {"workload.kind": "x"})


def test_a_folder_is_not_an_experiment(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a file"):
        load_experiment(str(tmp_path))
