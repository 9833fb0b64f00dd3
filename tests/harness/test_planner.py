from __future__ import annotations

import importlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.cli.main import main
from harness.experiment import load_experiment
from harness.planner import (
    Deployment,
    LinkModel,
    Reading,
    Shape,
    Split,
    arrival_cv,
    best_threshold,
    capacity,
    deployment_of,
    erlang_c,
    highest_rate,
    loaded_ttft,
    paper,
    plan_configuration,
    search,
    threshold_curves,
    threshold_grid,
    unloaded_ttft,
)
from harness.planner.charts import DECODE, LOCAL, REMOTE, _figure, text_chart
from harness.planner.cost import (
    Operation,
    Prices,
    break_even_egress_per_gb,
    break_even_remote_per_hour,
    cost_per_request,
)
from harness.planner.link import IDEAL_LINK, delivery_s
from harness.planner.paper import Row, reproduce
from harness.planner.queueing import pool_queue
from harness.planner.search import _Stages, best_capacity, best_split, split_points
from harness.profiles import DecodeStep, load_profile
from workloads.lengths import Empirical, Fixed, TruncatedLogNormal

PAPER = Deployment(
    TruncatedLogNormal(), 1024, load_profile("1t-h20"), load_profile("1t-h200"), LinkModel(100)
)
PUBLISHED, WORK = Reading.PUBLISHED, Reading.WORK


def test_published_reading_finds_the_papers_optimum():
    best, _ = search(PAPER, 4, 8, PUBLISHED)
    assert best.threshold_tokens == 19_400
    assert best.split == Split(4, 3, 5)
    assert best.prfaas_per_s == pytest.approx(1.614, abs=5e-4)
    assert best.prefill_per_s == pytest.approx(1.640, abs=5e-4)
    assert best.decode_per_s == 3.90625
    assert best.requests_per_s == pytest.approx(3.252, abs=5e-4)
    assert best.offloaded_share == pytest.approx(0.4957, abs=5e-5)
    assert best.egress_gbps == pytest.approx(12.39, abs=0.01)


def test_work_reading_finds_what_a_queue_sustains():
    best, _ = search(PAPER, 4, 8, WORK)
    assert (best.threshold_tokens, best.split) == (19_600, Split(4, 3, 5))
    assert best.requests_per_s == pytest.approx(3.1955, abs=5e-4)
    at_papers_t = capacity(PAPER, Shape.THRESHOLD, Split(4, 3, 5), 19_400, WORK)
    assert at_papers_t.requests_per_s == pytest.approx(3.187, abs=5e-4)


@pytest.mark.parametrize(
    ("shape", "split", "published", "work"),
    [
        (Shape.HOMOGENEOUS, Split(0, 9, 3), 2.110, 2.0305),
        (Shape.NAIVE, Split(4, 0, 8), 2.4704, 2.3903),
        (Shape.BALANCED, Split(4, 3, 5), 3.1737, 3.0671),
        (Shape.BALANCED, Split(4, 4, 4), 3.125, 3.125),
    ],
)
def test_the_other_configurations(shape, split, published, work):
    rates = [capacity(PAPER, shape, split, None, reading).requests_per_s for reading in Reading]
    assert rates == pytest.approx([published, work], abs=5e-4)


def test_every_promised_published_cell_holds():
    rows = reproduce()
    assert [row.cell for row in rows if row.verdict == "off"] == []
    promised = [row for row in rows if row.table == "Table 6" and row.limit is not None]
    assert len(promised) == 21
    assert len([row for row in rows if row.table == "Table 3"]) == 24


#: What the paper prints, and what is promised of ours: a share of it, or of sizes 0.1 MiB.
PRINTED = {
    ("Table 5", "S_kv"): ([190.8, 308.9, 701.3, 2316.3], 0.1),
    ("Table 5", "T_prefill"): ([0.44, 0.72, 1.84, 7.40], None),
    ("Table 5", "Phi_kv"): ([3.61, 3.59, 3.19, 2.62], None),
    ("512 H200", "egress"): ([3.84, 2.13, 0.166, 0.093], 0.01),
    ("Table 3", "Phi_kv kimi-linear-48b"): ([1.19, 2.29, 3.87, 4.88], 0.01),
    ("Table 3", "Phi_kv mimo-v2-flash"): ([0.82, 2.85, 4.66, 4.71], 0.01),
    ("Table 3", "Phi_kv qwen3.5-397b"): ([4.13, 6.28, 8.25, 7.47], 0.01),
    ("Table 3", "Phi_kv ring-2.5-1t"): ([7.27, 4.47, 2.59, 1.46], 0.01),
    ("Table 3", "Phi_kv minimax-m2.5"): ([4.94, 32.87, 59.93, 47.82], 0.01),
    ("Table 3", "Phi_kv qwen3-235b"): ([4.12, 22.42, 33.35, 21.50], 0.01),
    ("Table 6", "threshold t"): ([19_400], 0.0),
    ("Table 6", "PrfaaS N_p"): ([3], 0.0),
    ("Table 6", "PrfaaS N_d"): ([5], 0.0),
    ("Table 6", "PrfaaS TTFT"): ([2.22, 3.51], 0.04),
    ("Table 6", "homogeneous TTFT"): ([4.44, 9.73], 0.04),
    ("Table 6", "naive TTFT"): ([1.74, 3.51], 0.04),
    ("Table 6", "PrfaaS Theta"): ([1.61, 1.64, 3.91], 0.01),
    ("Table 6", "homogeneous Theta"): ([2.11, 2.35], 0.01),
    ("Table 6", "naive Theta"): ([2.45, 6.25], 0.01),
    ("Table 6", "PrfaaS Lambda_max"): ([3.24], 0.01),
    ("Table 6", "homogeneous Lambda_max"): ([2.11], 0.01),
    ("Table 6", "naive Lambda_max"): ([2.45], 0.01),
    ("Table 6", "PrfaaS ratio"): ([1.54], 0.01),
    ("Table 6", "naive ratio"): ([1.16], 0.01),
    ("Text", "offloaded requests"): ([49.6], 0.01),
    ("Text", "mean egress"): ([13], None),
}


def test_the_cells_are_those_that_the_paper_prints():
    rows = reproduce()
    seen = 0
    for (table, cell), (values, limit) in PRINTED.items():
        found = [row for row in rows if row.table == table and row.cell.startswith(cell)]
        assert [row.paper for row in found] == values, cell
        assert {row.limit for row in found} == {limit}, cell
        assert {row.absolute for row in found} == {cell == "S_kv"}, cell
        seen += len(found)
    assert seen == len(rows) == 63


def test_a_cell_outside_its_limit_is_off():
    share = {"table": "", "cell": "", "unit": "", "paper": 2.0}
    assert [Row(**share, ours=ours, limit=0.01).verdict for ours in (1.99, 2.01, 2.03, 1.97)] == [
        "ok",
        "ok",
        "off",
        "off",
    ]
    assert Row(**share, ours=2.05, limit=0.1, absolute=True).verdict == "ok"
    assert Row(**share, ours=2.15, limit=0.1, absolute=True).verdict == "off"
    assert Row(**share, ours=99.0).verdict == ""


def test_a_cell_that_is_off_is_told_by_the_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(paper, "TTFT_LIMIT", 0.03)
    assert main(["plan", "paper"]) == 7
    shown = [line for line in capsys.readouterr().out.splitlines() if " off " in line]
    assert [line.split()[1:3] for line in shown] == [
        ["TTFT", "P90"],
        ["TTFT", "mean"],
        ["TTFT", "P90"],
    ]


def test_zero_queue_ttft_of_table_6():
    best, _ = search(PAPER, 4, 8, PUBLISHED)
    naive = capacity(PAPER, Shape.NAIVE, Split(4, 0, 8), None, PUBLISHED)
    homogeneous = capacity(PAPER, Shape.HOMOGENEOUS, Split(0, 9, 3), None, PUBLISHED)
    found = [unloaded_ttft(row.stages, PAPER.lengths) for row in (best, homogeneous, naive)]
    assert [row.mean_s for row in found] == pytest.approx([2.181, 4.432, 1.673], abs=1e-3)
    assert [row.p90_s for row in found] == pytest.approx([3.381, 9.687, 3.381], abs=1e-3)


def test_ttft_quantiles_agree_with_sampling():
    best, _ = search(PAPER, 4, 8, WORK)
    lengths = PAPER.lengths.sample(np.random.default_rng(1), 400_000)
    remote = lengths > best.threshold_tokens
    seconds = np.where(
        remote, PAPER.remote.prefill_array_s(lengths), PAPER.local.prefill_array_s(lengths)
    )
    found = unloaded_ttft(best.stages, PAPER.lengths)
    sampled = np.quantile(seconds, [0.5, 0.9, 0.99])
    assert [found.p50_s, found.p90_s, found.p99_s] == pytest.approx(sampled, rel=0.01)
    assert found.mean_s == pytest.approx(seconds.mean(), rel=0.01)


def test_a_scarce_link_raises_the_threshold_and_binds():
    scarce = replace(PAPER, link=LinkModel(5))
    free = replace(PAPER, link=LinkModel(None))
    tight, _ = search(scarce, 4, 8, WORK)
    loose, _ = search(free, 4, 8, WORK)
    assert loose.requests_per_s == pytest.approx(3.1955, abs=5e-4)
    assert tight.requests_per_s < loose.requests_per_s
    assert tight.threshold_tokens > loose.threshold_tokens
    assert tight.egress_share <= 1 + 1e-9
    assert loose.egress_share is None
    naive = capacity(scarce, Shape.NAIVE, Split(4, 0, 8), None, WORK)
    assert naive.bottleneck == "link"
    assert naive.egress_gbps == pytest.approx(5)


@settings(max_examples=15, deadline=None)
@given(
    st.one_of(
        st.builds(Empirical, st.lists(st.integers(64, 60_000), min_size=2, max_size=60)),
        st.builds(
            TruncatedLogNormal, st.floats(7, 11), st.floats(0.4, 1.4), st.just(128), st.just(65_536)
        ),
    ),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(list(Reading)),
    st.sampled_from([None, 2.0, 100.0]),
)
@example(Empirical([2001, 2201]), 1, 1, Reading.PUBLISHED, None)
def test_the_search_finds_the_best_of_the_whole_grid(lengths, n_prfaas, n_prefill, reading, rate):
    deployment = replace(PAPER, lengths=lengths, link=LinkModel(rate))
    stages = _Stages(deployment, reading)
    found = best_threshold(deployment, n_prfaas, n_prefill, reading, 200, stages)
    grid = threshold_grid(deployment, 200)
    best = max(stages.prefill_rate(t, n_prfaas, n_prefill) for t in grid)
    assert stages.prefill_rate(found, n_prfaas, n_prefill) >= best * (1 - 1e-12)


@pytest.mark.parametrize("reading", Reading)
@pytest.mark.parametrize(
    ("rate_gbps", "output_tokens", "n_prefill"),
    # Plenty; a link that binds; decode that takes all local instances, and most of them.
    [(100, 1024, 3), (5, 1024, 5), (100, 4096, 0), (8, 3000, 1)],
)
def test_the_search_is_of_both_dimensions(rate_gbps, output_tokens, n_prefill, reading):
    deployment = replace(PAPER, link=LinkModel(rate_gbps), output_tokens=output_tokens)
    found, splits = search(deployment, 4, 8, reading, 1400)
    best = max(
        capacity(
            deployment, Shape.THRESHOLD, Split(4, local, 8 - local), threshold, reading
        ).requests_per_s
        for local in range(8)
        for threshold in range(0, 132_000, 1400)
    )
    assert found.requests_per_s == pytest.approx(best, rel=1e-12)
    assert found.split.n_prefill == n_prefill
    assert [point.split.n_prefill for point in splits] == list(range(8))


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.builds(Empirical, st.lists(st.integers(64, 60_000), min_size=2, max_size=30)),
        st.builds(
            TruncatedLogNormal, st.floats(7, 11), st.floats(0.4, 1.4), st.just(128), st.just(65_536)
        ),
        st.builds(Fixed, st.integers(64, 60_000)),
    ),
    st.integers(0, 30),
    st.integers(2, 60),
    st.sampled_from(list(Reading)),
    st.sampled_from([None, 0.5, 5.0, 100.0]),
    st.sampled_from([16.0, 1024.0, 20_000.0]),
    st.sampled_from([40.0, 1e6]),
)
@example(Fixed(10_000), 3, 40, WORK, 5.0, 16.0, 40.0)
@example(TruncatedLogNormal(), 3, 60, WORK, 0.5, 16.0, 40.0)
@example(TruncatedLogNormal(), 30, 2, PUBLISHED, None, 20_000.0, 1e6)
def test_the_crossing_is_the_best_of_all_splits(
    lengths, n_prfaas, n_local, reading, rate, output_tokens, tokens_per_s
):
    deployment = replace(
        PAPER,
        lengths=lengths,
        link=LinkModel(rate),
        output_tokens=output_tokens,
        slo_tokens_per_s=tokens_per_s,
    )
    best, points = search(deployment, n_prfaas, n_local, reading, 2000) if n_prfaas else (None, ())
    if n_prfaas:
        assert best_capacity(deployment, n_prfaas, n_local, reading, 2000) == best
        assert split_points(deployment, n_prfaas, n_local, reading, 2000) == points
    for shape in (Shape.HOMOGENEOUS, Shape.BALANCED, *([Shape.NAIVE] if n_prfaas else [])):
        found = best_split(deployment, shape, n_prfaas, n_local, reading)
        numbers = range(0 if n_prfaas else 1, n_local)
        every = [Split(n_prfaas, local, n_local - local) for local in numbers]
        assert found == max(
            every,
            key=lambda split: capacity(deployment, shape, split, None, reading).requests_per_s,
        )


def test_a_hundred_thousand_instances_are_planned_by_few_splits(monkeypatch):
    asked = []
    search_module = importlib.import_module("harness.planner.search")
    looked_at = search_module.best_threshold
    monkeypatch.setattr(
        search_module, "best_threshold", lambda *given: asked.append(given[2]) or looked_at(*given)
    )
    found = best_capacity(PAPER, 50_000, 100_000)
    assert len(asked) < 60
    points = split_points(PAPER, 50_000, 100_000, WORK, 100, 50)
    assert len(points) == 50
    near = found.split.n_prefill
    others = [
        capacity(PAPER, Shape.THRESHOLD, Split(50_000, n, 100_000 - n), found.threshold_tokens)
        for n in (near - 1, near + 1)
    ]
    assert found.requests_per_s > max(other.requests_per_s for other in (*points, *others))


def test_the_search_looks_at_few_points_of_any_range():
    paper = TruncatedLogNormal()
    for lengths, most in (
        (replace(paper, max_tokens=2**31 - 1), 2_000),
        (replace(paper, sigma=1e-3, max_tokens=2**31 - 1), 100),
        (Empirical([100, 20_000, 2**31 - 1]), 4),
    ):
        stages = _Stages(replace(PAPER, lengths=lengths), PUBLISHED)
        found = best_threshold(stages._deployment, 4, 3, PUBLISHED, 1, stages)
        assert len(stages._known) <= most
        near = max(stages.prefill_rate(t, 4, 3) for t in range(0, 200_000, 50))
        assert stages.prefill_rate(found, 4, 3) >= near


def test_the_best_split_of_shapes_without_a_threshold():
    assert best_split(PAPER, Shape.HOMOGENEOUS, 0, 12, PUBLISHED) == Split(0, 9, 3)
    assert best_split(PAPER, Shape.BALANCED, 4, 8, WORK) == Split(4, 4, 4)


def test_a_narrow_distribution_is_split_inside_it():
    narrow = replace(PAPER, lengths=TruncatedLogNormal(9.9, 0.01))
    stages = _Stages(narrow, PUBLISHED)
    found = best_threshold(narrow, 4, 3, PUBLISHED, 10, stages)
    assert stages.prefill_rate(found, 4, 3) == max(
        stages.prefill_rate(t, 4, 3) for t in threshold_grid(narrow, 10)
    )


@settings(max_examples=30, deadline=None)
@given(st.floats(500, 100_000), st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_capacity_is_bounded_by_every_stage_and_work_is_never_more(t, n_prfaas, n_p, n_d):
    split = Split(n_prfaas, n_p, n_d)
    work = capacity(PAPER, Shape.THRESHOLD, split, t, WORK)
    published = capacity(PAPER, Shape.THRESHOLD, split, t, PUBLISHED)
    assert work.requests_per_s <= published.requests_per_s + 1e-12
    for result in (work, published):
        p = result.offloaded_share
        assert result.requests_per_s * p <= result.prfaas_per_s * (1 + 1e-12)
        assert result.requests_per_s * (1 - p) <= result.prefill_per_s * (1 + 1e-12)
        assert result.requests_per_s <= result.decode_per_s


def test_fig_5_crosses_at_the_optimum():
    points = threshold_curves(PAPER, Split(4, 3, 5), [19_300, 19_400, 19_500], PUBLISHED)
    gaps = [point.prfaas_per_s - point.prefill_per_s for point in points]
    assert gaps[0] < 0 < gaps[2]
    assert max(points, key=lambda point: point.requests_per_s).threshold_tokens == 19_400


@pytest.mark.parametrize("lengths", [PAPER.lengths, Fixed(1)], ids=["paper", "one token"])
@pytest.mark.parametrize("thresholds", [[1], [100, 20_000]], ids=["one", "two"])
@pytest.mark.parametrize("n_prefill", [0, 3])
def test_the_text_chart_draws_what_has_one_point_or_no_rate(n_prefill, thresholds, lengths):
    deployment = replace(PAPER, lengths=lengths)
    points = threshold_curves(deployment, Split(4, n_prefill, 5), thresholds)
    chart = text_chart(points)
    assert f"{thresholds[0]:,}" in chart
    assert ("r" in chart.split("+--")[0]) == (lengths is PAPER.lengths)


def test_the_chart_draws_each_curve_under_its_name():
    points = threshold_curves(PAPER, Split(4, 3, 5), [15_000, 19_400, 25_000], PUBLISHED)
    _, splits = search(PAPER, 4, 8, PUBLISHED, 1000)
    thresholds, by_split = _figure(points, splits, "Fig 5").to_dict()["hconcat"]
    drawn = {
        (row["curve"], row["x"]): row["rate"] for row in thresholds["layer"][0]["data"]["values"]
    }
    assert [drawn[REMOTE, x] for x in (15_000, 25_000)] == pytest.approx([2.982, 3.659], abs=5e-4)
    assert [drawn[LOCAL, x] for x in (15_000, 25_000)] == pytest.approx([4.731, 2.344], abs=5e-4)
    assert drawn[REMOTE, 19_400] == pytest.approx(drawn[LOCAL, 19_400], rel=2e-3)
    assert drawn[DECODE, 19_400] == pytest.approx(3.90625)
    assert len(by_split["data"]["values"]) == 2 * 8


def test_the_text_chart_marks_where_the_curves_meet():
    points = threshold_curves(PAPER, Split(4, 3, 5), range(1000, 60_000, 1000), PUBLISHED)
    chart = text_chart(points, width=60, height=12)
    rows = [line[8:] for line in chart.splitlines()[:12]]
    remote = [line.index("r") for line in rows if "r" in line]
    local = [line.index("l") for line in rows if "l" in line]
    assert remote == sorted(remote, reverse=True)  # rises to the right
    assert local == sorted(local)  # falls to the right
    assert chart.splitlines()[0].split()[0] == f"{2 * max(p.requests_per_s for p in points):.2f}"


def test_costs_count_instances_and_egress():
    deployment = replace(
        PAPER,
        remote=replace(PAPER.remote, price_per_hour=40.0),
        prices=Prices(local_per_hour=20.0, egress_per_gb=0.02),
    )
    result = capacity(deployment, Shape.NAIVE, Split(4, 0, 8), None, WORK)
    egress_gb_per_hour = result.egress_gbps / 8 * 3600
    assert result.cost_per_hour == pytest.approx(4 * 40 + 8 * 20 + 0.02 * egress_gb_per_hour)
    assert result.cost_per_request == pytest.approx(
        result.cost_per_hour / result.requests_per_s / 3600
    )
    assert capacity(PAPER, Shape.NAIVE, Split(4, 0, 8)).cost_per_hour is None


def test_prices_of_profiles_hold_where_none_is_given():
    local = replace(PAPER.local, price_per_hour=20.0)
    remote = replace(PAPER.remote, price_per_hour=40.0)
    deployment = replace(PAPER, local=local, remote=remote)
    naive = capacity(deployment, Shape.NAIVE, Split(4, 0, 8))
    assert naive.cost_per_hour == pytest.approx(4 * 40 + 8 * 20)
    given = replace(deployment, prices=Prices(10.0, 5.0))
    assert capacity(given, Shape.NAIVE, Split(4, 0, 8)).cost_per_hour == pytest.approx(80.0)


def test_break_even_prices():
    homogeneous = Operation(0, 12, 2.0)
    prfaas = Operation(4, 8, 3.0, gb_per_request=0.5)
    prices = Prices(None, 20.0, 0.02)
    # Homogeneous: 240 an hour over 2/s. At 3/s that is 360; 160 local, 5,400 GB x 0.02 = 108.
    assert break_even_remote_per_hour(prfaas, homogeneous, prices) == pytest.approx(23.0)
    priced = Prices(23.0, 20.0, 0.02)
    same = cost_per_request(homogeneous, priced)
    assert cost_per_request(prfaas, priced) == pytest.approx(same)
    assert break_even_egress_per_gb(prfaas, homogeneous, priced) == pytest.approx(0.02)
    assert cost_per_request(prfaas, prices) is None
    assert break_even_egress_per_gb(homogeneous, homogeneous, priced) is None


def test_decode_batch_keeps_the_slo():
    local = replace(PAPER.local, decode=DecodeStep(0.010, 0.00075))
    rates = []
    for tokens_per_s in (40, 50, 80, 120):
        deployment = replace(PAPER, local=local, slo_tokens_per_s=tokens_per_s)
        rates.append(capacity(deployment, Shape.NAIVE, Split(40, 0, 1)).decode_per_s)
    # batch 20 of 25 ms, 13 of 19.75 ms, 3 of 12.25 ms, none
    expected = [20 / 0.025, 13 / 0.01975, 3 / 0.01225, 0.0]
    assert rates == pytest.approx([rate / 1024 for rate in expected])


def test_decode_counts_the_mean_context_of_a_batch():
    # 10,000 tokens in and on average half of 2,000 out: 11,000 a sequence, 1.1 ms of each step.
    local = replace(PAPER.local, decode=DecodeStep(0.005, 0.0, 1e-7))
    deployment = replace(
        PAPER, lengths=Fixed(10_000), output_tokens=2000, local=local, slo_tokens_per_s=40
    )
    # 18 sequences step in 24.8 ms, 19 in 25.9 ms.
    result = capacity(deployment, Shape.NAIVE, Split(40, 0, 1))
    assert result.decode_per_s == pytest.approx(18 / (0.0248 * 2000))
    tolerant = replace(deployment, slo_tolerance=0.04)
    result = capacity(tolerant, Shape.NAIVE, Split(40, 0, 1))
    assert result.decode_per_s == pytest.approx(19 / (0.0259 * 2000))


def test_delivery_overlaps_layers():
    profile = PAPER.remote
    tokens = np.array([32_000.0])
    prefill_s = profile.prefill_s(32_000)
    gbit = profile.kv_bytes(32_000) * 8e-9
    fast = delivery_s(profile, LinkModel(100, rtt_s=0.05), tokens)[0]
    assert fast == pytest.approx(prefill_s + gbit / 100 / 57 + 0.025)
    slow = delivery_s(profile, LinkModel(1), tokens)[0]
    assert slow == pytest.approx(prefill_s / 57 + gbit)
    # 4 MiB windows at 80 ms: 0.42 Gbit/s a connection, of which four are used
    link = LinkModel(100, 0.08, 4 * 2**20, 4)
    assert link.transfer_gbps() == pytest.approx(4 * 4 * 2**20 * 8e-9 / 0.08)
    assert delivery_s(profile, IDEAL_LINK, tokens)[0] == prefill_s


def test_zero_queue_ttft_of_a_remote_prefill_counts_the_link():
    one_length = replace(PAPER, lengths=Fixed(32_000))
    stages = capacity(one_length, Shape.NAIVE, Split(4, 0, 8)).stages
    found = unloaded_ttft(stages, one_length.lengths, LinkModel(1, rtt_s=0.5))
    # A layer of 57 computes in 1.8349 s / 57; 701.25 MiB cross at 1 Gbit/s; half the RTT.
    expected = 1.8349 / 57 + 701.25 * 2**20 * 8e-9 + 0.25
    assert [found.mean_s, found.p90_s] == pytest.approx([expected, expected], abs=1e-3)
    stages = capacity(one_length, Shape.HOMOGENEOUS, Split(0, 9, 3)).stages
    local = unloaded_ttft(stages, one_length.lengths, LinkModel(1, rtt_s=0.5))
    assert local == unloaded_ttft(stages, one_length.lengths)


def test_erlang_c_literals():
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(5, 4.0) == pytest.approx(0.5541, abs=5e-5)
    assert erlang_c(3, 3.0) == 1.0


def test_queue_is_exact_for_m_g_1_and_m_m_k():
    # M/D/1 at 0.8: W = rho / (2 (1 - rho)) service times = 2
    assert pool_queue(1, 0.8, 1.0, 0.0, 1.0).mean_wait_s == pytest.approx(2.0)
    # M/M/2 at 0.5 each: W = C / (k mu - lambda) = (1/3) / 1
    assert pool_queue(2, 1.0, 1.0, 1.0, 1.0).mean_wait_s == pytest.approx(1 / 3)
    assert math.isinf(pool_queue(2, 2.0, 1.0, 1.0, 1.0).mean_wait_s)


def test_loaded_ttft_rises_with_load_and_bursts_and_meets_the_unloaded_at_none():
    best, _ = search(PAPER, 4, 8, WORK)
    free = replace(PAPER, link=IDEAL_LINK)
    unloaded = unloaded_ttft(best.stages, PAPER.lengths)
    still = loaded_ttft(free, best, 1e-6)
    assert still.mean_s == pytest.approx(unloaded.mean_s, rel=1e-3)
    assert still.p90_s == pytest.approx(unloaded.p90_s, rel=2e-3)
    rate = best.requests_per_s
    p90 = [loaded_ttft(free, best, share * rate).p90_s for share in (0.3, 0.6, 0.8, 0.95)]
    assert p90 == sorted(p90)
    # The notes' own estimate at 0.8: mean 3.4, P90 6.0; with a gamma CV of 3, P90 19.
    assert loaded_ttft(free, best, 0.8 * rate).mean_s == pytest.approx(3.4, rel=0.05)
    assert p90[2] == pytest.approx(6.0, rel=0.05)
    assert loaded_ttft(free, best, 0.8 * rate, arrival_cv=3).p90_s == pytest.approx(19, rel=0.15)
    assert math.isinf(loaded_ttft(free, best, 1.01 * rate).mean_s)


def test_a_length_blind_pool_waits_in_one_queue():
    # With equal devices in both clusters and no link it is a homogeneous pool of as many.
    alike = replace(PAPER, remote=PAPER.local, link=IDEAL_LINK)
    blind = capacity(alike, Shape.BALANCED, Split(4, 3, 5))
    pool = capacity(alike, Shape.HOMOGENEOUS, Split(0, 7, 5))
    assert blind.requests_per_s == pytest.approx(pool.requests_per_s)
    rate = 0.8 * pool.requests_per_s
    expected = loaded_ttft(alike, pool, rate)
    found = loaded_ttft(alike, blind, rate)
    assert found.mean_s == pytest.approx(expected.mean_s)
    assert found.p90_s == pytest.approx(expected.p90_s, rel=1e-4)


def test_loaded_ttft_is_unbounded_where_link_or_decode_cannot_follow():
    scarce = replace(PAPER, link=LinkModel(5))
    naive = capacity(scarce, Shape.NAIVE, Split(4, 0, 8))
    assert naive.bottleneck == "link"
    assert math.isfinite(loaded_ttft(scarce, naive, 0.99 * naive.requests_per_s).mean_s)
    assert math.isinf(loaded_ttft(scarce, naive, 1.01 * naive.requests_per_s).mean_s)
    slow = capacity(PAPER, Shape.NAIVE, Split(4, 0, 2))
    assert slow.bottleneck == "decode"
    assert math.isinf(loaded_ttft(PAPER, slow, 1.01 * slow.requests_per_s).mean_s)


def test_highest_rate_meets_its_bound():
    best, _ = search(PAPER, 4, 8, WORK)
    rate = highest_rate(PAPER, best, 10.0)
    assert 0 < rate < best.requests_per_s
    assert loaded_ttft(PAPER, best, rate).p90_s <= 10.0
    assert highest_rate(PAPER, best, 0.1) == 0.0


def test_one_length_gives_one_stage():
    deployment = replace(PAPER, lengths=Fixed(10_000))
    for threshold, used in ((9_999, "prfaas"), (10_000, "pd")):
        result = capacity(deployment, Shape.THRESHOLD, Split(4, 3, 5), threshold)
        assert [stage.cluster for stage in result.stages] == [used]


def test_of_equal_thresholds_the_least_is_taken():
    deployment = replace(PAPER, lengths=Fixed(10_000))
    assert best_threshold(deployment, 8, 1) == 0
    assert best_threshold(deployment, 1, 8) == 10_000


def test_the_preset_is_the_case_study():
    experiment = load_experiment("paper")
    deployment = deployment_of(experiment)
    assert deployment.link == LinkModel(100.0, 0.0005)
    assert deployment_of(experiment, bounded=False).link == LinkModel(None, 0.0005)
    rates = [
        plan_configuration(deployment, row).requests_per_s for row in experiment.configurations
    ]
    assert rates == pytest.approx([2.0305, 2.3903, 3.0671, 3.1955], abs=5e-4)


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        ({"process": "poisson"}, 1.0),
        ({"process": "constant"}, 0.0),
        ({"process": "gamma", "burstiness": 0.25}, 2.0),
    ],
)
def test_the_variation_of_arrivals_is_that_of_their_gaps(arrivals, cv):
    settings = {f"arrivals.{key}": value for key, value in arrivals.items()}
    assert arrival_cv(load_experiment("paper", settings)) == pytest.approx(cv)


def test_a_trace_is_planned_by_what_its_prefixes_leave_to_compute(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 100, "hash_ids": [1, 2]},
        {"timestamp": 9, "input_length": 1536, "output_length": 300, "hash_ids": [1, 2, 3]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    deployment = deployment_of(load_experiment("mooncake", {"workload.path": str(path)}))
    assert deployment.lengths.mean() == (1024 + 512) / 2
    assert deployment.output_tokens == 200


def test_plan_paper_prints_and_writes_charts(capsys, tmp_path):
    html, png = tmp_path / "fig5.html", tmp_path / "fig5.png"
    assert main(["plan", "paper", "--chart", str(html), "--chart", str(png)]) == 0
    shown = capsys.readouterr().out
    assert "19,400" in shown and "Theta_pd_p" in shown
    assert png.read_bytes().startswith(b"\x89PNG")
    text = html.read_text()
    assert "vega" in text and 'src="http' not in text


def test_plan_json_is_valid_for_an_override(capsys):
    assert main(["plan", "bench", "--set", "link.rate_gbps=5", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["link"]["rate_gbps"] == 5
    assert plan["search"]["bounded"]["threshold_tokens"] > 19_600
    assert plan["search"]["unbounded"]["threshold_tokens"] == 19_600
    assert plan["search"]["unbounded"]["requests_per_s"] == pytest.approx(3.1955, abs=5e-4)
    assert plan["configurations"][0]["name"] == "homogeneous"


@pytest.mark.parametrize(("reading", "threshold"), [("published", 19_400), ("work", 19_600)])
def test_the_search_is_of_the_reading_that_is_asked_for(reading, threshold, capsys):
    assert main(["plan", "paper", "--reading", reading, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert found["reading"] == reading
    for link in ("bounded", "unbounded"):
        assert found[link]["threshold_tokens"] == threshold
        assert found[link]["split"] == {"n_prfaas": 4, "n_prefill": 3, "n_decode": 5}


def test_an_slo_that_no_batch_keeps_is_planned_as_no_capacity(capsys):
    assert main(["plan", "bench", "--set", "slo.tokens_per_s=80"]) == 0
    assert "decode" in capsys.readouterr().out


def test_plan_for_a_trace_with_prices(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 1000 + 397 * i, "output_length": 100 + i}
        for i in range(100)
    ]
    path.write_text(
        "".join(
            json.dumps(
                {**row, "hash_ids": list(range(i * 100, i * 100 + -(-row["input_length"] // 512)))}
            )
            + "\n"
            for i, row in enumerate(rows)
        )
    )
    options = ["plan", "--trace", str(path), "--price-remote", "40", "--price-local", "20"]
    assert main([*options, "--price-egress", "0.05", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["mean_output_tokens"] == 149.5
    assert all(row["work"]["cost_per_request"] > 0 for row in plan["configurations"])


@pytest.mark.parametrize(
    ("tokens", "n_local"), [([1], "8"), (range(300, 90_000, 300), "1")], ids=["1 token", "1 local"]
)
def test_plan_for_one_token_and_for_one_local_instance(tokens, n_local, capsys, tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:46.6805900,{length},44" for length in tokens]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    assert main(["plan", "--trace", str(path), "--n-local", n_local]) == 0
    assert "requests/s at which remote" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "give an experiment"),
        (["plan", "paper", "--chart", "x.gif"], "needs a name that ends in"),
        (["plan", "paper", "--chart", "no-such-folder/x.svg"], "there is no folder"),
        (["plan", "paper", "--load", "2"], "--load 2: must lie between 0 and 1"),
        (["plan", "--trace", "/nowhere"], "no such file"),
        (["plan", "--trace", "/"], "--trace /: not a file"),
        (["plan", "--trace", "/nowhere", "--n-local", "1000000000"], "at most 100,000"),
        (["plan", "--trace", "/nowhere", "--n-remote", "1000000000"], "at most 100,000"),
        (["plan", "paper", "--set", "profiles.pd=1t-h200"], "local cluster must decode"),
        (["plan", "--trace", "/nowhere", "--set", "a=1"], "--set changes an experiment"),
    ],
)
def test_plan_refuses_in_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_a_prefix_cache_whole_prompts_are_planned():
    cached, whole = (
        deployment_of(load_experiment("documents", {"cache.enabled": enabled})).lengths.mean()
        for enabled in (True, False)
    )
    assert whole > 1.5 * cached


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("policy=foo", "policy 'foo' is unknown"),
        ("parameters.bad=1", "parameter 'bad' is unknown"),
        ("parameters.foresight=true", "foresight needs workload kind 'drift'"),
    ],
)
def test_what_a_run_would_refuse_is_not_planned(field, message, capsys):
    policy = ["--set", "configurations.prfaas.policy=prfaas"]
    assert main(["plan", "paper", *policy, "--set", f"configurations.prfaas.{field}"]) == 2
    assert message in capsys.readouterr().err


def test_tenants_share_no_planned_prefixes():
    shared, apart = (
        deployment_of(load_experiment("documents", {"workload.tenants": tenants})).lengths.mean()
        for tenants in ({"a": 1.0}, dict.fromkeys("abcdefgh", 1.0))
    )
    assert apart > 1.3 * shared
