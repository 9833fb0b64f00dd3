"""Comparison: verdicts on repeats, limits, and what the sentences say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.cli.main import main
from results import compare, noise, statistics, summary
from results.compare import CompareError, Side, Verdict
from results.figures import Better
from results.summary import ConfigurationSummary, Latency, Measured, PhaseSummary, RunSummary

KEY = ("prfaas", "latency", "ttft_p90")


def side(values: list[float], label: str = "x", seeds: tuple[int, ...] = ()) -> Side:
    return Side(label, {KEY: tuple(values)}, len(values), seeds)


def only(base: list[float], candidate: list[float], least: float = 0.02) -> compare.Line:
    return compare.compare(side(base), side(candidate), least)[0]


BASE = [3.50, 3.52, 3.49, 3.51, 3.48]


def test_a_clear_slowdown_of_five_against_five_runs() -> None:
    line = only(BASE, [value * 1.05 for value in BASE])
    assert line.verdict is Verdict.REGRESSION
    assert line.effect.ratio == pytest.approx(1.05)
    assert line.effect.p == pytest.approx(2 / 252)  # all 25 pairs: 2 / C(10, 5)
    assert line.effect.low is not None and 1.04 < line.effect.low < 1.05
    assert "prfaas latency ttft_p90 is worse by +5.00 %" in compare.sentence(line)
    assert "3.5 -> 3.675 s" in compare.sentence(line)
    assert "5 against 5 runs" in compare.sentence(line)


def test_better_same_small_and_undecided() -> None:
    assert only(BASE, [value * 0.9 for value in BASE]).verdict is Verdict.IMPROVEMENT
    assert only(BASE, BASE[::-1]).verdict is Verdict.SAME
    assert only(BASE, [value * 1.03 for value in BASE], 0.05).verdict is Verdict.SMALL
    assert only([3.5], [4.5]).verdict is Verdict.UNDECIDED
    # Three a side can never reach p = 0.05, however far apart.
    assert only([1.0, 1.1, 1.2], [9.0, 9.1, 9.2]).verdict is Verdict.UNDECIDED
    assert "five a side" in compare.sentence(only([3.5], [4.5]))


def test_higher_is_better_for_capacity() -> None:
    key = ("prfaas", "", "capacity")
    a = Side("a", {key: (3.2, 3.21, 3.19, 3.2, 3.22)}, 5)
    b = Side("b", {key: (3.0, 3.01, 2.99, 3.0, 3.02)}, 5)
    assert compare.compare(a, b)[0].verdict is Verdict.REGRESSION
    assert compare.compare(b, a)[0].verdict is Verdict.IMPROVEMENT


def test_equal_seeds_in_virtual_time_are_compared_exactly() -> None:
    one = compare.compare(side([3.0], seeds=(7,)), side([3.1], seeds=(7,)))[0]
    assert one.verdict is Verdict.REGRESSION
    assert "compared exactly" in compare.sentence(one)
    same = compare.compare(side([3.0], seeds=(7,)), side([3.0], seeds=(7,)))[0]
    assert same.verdict is Verdict.SAME
    other_seed = compare.compare(side([3.0], seeds=(7,)), side([3.1], seeds=(8,)))[0]
    assert other_seed.verdict is Verdict.UNDECIDED


def test_limits() -> None:
    anywhere = compare.parse_limit("ttft_p90:5%")
    assert anywhere == compare.Limit("ttft_p90", 0.05)
    exact = compare.parse_limit("prfaas/latency/ttft_p90:0.5%")
    assert exact == compare.Limit("ttft_p90", 0.005, "prfaas", "latency")
    assert anywhere.matches(KEY) and exact.matches(KEY)
    assert not exact.matches(("naive", "latency", "ttft_p90"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft_p90", "write metric:percent"),
        ("nonsense:5%", "no metric 'nonsense'"),
        ("ttft_p90:5", "no percentage"),
        ("ttft_p90:x%", "no percentage"),
        ("offloaded_share:5%", "neither direction"),
        ("a/b/c/d:5%", "write metric:percent"),
    ],
)
def test_bad_limits_are_said(text: str, says: str) -> None:
    with pytest.raises(CompareError, match=says):
        compare.parse_limit(text)


def test_a_failure_is_both_significant_and_large() -> None:
    limit = [compare.parse_limit("ttft_p90:5%")]

    def failed(candidate: list[float]) -> bool:
        return bool(compare.failures(compare.compare(side(BASE), side(candidate)), limit))

    assert failed([value * 1.06 for value in BASE])
    assert not failed([value * 1.04 for value in BASE])  # significant, not large
    assert not failed([3.5, 5.9, 3.4, 3.5, 3.4])  # large in the mean, not significant
    assert not failed([value * 0.9 for value in BASE])


def test_bootstrap_interval_covers() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for seed in range(200):
        a, b = rng.normal(10, 0.3, 8), rng.normal(10.5, 0.3, 8)
        low, high = statistics.bootstrap_ratio(list(a), list(b), resamples=500, seed=seed)
        covered += low <= 1.05 <= high
    # Percentile intervals of eight runs cover a little less than they say.
    assert 0.86 <= covered / 200 <= 0.99


def test_trimmed_pairs() -> None:
    clear = statistics.trimmed_pairs([0.05, 0.06, 0.04, 0.05, 0.055, 0.045])
    assert clear.shift == pytest.approx(0.05)
    assert clear.p < 1e-3
    with_a_wild_pair = statistics.trimmed_pairs([0.05, 0.06, 0.04, 0.05, 0.055, -0.9])
    assert with_a_wild_pair.shift == pytest.approx(0.04875)
    assert with_a_wild_pair.p < 0.01
    assert statistics.trimmed_pairs([0.01, -0.01, 0.02, -0.02]).p == pytest.approx(0.5)
    assert statistics.trimmed_pairs([0.0] * 4).p == 1.0
    with pytest.raises(ValueError, match="needs 4"):
        statistics.trimmed_pairs([0.1] * 3)


def test_noise_floor() -> None:
    found = noise.floors(side([10.0, 10.1, 9.9, 10.0, 10.0]))[KEY]
    assert found.mean == pytest.approx(10.0)
    assert found.variation == pytest.approx(0.00707, abs=1e-5)
    assert found.spread == pytest.approx(0.0202, abs=1e-4)
    assert found.detectable == pytest.approx(3.24 * 0.00707 * (2 / 5) ** 0.5, rel=1e-3)
    with pytest.raises(CompareError, match="at least three"):
        noise.floors(side([1.0, 2.0]))


def write_run(
    directory: Path, p90: float, mode: str = "emulate", seed: int = 1, verdict: str = "ok"
) -> None:
    directory.mkdir(parents=True)
    phase = PhaseSummary("latency", ttft=Latency(p90=Measured(p90, p90)))
    configurations = (ConfigurationSummary("prfaas", phases=(phase,)),)
    run = RunSummary("bench", mode, configurations, seed=seed, verdict=verdict)
    (directory / "summary.json").write_text(summary.to_json(run))
    (directory / "run.json").write_text('{"name": "bench"}')
    (directory / "experiment.toml").write_text(f'mode = "{mode}"')


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, value in enumerate(BASE):
        write_run(tmp_path / "a" / f"bench-{i}", value)
        write_run(tmp_path / "b" / f"bench-{i}", value * 1.1)
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(arguments) == 0
    assert "is worse by +10.00 %" in capsys.readouterr().out
    assert main([*arguments, "--fail-on", "ttft_p90:5%"]) == 7
    assert "FAILED prfaas/latency/ttft_p90: +10.00 %" in capsys.readouterr().out
    assert main([*arguments, "--fail-on", "ttft_p90:15%"]) == 0
    for mistake in ("oops:15%", "prfas/latency/ttft_p90:5%", "prfaas/latncy/ttft_p90:5%", ""):
        assert main([*arguments, "--fail-on", mistake]) == 2
    assert main([*arguments, "--fail-on", "goodput:5%"]) == 2
    assert "'goodput:5%': no such figure in both; they have figures of prfaas/latency" in (
        capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main([*arguments, "--min-effect", "nan"])
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["verdict"] == "regression"
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert "none: no such directory" in capsys.readouterr().err
    assert main(["noise", str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["figure"] == "prfaas/latency/ttft_p90"


def test_single_runs_of_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", 3.0, "simulate")
    write_run(tmp_path / "b", 3.3, "simulate")
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main([*arguments, "--fail-on", "ttft_p90:5%"]) == 7
    assert "compared exactly" in capsys.readouterr().out


def test_a_limit_that_nothing_can_break_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", 3.0)
    write_run(tmp_path / "b", 9.0, verdict="interrupted")
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main([*arguments, "--fail-on", "ttft_p90:5%"]) == 0
    said = capsys.readouterr()
    assert "warning: --fail-on 'ttft_p90:5%': not judged, too few runs to tell" in said.err
    assert "warning: b: interrupted" in said.err
    assert "1 of 1 figures: too few runs to tell" in said.out


def test_settings_that_cannot_be_read_are_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", 3.0, "simulate")
    write_run(tmp_path / "b", 3.0, "simulate")
    (tmp_path / "b" / "experiment.toml").write_text("[")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == "note: what b was asked to do cannot be read\n"


def test_which_direction_is_better() -> None:
    assert compare.judge(statistics.Effect(1.1, 1.05, 1.15, 0.01), Better.NEITHER, 0.02) is (
        Verdict.CHANGED
    )


def test_what_the_experiments_differ_in_is_said() -> None:
    settings = {"mode": "simulate", "link.rate_gbps": 100}
    same = Side("a", {KEY: (1.0, 1.1)}, 2, settings=(settings, settings))
    other = Side("b", {KEY: (1.0,)}, 1, settings=({**settings, "link.rate_gbps": 10},))
    mixed = Side("c", {KEY: (1.0, 1.1)}, 2, settings=(*other.settings, settings))
    assert compare.notices(same, same) == []
    assert compare.notices(same, other) == [
        "note: the experiments differ in link.rate_gbps 100 -> 10"
    ]
    assert compare.notices(mixed, other) == [
        "note: the runs of c are no repeats of one experiment; they differ in link.rate_gbps"
    ]
    wide = Side("d", {KEY: (1.0,)}, 1, settings=({f"k{at}": at for at in range(9)},))
    assert "and 5 more" in compare.notices(wide, other)[0]
