from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.cli.main import main
from harness.errors import BadInput
from harness.experiment import load_experiment, presets
from harness.profiles import profile_paths
from harness.sweep import identity as identity_module
from harness.sweep.evaluate import COLUMNS, evaluate
from harness.sweep.execute import execute
from harness.sweep.identity import identity
from harness.sweep.study import (
    AxisSpec,
    Study,
    is_experiment,
    load_study,
    parse_axis,
    points,
    studies,
)

#: A few simulated minutes instead of hours.
SHORT = {
    "measure.capacity_warmup_s": 60,
    "measure.capacity_window_s": 120,
    "measure.latency_warmup_s": 30,
    "measure.latency_window_s": 120,
    "measure.load_fractions": [],
    "measure.unloaded": False,
    "measure.slo_search": False,
}


BEST_LOADED = ("best", "latency")


def study_of(*axes: AxisSpec, **more: object) -> Study:
    return Study.model_validate(
        {"name": "test", "base": "paper", "set": SHORT, "axis": axes, **more}
    )


RATES = AxisSpec(key="link.rate_gbps", values=(5, 100))
THRESHOLDS = AxisSpec(key="configurations.prfaas.threshold_tokens", values=(10_000, 20_000, 30_000))


def test_points_are_the_product_with_the_last_axis_fastest():
    made = points(study_of(RATES, THRESHOLDS))
    assert [point.index for point in made] == list(range(6))
    assert [tuple(value for _, value in point.settings) for point in made] == [
        (5, 10_000),
        (5, 20_000),
        (5, 30_000),
        (100, 10_000),
        (100, 20_000),
        (100, 30_000),
    ]
    last = made[-1].experiment
    assert last.link.rate_gbps == 100
    assert last.configurations[-1].threshold_tokens == 30_000


def test_a_zip_varies_keys_together():
    axis = parse_axis("profiles.prfaas,profiles.pd=1t-h200:1t-h20,ring-2.5-1t-h200:ring-2.5-1t-h20")
    made = points(study_of(axis))
    pairs = [(point.experiment.profiles.prfaas, point.experiment.profiles.pd) for point in made]
    assert pairs == [("1t-h200", "1t-h20"), ("ring-2.5-1t-h200", "ring-2.5-1t-h20")]


def test_axis_values_are_toml_or_bare_strings():
    assert parse_axis("a.b=1,2.5,true,inf,word").values == (1, 2.5, True, float("inf"), "word")


@pytest.mark.parametrize("text", ["a.b", "a.b=", "=1,2", "a,b=1,2:3"])
def test_a_bad_axis_says_what_would_do(text):
    with pytest.raises(BadInput, match="--axis"):
        parse_axis(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": [AxisSpec(key="price.gold", values=(1,))]}, "price.gold: unknown; there are"),
        ({"axis": [AxisSpec(key="tcp.window_mib", values=(0,))]}, "needs a number above 0"),
        ({"axis": [AxisSpec(key="price.local_per_hour", values=("x",))]}, "needs a number"),
        ({"axis": [AxisSpec(key="link.colour", values=(1,))]}, "link.colour: unknown key"),
        ({"configurations": ("nope",)}, "no 'nope' in paper"),
        ({"axis": [AxisSpec(key="tcp.connections", values=(1.5,))]}, "needs a whole number"),
        ({"axis": [AxisSpec(key="workload.stratified", values=(True, 1))]}, "all booleans"),
        ({"base": "mooncake", "set": {}, "axis": [AxisSpec(key="seed", values=(1, 2))]}, "trace"),
        (
            {"axis": [AxisSpec(key="configurations.prfaas.policy", values=("prfaas", "foo"))]},
            "policy 'foo' is unknown",
        ),
        (
            {"axis": [AxisSpec(key="configurations.prfaas.parameters.bad", values=(1, 2))]},
            "policy prfaas-static: parameter 'bad' is unknown",
        ),
        (
            {"axis": [AxisSpec(key="configurations.balanced.threshold_tokens", values=(1, 2))]},
            "configurations.balanced.threshold_tokens: found 1, but policy balanced has none",
        ),
        ({"set": {"measure.flow_rates": True}}, "a sweep writes no table of flows"),
        ({"axis": [AxisSpec(key="profiles.pd", values=("1t-h20", "1t-h200"))]}, "must decode"),
    ],
)
def test_an_impossible_point_is_refused_before_anything_runs(change, message, tmp_path):
    study = study_of(RATES).model_copy(update=change)
    with pytest.raises(BadInput, match=message):
        execute(study, tmp_path / "sweep", jobs=1)
    assert not list(tmp_path.iterdir())


def test_dotted_keys_without_quotes_are_set_field_by_field(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        """
name = "s"
[set]
link.rtt_ms = 80
price.local_per_hour = 3
workload = { kind = "fixed", input_tokens = 1000, output_tokens = 10 }
[[axis]]
key = "seed"
values = [1]
"""
    )
    study = load_study(str(path))
    assert study.set["link.rtt_ms"] == 80 and study.set["price.local_per_hour"] == 3
    (point,) = points(study)
    base = load_experiment("paper")
    assert point.experiment.link == base.link.model_copy(update={"rtt_ms": 80.0})
    assert point.experiment.workload.kind == "fixed"


FILE = """
name = "s"
base = "paper"
[set]
"slo.ttft_s" = 5
"price.local_per_hour" = 3
[[axis]]
key = "link.rate_gbps"
values = [1, 2]
"""


@pytest.mark.parametrize(
    ("change", "arguments", "where"),
    [
        (("= 5", "= -1"), [], "FILE: [set]: slo.ttft_s: must be greater than 0 (found -1)"),
        (("= 5", "= -1"), ["--set", "slo.ttft_s=-2"], "on the command line: slo.ttft_s: must"),
        (("= 5", "= -1"), ["--axis", "slo.ttft_s=-2,1"], "on the command line: slo.ttft_s: must"),
        (("= 5", "= -1"), ["--axis", "seed=1,2"], "FILE: [set]: slo.ttft_s: must"),
        (("= 3", "= 'x'"), [], "FILE: [set]: price.local_per_hour: found 'x', needs a number"),
        (("local_per", "gold_per"), [], "FILE: [set]: price.gold_per_hour: unknown; there are"),
        (("slo.ttft_s", "slo.ttft"), [], "FILE: [set]: slo.ttft: unknown key"),
        (("slo.ttft_s", "seed.ttft"), [], "FILE: [set]: seed.ttft: seed is a value"),
        (("[1, 2]", "[1, -2]"), [], "FILE: [[axis]]: link.rate_gbps: must be greater than 0"),
        (("[1, 2]", "[-1]"), ["--set", "link.rate_gbps=5"], "FILE: [[axis]]: link.rate_gbps: m"),
        (("[1, 2]", "[-1]"), ["--axis", "link.rate_gbps=-5"], "on the command line: link.rate_"),
        (("[1, 2]", "[1]"), ["--set", "tcp.connections=0"], "on the command line: tcp.connecti"),
    ],
)
def test_a_fault_is_blamed_on_what_gave_the_field(change, arguments, where, tmp_path, capsys):
    path = tmp_path / "s.toml"
    path.write_text(FILE.replace(*change))
    assert main(["sweep", str(path), "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"prfaas sweep: {where.replace('FILE', str(path))}")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", sorted(studies()))
def test_shipped_studies_are_valid_experiments(name):
    study = load_study(name)
    assert study.name == name
    made = points(study)
    assert len(made) >= 5
    assert set(study.show) <= set(COLUMNS)


def test_plan_rows_follow_the_model():
    point = points(study_of(RATES))[1]
    rows = {(row.configuration, row.phase): row for row in evaluate(point, best=True)}
    assert rows["prfaas", "capacity"].capacity_per_s == pytest.approx(3.187, abs=1e-3)
    assert rows["best", "capacity"].capacity_per_s == pytest.approx(3.1955, abs=1e-3)
    assert rows["best", "capacity"].threshold_tokens == 19_600
    assert rows["homogeneous", "latency"].offered_per_s == pytest.approx(0.8 * 2.0305, abs=1e-3)
    assert rows["naive", "latency"].offloaded_share == 1.0
    assert rows["homogeneous", "capacity"].cost_per_hour is None


def test_planned_and_simulated_tpot_are_of_the_same_batch():
    # 15 ms + 0.5 ms a sequence, of which there are 12 to 13 at 0.8 of capacity, and 20 at most.
    axis = AxisSpec(key="profiles.pd", values=("1t-h20-step15",))
    settings = {**SHORT, "measure.latency_warmup_s": 300, "measure.latency_window_s": 1800}
    of_modes = []
    for mode in ("plan", "simulate"):
        study = study_of(axis, configurations=("homogeneous",), mode=mode)
        [point] = points(study.model_copy(update={"set": settings}))
        of_modes.append({row.phase: row.tpot_p90_s for row in evaluate(point, best=False)})
    planned, simulated = of_modes
    assert planned["latency"] == pytest.approx(0.02145, abs=1e-4)
    assert simulated["latency"] == pytest.approx(planned["latency"], rel=0.06)


@pytest.mark.parametrize(
    ("base", "key", "values"),
    [
        ("queues", "configurations.fifo.queue.discipline", ("fifo", "shortest-first")),
        ("documents", "cache.enabled", (False, True)),
    ],
)
def test_a_simulated_sweep_has_the_queues_and_caches_of_its_experiment(base, key, values):
    name = "fifo" if base == "queues" else "prfaas"
    axis = AxisSpec(key=key, values=values)
    study = Study(name="s", base=base, mode="simulate", configurations=(name,), axis=(axis,))
    settings = {**SHORT, "measure.latency_window_s": 600}
    without, having = (
        next(row for row in evaluate(point, best=False) if row.phase == "latency")
        for point in points(study.model_copy(update={"set": settings}))
    )
    assert having.ttft_mean_s < 0.9 * without.ttft_mean_s


@pytest.mark.parametrize("mode", ["plan", "simulate"])
def test_figures_are_the_same_whichever_mode_the_file_names(mode):
    axis = AxisSpec(key="seed", values=(1,))
    rows = []
    for named in ("simulate", "emulate"):
        study = Study(name="s", base="bench", mode=mode, axis=(axis,), configurations=("naive",))
        (point,) = points(study.model_copy(update={"set": {**SHORT, "mode": named}}))
        rows.append(evaluate(point, best=False))
    assert rows[0] == rows[1]


def test_the_best_has_the_queue_of_the_configuration_it_is_searched_from():
    axis = AxisSpec(key="seed", values=(1,))
    study = Study(
        name="s",
        base="documents",
        mode="simulate",
        axis=(axis,),
        configurations=("shortest-first",),
    )
    load = {**SHORT, "measure.latency_window_s": 600, "cache.enabled": False}
    fifo = {"configurations.shortest-first.queue.discipline": "fifo"}
    waits = []
    for settings in (load, {**load, **fifo}):
        (point,) = points(study.model_copy(update={"set": settings}))
        rows = evaluate(point, best=True)
        waits += [row.ttft_mean_s for row in rows if (row.configuration, row.phase) == BEST_LOADED]
    assert waits[0] < 0.9 * waits[1]


def test_a_planned_rate_past_capacity_yields_capacity():
    study = study_of(RATES, configurations=("homogeneous",))
    study = study.model_copy(update={"set": {**SHORT, "measure.request_rate": 5.0}})
    row = next(row for row in evaluate(points(study)[1], best=False) if row.phase == "latency")
    assert row.offered_per_s == 5.0
    assert row.throughput_per_s == row.capacity_per_s == pytest.approx(2.0305, abs=1e-3)


def test_prices_give_costs_and_break_evens():
    own = {"price.remote_per_hour": 32.0, "price.local_per_hour": 16.0, "price.egress_per_gb": 0.01}
    study = study_of(RATES).model_copy(update={"set": {**SHORT, **own}})
    rows = {row.configuration: row for row in evaluate(points(study)[1], best=False)}
    assert rows["homogeneous"].cost_per_hour == 192.0
    assert rows["homogeneous"].break_even_remote_per_hour is None
    # The one without remote instances is what others are held against, wherever it stands.
    last = study.model_copy(update={"configurations": ("prfaas", "naive", "homogeneous")})
    moved = {row.configuration: row for row in evaluate(points(last)[1], best=False)}
    assert all(moved[name] == rows[name] for name in ("prfaas", "naive", "homogeneous"))
    prfaas = rows["prfaas"]
    assert prfaas.cost_per_hour == pytest.approx(4 * 32 + 8 * 16 + 54.6, abs=0.2)
    # At its own break-even price PrfaaS costs what homogeneous does.
    even = {**own, "price.remote_per_hour": prfaas.break_even_remote_per_hour}
    study = study_of(RATES).model_copy(update={"set": {**SHORT, **even}})
    rows = {row.configuration: row for row in evaluate(points(study)[1], best=False)}
    assert rows["prfaas"].cost_per_request == pytest.approx(rows["homogeneous"].cost_per_request)


def test_the_best_has_the_most_instances_of_any_configuration():
    fewer = AxisSpec(key="configurations.naive.n_prfaas", values=(2,))
    [point] = points(study_of(fewer, configurations=("homogeneous", "naive", "prfaas")))
    best = next(row for row in evaluate(point, best=True) if row.configuration == "best")
    assert (best.n_prfaas, best.n_prefill, best.n_decode) == (4, 3, 5)


def test_a_simulated_decode_batch_is_the_largest_that_keeps_the_slo():
    # 5 ms + 1 ms a sequence: 7 sequences at 80 tokens/s, of the profile's 20.
    axes = (
        AxisSpec(key="profiles.pd", values=("1t-h20-step5",)),
        AxisSpec(key="slo.tokens_per_s", values=(80,)),
    )
    study = study_of(*axes, configurations=("homogeneous",), mode="simulate")
    more = {"measure.slo_search": True, "measure.capacity_window_s": 300}
    study = study.model_copy(update={"set": {**SHORT, **more}})
    full, common = evaluate(points(study)[0], best=False)
    assert full.decode_batch == 7
    assert full.throughput_per_s == pytest.approx(3 * 7 / (0.012 * 1024), rel=0.05)
    assert 0.010 < full.tpot_p90_s <= 0.0125
    assert 0 < common.goodput <= 1
    assert 0 < common.slo_rate_per_s < full.capacity_per_s * 1.05


def test_an_slo_that_no_batch_keeps_has_no_capacity_in_both_modes():
    axes = (
        AxisSpec(key="profiles.pd", values=("1t-h20-step15",)),
        AxisSpec(key="slo.tokens_per_s", values=(80,)),
    )
    for mode in ("plan", "simulate"):
        rows = evaluate(points(study_of(*axes, mode=mode))[0], best=False)
        assert {row.capacity_per_s for row in rows} == {0.0}
        assert {row.decode_batch for row in rows} == {0}


def test_a_sweep_resumes_and_gives_equal_bytes(tmp_path):
    study = study_of(RATES, THRESHOLDS, configurations=("prfaas",))
    first = execute(study, tmp_path / "a", jobs=1)
    assert (first.computed, first.resumed) == (6, 0)
    bytes_before = first.dataset.read_bytes()
    parts = sorted((tmp_path / "a" / "points").iterdir())
    assert len(parts) == 6
    parts[0].unlink()
    parts[1].write_text("[{")  # as after a crash of the machine
    parts[2].write_text("{}")
    again = execute(study, tmp_path / "a", jobs=1)
    assert (again.computed, again.resumed) == (3, 3)
    assert again.dataset.read_bytes() == bytes_before
    wider = study_of(
        RATES,
        AxisSpec(key=THRESHOLDS.key, values=(10_000, 40_000)),
        configurations=("prfaas",),
    )
    other = execute(wider, tmp_path / "a", jobs=1)
    assert (other.computed, other.resumed) == (2, 2)


def test_the_identity_of_a_point_is_all_that_its_figures_depend_on():
    point = points(study_of(RATES))[0]
    known = identity(point, False)
    assert identity(replace(point, index=7, settings=()), False) == known
    changes = [
        (replace(point, mode="simulate"), False),
        (replace(point, own=(("tcp.window_mib", 4.0),)), False),
        (replace(point, own=(("tcp.window_mib", 8.0),)), False),
        (points(study_of(RATES))[1], False),
        (points(study_of(RATES, configurations=("naive",)))[0], False),
        (point, True),
    ]
    assert len({known, *(identity(*change) for change in changes)}) == 1 + len(changes)


def test_a_changed_trace_is_computed_anew(tmp_path):
    trace = tmp_path / "trace.jsonl"
    point = points(study_of(RATES, base="mooncake", set={"workload.path": str(trace)}))[0]
    names = set()
    for text in ("before", "after"):
        trace.write_text(text, encoding="utf-8")
        identity_module._file.cache_clear()
        names.add(identity(point, False))
    assert len(names) == 2


def test_a_point_runs_no_code_that_its_identity_leaves_out(tmp_path):
    script = """
import sys
from pathlib import Path
from harness.sweep.evaluate import evaluate
from harness.sweep.study import AxisSpec, Study, points
axis = AxisSpec(key="link.rate_gbps", values=(100,))
study = Study(name="s", base="paper", mode="simulate", axis=(axis,), set={
    "measure.capacity_warmup_s": 30, "measure.capacity_window_s": 60,
    "measure.latency_window_s": 60, "measure.load_fractions": [],
    "measure.unloaded": False, "measure.slo_search": False})
evaluate(points(study)[0], best=True)
root = Path(sys.argv[1])
files = [Path(module.__file__) for module in list(sys.modules.values())
         if getattr(module, "__file__", None)]
print(*sorted({file.relative_to(root).parts[0] for file in files
               if root in file.parents and "site-packages" not in file.parts}))
"""
    root = str(Path(identity_module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script, root],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"harness", "engine", "workloads"} <= set(done.stdout.split())
    assert set(done.stdout.split()) <= set(identity_module._PACKAGES)


@pytest.mark.parametrize("file", ["deep/module.py", "deep/_module.c", "deep/data.toml"])
def test_changed_code_or_data_is_another_identity(file, tmp_path, monkeypatch):
    monkeypatch.setattr(identity_module, "_PACKAGES", ("package",))
    monkeypatch.setattr(identity_module.resources, "files", lambda package: tmp_path)
    changed = tmp_path / file
    changed.parent.mkdir()
    digests = set()
    for text in ("before", "after"):
        changed.write_text(text, encoding="utf-8")
        digests.add(identity_module._code.__wrapped__())
    assert len(digests) == 2


def test_a_changed_profile_is_computed_anew(tmp_path):
    source = profile_paths()["1t-h200"].read_text(encoding="utf-8")
    profile = tmp_path / "device.toml"
    profile.write_text(source, encoding="utf-8")
    study = study_of(
        AxisSpec(key="profiles.prfaas", values=(str(profile),)), configurations=("naive",)
    )
    before = execute(study, tmp_path / "out", jobs=1)
    profile.write_text(source.replace("0.383401", "0.5"), encoding="utf-8")
    after = execute(study, tmp_path / "out", jobs=1)
    assert (after.computed, after.resumed) == (1, 0)
    assert after.records[0]["capacity_per_s"] < before.records[0]["capacity_per_s"]


def test_simulated_rows_have_the_same_columns_and_agree_with_the_plan(tmp_path):
    study = study_of(
        AxisSpec(key="link.rtt_ms", values=(1, 80)),
        configurations=("naive",),
        mode="simulate",
    )
    study = study.model_copy(update={"set": {**SHORT, "tcp.window_mib": 4}})
    outcome = execute(study, tmp_path, jobs=2)
    table = pq.read_table(outcome.dataset)
    assert table.column_names == ["study", "mode", "point", "link.rtt_ms", *COLUMNS]
    assert table["point"].to_pylist() == [0, 0, 1, 1]
    assert table["phase"].to_pylist() == ["capacity", "latency"] * 2
    # No threshold, no search for a rate, no prices; all else is measured.
    assert {name for name in COLUMNS if table[name].null_count} == {
        "threshold_tokens",
        "slo_rate_per_s",
        "cost_per_hour",
        "cost_per_request",
        "break_even_remote_per_hour",
        "break_even_egress_per_gb",
    }
    assert table["throughput_per_s"][0].as_py() == pytest.approx(2.39, rel=0.15)
    near, far = table["ttft_mean_s"][1].as_py(), table["ttft_mean_s"][3].as_py()
    # 4 x 4 MiB windows at 80 ms carry 1.7 Gbit/s: slower than the 3.2 Gbit/s that prefill makes.
    assert far > near + 0.5
    again = execute(study, tmp_path / "again", jobs=1)
    assert again.dataset.read_bytes() == outcome.dataset.read_bytes()


def test_connections_multiply_a_window():
    axis = AxisSpec(key="tcp.connections", values=(1, 16))
    study = study_of(axis, configurations=("naive",), mode="simulate")
    far = {"link.rtt_ms": 80, "tcp.window_mib": 4}
    study = study.model_copy(update={"set": {**SHORT, **far}})
    one, many = (
        next(row for row in evaluate(point, best=False) if row.phase == "latency")
        for point in points(study)
    )
    # 0.42 Gbit/s carry a mean cache of 5.4 Gbit in 13 s; 6.7 Gbit/s are more than prefill makes.
    assert many.ttft_mean_s < 3 < 12 < one.ttft_mean_s


def test_the_command_prints_writes_and_goes_on(tmp_path, capsys):
    arguments = ["sweep", "paper", "--axis", "link.rate_gbps=5,100", "--only", "prfaas"]
    arguments += ["--set", "measure.load_fractions=[]", "--set", "measure.unloaded=false"]
    arguments += ["--set", "measure.slo_search=false", "--jobs", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "computed 2 points, took 0 as done" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["link.rate_gbps"] for row in rows] == [5, 5, 100, 100]
    assert main(["sweep", "--list"]) == 0
    assert "rtt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep"], "give a study"),
        (["sweep", "paper"], "name what varies"),
        (["sweep", "nope"], "no such study or file"),
        (["sweep", "rtt", "--jobs", "0"], "--jobs 0"),
        (["sweep", "rtt", "--axis", "seed=1", "--axis", "seed=2"], "can vary once only"),
        (["sweep", "paper", "--axis", "seed,seed=1:2"], "can vary once only"),
        (["sweep", "paper", "--axis", "mode=emulate"], "mode cannot vary"),
        (["sweep", "paper", "--axis", "seed=1", "--set", "link.rate=1"], "link.rate: unknown key"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_file_of_any_name_is_swept(tmp_path, capsys):
    path = tmp_path / "my experiment (2).toml"
    path.write_text((presets()["bench"]).read_text())
    arguments = ["sweep", str(path), "--axis", "seed=1", "--out", str(tmp_path / "out"), "--json"]
    assert main(arguments) == 0
    assert {row["study"] for row in json.loads(capsys.readouterr().out)} == {"my-experiment-2-"}


def test_files_of_both_kinds_are_told_apart(tmp_path):
    study, experiment = tmp_path / "study.toml", tmp_path / "experiment.toml"
    study.write_text('name = "s"\n[[axis]]\nkey = "seed"\nvalues = [1, 2]\n')
    experiment.write_text('name = "e"\n')
    assert not is_experiment(str(study))
    assert is_experiment(str(experiment))
    assert is_experiment("paper") and not is_experiment("rtt")
    assert load_study(str(study)).axis[0].values == (1, 2)
