from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter
from scipy import stats

from workloads.errors import InputError
from workloads.request import Request
from workloads.spec import (
    ArrivalSpec,
    FixedWorkload,
    LogNormalLengths,
    LogNormalWorkload,
    SessionsWorkload,
    TraceWorkload,
    WorkloadSpec,
    generate,
    length_distribution,
    notes,
    parse_arrivals,
    parse_workload,
)
from workloads.traces.writers import save

POISSON = ArrivalSpec()
KINDS = ["lognormal", "fixed", "sessions", "documents", "drift"]


def made(workload=LogNormalWorkload(), arrivals=POISSON, seed=1, rate=2.0, count=200, **options):
    return list(generate(workload, arrivals, seed, request_rate=rate, count=count, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_ordered_numbered_and_repeatable(kind):
    workload = parse_workload({"kind": kind})
    found = made(workload)
    assert [r.id for r in found] == list(range(200))
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(found))
    assert all(r.input_tokens >= 1 and r.output_tokens >= 1 for r in found)
    assert found == made(workload)
    assert found != made(workload, seed=2)
    assert found[:50] == made(workload, count=50)
    for r in found:
        if r.block_ids:
            assert len(r.block_ids) == -(-r.input_tokens // r.block_tokens)


def test_paper_workload():
    found = made(count=20_000)
    lengths = np.array([r.input_tokens for r in found])
    assert lengths.mean() == pytest.approx(27_486, rel=0.02)
    assert (lengths > 19_400).mean() == pytest.approx(0.4957, abs=0.01)
    assert {r.output_tokens for r in found} == {1024}
    gaps = np.diff([r.arrival_s for r in found])
    assert stats.kstest(gaps, "expon", args=(0, 0.5)).pvalue > 0.01


def test_streams_are_independent():
    """Changing arrivals, outputs or tenants leaves the other draws as they were."""
    plain = made()
    bursty = made(arrivals=ArrivalSpec(process="gamma", burstiness=0.1))
    assert [r.input_tokens for r in plain] == [r.input_tokens for r in bursty]
    assert [r.arrival_s for r in plain] != [r.arrival_s for r in bursty]
    mixed = LogNormalWorkload(output_tokens=LogNormalLengths(mu=5), tenants={"a": 3, "b": 1})
    other = made(mixed)
    assert [(r.input_tokens, r.arrival_s) for r in plain] == [
        (r.input_tokens, r.arrival_s) for r in other
    ]
    fixed = made(FixedWorkload(input_tokens=100))
    assert [r.arrival_s for r in plain] == [r.arrival_s for r in fixed]
    faster = made(rate=4.0)
    assert [r.arrival_s / 2 for r in plain] == pytest.approx([r.arrival_s for r in faster])


def test_tenants_have_their_weights_and_the_class_is_set():
    workload = FixedWorkload(tenants={"a": 3, "b": 1}, slo_class="gold")
    found = made(workload, count=8000)
    assert sum(r.tenant == "a" for r in found) / 8000 == pytest.approx(0.75, abs=0.02)
    assert {r.slo_class for r in found} == {"gold"}


def test_generation_is_lazy():
    endless = generate(LogNormalWorkload(), POISSON, 0, request_rate=1.0)
    assert len(list(islice(endless, 5))) == 5


def test_duration_bounds_and_exact_rate_fits():
    found = list(generate(LogNormalWorkload(), POISSON, 3, request_rate=5.0, duration_s=20.0))
    assert found[-1].arrival_s < 20.0 and len(found) != 100
    exact = ArrivalSpec(exact_rate=True)
    found = list(generate(LogNormalWorkload(), exact, 3, request_rate=5.0, duration_s=20.0))
    assert len(found) == 100


def test_shapes_follow_the_request_rate():
    shape = {"kind": "steps", "steps": [{"duration_s": 10, "factor": f} for f in (0.5, 2)]}
    arrivals = parse_arrivals({"process": "constant", "shape": shape})
    times = [r.arrival_s for r in made(arrivals=arrivals, rate=4.0, count=100)]
    assert sum(t < 10 for t in times) == 20
    assert sum(10 <= t < 20 for t in times) == pytest.approx(80, abs=1)
    for kind in ("on-off", "linear", "exponential", "steady"):
        assert made(arrivals=parse_arrivals({"shape": {"kind": kind}}))


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [
        Request(n, 3.0 * (n // 4), 1024 + n, 10 + n, (0, n // 4 + 1, 100 + n), 512)
        for n in range(1, 40)
    ]
    save(path, rows)
    return str(path)


def test_a_trace_keeps_its_rows_under_an_arrival_process(trace):
    found = made(TraceWorkload(path=trace), count=None)
    assert len(found) == 39
    assert [r.input_tokens for r in found] == [1024 + n for n in range(1, 40)]
    assert [r.arrival_s for r in found] == [r.arrival_s for r in made(count=39)]


def test_trace_times_window_slow_down_and_offset(trace):
    arrivals = ArrivalSpec(process="trace", slow_down=2.0, offset_s=1.0)
    workload = TraceWorkload(path=trace, start_s=3.0, end_s=9.0)
    found = list(generate(workload, arrivals, 0))
    assert [r.arrival_s for r in found] == [1.0] * 4 + [7.0] * 4
    assert found[0].id == 0 and found[0].input_tokens == 1028


def test_dequantising_spreads_each_stamp_over_its_interval_and_says_so(trace):
    arrivals = ArrivalSpec(process="trace", dequantise_s=3.0)
    workload = TraceWorkload(path=trace)
    found = list(generate(workload, arrivals, 7))
    assert [r.input_tokens for r in found] == [1024 + n for n in range(1, 40)]
    assert [int(r.arrival_s // 3) for r in found] == [n // 4 for n in range(1, 40)]
    assert len({r.arrival_s for r in found}) == 39
    assert any("3 s interval" in note for note in notes(workload, arrivals))
    assert notes(LogNormalWorkload(), POISSON) == []


def test_length_distributions(trace):
    assert length_distribution(LogNormalWorkload()).mean() == pytest.approx(27_486, abs=1)
    assert length_distribution(FixedWorkload(input_tokens=5)).mean() == 5
    total = length_distribution(TraceWorkload(path=trace))
    assert total.mean() == pytest.approx(1024 + 20)
    # Of rows 1..39, all but the first of a stamp find two blocks, the first of each stamp one.
    left = length_distribution(TraceWorkload(path=trace), uncached=True)
    expected = 1024 + 20 - (512 * 38 + 512 * 29) / 39
    assert left.mean() == pytest.approx(expected)
    assert length_distribution(TraceWorkload(path=trace, max_input_tokens=1026)).mean() == 1025.5
    with pytest.raises(InputError, match="selects no request"):
        length_distribution(TraceWorkload(path=trace, max_input_tokens=5))


@pytest.mark.parametrize(
    ("workload", "arrivals", "options", "message"),
    [
        (LogNormalWorkload(), POISSON, {}, "request_rate: found None"),
        (LogNormalWorkload(), POISSON, {"request_rate": 0.0}, "request_rate: found 0"),
        (LogNormalWorkload(), ArrivalSpec(process="trace"), {}, "needs a trace's stamps"),
        (
            TraceWorkload(path="x"),
            ArrivalSpec(process="trace"),
            {"request_rate": 1.0},
            "keeps the trace's own times",
        ),
        (LogNormalWorkload(), ArrivalSpec(exact_rate=True), {"request_rate": 1.0}, "a duration"),
        (
            SessionsWorkload(),
            ArrivalSpec(exact_rate=True),
            {"request_rate": 1.0, "count": 5},
            "sessions start at the rate",
        ),
    ],
)
def test_arguments_that_do_not_go_together(workload, arrivals, options, message):
    with pytest.raises(InputError, match=message):
        generate(workload, arrivals, 0, **options)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "lognormal", "sigm": 1}, r"workload\.lognormal\.sigm: unknown key; found 1"),
        ({"kind": "uniform"}, "lognormal.*drift"),
        ({"kind": "lognormal", "sigma": -1}, r"sigma: .*or equal to 0\.001; found -1"),
        ({"kind": "lognormal", "min_tokens": 9, "max_tokens": 8}, "needs 1 <= min_tokens"),
        ({"kind": "trace"}, "path"),
        ({"kind": "sessions", "block_tokens": 1}, "more than 16,384 blocks"),
        ({"kind": "documents", "block_tokens": 1}, "more than 16,384 blocks"),
        ({"kind": "sessions", "warm_s": 1e8}, "warm_s"),
        ({"kind": "drift", "sigma": 1e-3}, "sigma"),
        ({"kind": "documents", "reuse": 1.5}, "reuse"),
        ({"kind": "drift", "mean_to": 200_000}, "below 0.9 max_tokens"),
        ({"kind": "sessions", "system_tokens": 200_000}, "fewer than max_input_tokens"),
    ],
)
def test_bad_workloads_are_named(data, message):
    with pytest.raises(InputError, match=message):
        parse_workload(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"process": "weibull"}, "process"),
        ({"burstiness": 2.0}, "use process 'gamma'"),
        ({"process": "gamma", "burstiness": 1e-9}, "greater than or equal to 0.0001"),
        ({"slow_down": 2.0}, "use process 'trace'"),
        ({"shape": {"kind": "steps", "steps": []}}, "steps"),
        ({"shape": {"kind": "steps", "steps": [{"duration_s": 1, "factor": 0}]}}, "every factor"),
    ],
)
def test_bad_arrivals_are_named(data, message):
    with pytest.raises(InputError, match=message):
        parse_arrivals(data)


def test_every_field_is_described_and_in_the_docs():
    schemas = [TypeAdapter(WorkloadSpec).json_schema(), ArrivalSpec.model_json_schema()]
    models = {"ArrivalSpec": schemas[1]}
    for schema in schemas:
        models.update(schema["$defs"])
    docs = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()
    for name, model in models.items():
        assert model.get("description"), name
        for key, value in model["properties"].items():
            assert key == "kind" or value.get("description"), f"{name}.{key}"
            if name.endswith(("Workload", "Spec")):
                assert f"`{key}`" in docs, f"{name}.{key}"
