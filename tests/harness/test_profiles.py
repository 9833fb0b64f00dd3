from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.profiles import DecodeStep, Origin, ProfileError, load_profile, profile_paths
from harness.profiles.curves import Linear, LogLog, Quadratic
from harness.profiles.layers import LatentAttention, LinearAttention, cache_bytes

MIB = 2**20


def kda(count: int, heads: int, conv_entries: int = 3) -> LinearAttention:
    return LinearAttention(
        kind="linear-attention",
        count=count,
        heads=heads,
        key_dim=128,
        value_dim=128,
        conv_channels=heads * 3 * 128,
        conv_entries=conv_entries,
    )


def mla(count: int) -> LatentAttention:
    return LatentAttention(kind="latent-attention", count=count, latent_dim=576)


@pytest.mark.parametrize(
    ("layers", "fixed_mib", "per_token_kib"),
    [
        ((kda(42, 64), mla(15)), 173.906, 16.875),  # the paper's 1T model
        ((kda(20, 32), mla(7)), 41.41, 7.875),  # Kimi Linear 48B
        ((kda(69, 96, conv_entries=4), mla(24)), 433.4, 27.0),  # Kimi K3
        ((kda(56, 64), mla(8)), 231.9, 9.0),  # a 7:1 model
    ],
)
def test_cache_bytes_follow_from_layer_counts(layers, fixed_mib, per_token_kib):
    fixed, per_token = cache_bytes(layers)
    assert fixed / MIB == pytest.approx(fixed_mib, abs=0.05)
    assert per_token / 1024 == per_token_kib


def test_sizes_agree_with_table_5():
    profile = load_profile("1t-h200")
    sizes = [profile.kv_bytes(tokens) / MIB for tokens in (1024, 8192, 32_000, 130_000)]
    assert sizes == pytest.approx([190.8, 308.9, 701.3, 2316.3], abs=0.1)
    assert profile.n_layers == 57


def test_h200_coefficients_are_the_least_squares_fit_of_the_published_points():
    profile = load_profile("1t-h200")
    fitted = Quadratic.fit(profile.prefill_points)
    assert fitted.constant_s == pytest.approx(0.383401, abs=5e-7)
    assert fitted.linear_s == pytest.approx(4.254469e-5, abs=5e-12)
    assert fitted.square_s == pytest.approx(8.793075e-11, abs=5e-17)


def test_h20_is_the_documented_transform_of_h200():
    h200, h20 = load_profile("1t-h200"), load_profile("1t-h20")
    for tokens in (0, 1024, 27_486, 130_000):
        expected = 0.462492 + 3.077291 * (h200.prefill_s(tokens) - 0.383401)
        assert h20.prefill_s(tokens) == pytest.approx(expected, rel=1e-9)
    points = [h20.prefill_s(tokens) for tokens in (1024, 8192, 32_000, 130_000)]
    assert points == pytest.approx([0.60, 1.55, 4.93, 22.1], rel=0.01)
    assert h20.prefill_s(10_224) == pytest.approx(3 / 1.64, rel=5e-5)
    assert h20.prefill_s(27_486) == pytest.approx(9 / 2.11, rel=5e-5)


def test_h20_decodes_twenty_sequences_in_25_ms():
    profile = load_profile("1t-h20")
    assert profile.max_batch == 20
    assert profile.decode_step_s(20, 500_000) == 0.025
    with pytest.raises(ProfileError, match="1t-h200: decode is not profiled"):
        load_profile("1t-h200").decode_step_s(1, 0)


def test_incremental_prefill_pays_the_fixed_cost_and_the_attention_to_what_is_cached():
    profile = load_profile("1t-h200")
    whole, cached, setup = (profile.prefill_s(tokens) for tokens in (32_000, 20_000, 0))
    assert profile.prefill_s(32_000, 20_000) == pytest.approx(whole - cached + setup)
    # 12,000 tokens after 20,000 cost more than 12,000 alone.
    assert profile.prefill_s(32_000, 20_000) > profile.prefill_s(12_000)


def test_the_fixed_state_always_crosses():
    profile = load_profile("1t-h200")
    assert profile.kv_bytes(1000) - profile.fixed_bytes == 1000 * 17_280
    assert profile.kv_bytes(1000, 960) == profile.fixed_bytes + 40 * 17_280
    assert profile.kv_bytes(1000, 1000) == profile.fixed_bytes == 173.90625 * MIB


@pytest.mark.parametrize("name", sorted(profile_paths()))
def test_shipped_profiles_are_whole(name):
    profile = load_profile(name)
    assert profile.name == name
    assert {"prefill", "cache"} <= profile.provenance.keys()
    assert all(row.note for row in profile.provenance.values())
    for tokens, gbps in profile.published.get("phi_gbps", ()):
        if profile.provenance["prefill"].origin is Origin.DERIVED:
            assert profile.phi_gbps(tokens) == pytest.approx(gbps, rel=1e-5)
    tokens = np.linspace(0, 200_000, 2001)
    seconds = profile.prefill_array_s(tokens)
    assert (np.diff(seconds) > 0).all()
    assert seconds == pytest.approx([profile.prefill_s(value) for value in tokens], rel=1e-12)


def test_h20_variants_keep_the_ratio_of_the_case_study():
    ratio = load_profile("1t-h20"), load_profile("1t-h200")
    for name in ("kimi-linear-48b", "ring-2.5-1t", "minimax-m2.5"):
        local, remote = load_profile(f"{name}-h20"), load_profile(f"{name}-h200")
        for tokens in (1024, 8192, 32_000, 130_000):
            expected = ratio[0].prefill_s(tokens) / ratio[1].prefill_s(tokens)
            assert local.prefill_s(tokens) / remote.prefill_s(tokens) == pytest.approx(
                expected, rel=1e-5
            )
        assert local.kv_bytes(5000) == remote.kv_bytes(5000)


POINTS = ((1000.0, 0.4), (4000.0, 0.6), (16_000.0, 2.4))


def test_linear_goes_through_its_points_and_on_at_both_ends():
    curve = Linear.through(POINTS)
    assert [curve.at(tokens) for tokens, _ in POINTS] == pytest.approx([0.4, 0.6, 2.4])
    assert curve.at(0) == pytest.approx(1 / 3)
    assert curve.at(2500) == pytest.approx(0.5)
    assert curve.at(28_000) == pytest.approx(4.2)


def test_log_log_is_a_power_law_between_points_and_a_line_below_the_first():
    curve = LogLog.through(POINTS)
    assert [curve.at(tokens) for tokens, _ in POINTS] == pytest.approx([0.4, 0.6, 2.4])
    assert curve.at(8000) == pytest.approx(1.2)  # exponent 1 between the last two
    assert curve.at(64_000) == pytest.approx(9.6)
    assert curve.at(0) == pytest.approx(1 / 3)


def test_a_steep_first_line_stops_at_zero():
    curve = Linear.through(((1000.0, 0.1), (2000.0, 0.4)))
    assert curve.at(0) == 0.0
    assert curve.at(500) == pytest.approx(0.05)


@given(
    st.sampled_from([Linear.through(POINTS), LogLog.through(POINTS), Quadratic.fit(POINTS)]),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
)
def test_curves_rise_and_scale(curve, a, b):
    low, high = sorted((a, b))
    assert curve.at(low) <= curve.at(high) * (1 + 1e-12)
    assert curve.times(0.25).at(high) == pytest.approx(curve.at(high) / 4)
    assert float(curve.over(np.array([low]))[0]) == pytest.approx(curve.at(low), rel=1e-9)


def test_scaled_divides_durations_and_sizes():
    profile = load_profile("1t-h20")
    small = profile.scaled(time_scale=8, byte_scale=1000)
    assert small.prefill_s(27_486, 1000) == pytest.approx(profile.prefill_s(27_486, 1000) / 8)
    assert small.decode_step_s(20, 0) == pytest.approx(0.025 / 8)
    assert small.kv_bytes(27_486, 64) == pytest.approx(profile.kv_bytes(27_486, 64) / 1000)
    assert small.max_batch == 20
    context = replace(profile, decode=DecodeStep(0.01, 0.001, 1e-6), kv_memory_bytes=4e11)
    small = context.scaled(time_scale=8, byte_scale=1000)
    assert small.decode_step_s(20, 10_000) == pytest.approx(0.04 / 8)
    assert small.kv_memory_bytes == pytest.approx(4e8)


def test_pacing_is_json_and_interpolates_back_to_the_profile():
    for name in ("1t-h20", "ring-2.5-1t-h200"):
        profile = load_profile(name).scaled(time_scale=8)
        pacing = json.loads(json.dumps(profile.to_pacing()))
        tokens = np.geomspace(1, 1 << 20, 500)
        table = np.interp(tokens, pacing["prefill_tokens"], pacing["prefill_s"])
        assert table == pytest.approx(profile.prefill_array_s(tokens), rel=2e-4)
        assert pacing["prefill_tokens"][0] == 0
    assert pacing["decode_base_s"] is None


MEASURED = """
    schema_version = 1
    name = "tiny"
    device = "2 CPU cores"
    model = "bench"
    [prefill]
    interpolation = "linear"
    points = [[64, 0.01], [512, 0.05]]
    [cache]
    fixed_bytes = 1000
    per_token_bytes = 10
    n_layers = 4
    [decode]
    max_batch = 8
    points = [[1, 100, 0.0013], [8, 800, 0.0027], [8, 8000, 0.0099], [1, 1000, 0.0022]]
    [provenance.prefill]
    origin = "measured"
    note = "prfaas profile"
    device = "2 CPU cores"
    commit = "abc123"
    date = "2026-11-29"
    [provenance.cache]
    origin = "derived"
    note = "layer counts"
    [provenance.decode]
    origin = "measured"
    note = "prfaas profile"
    device = "2 CPU cores"
    commit = "abc123"
    date = "2026-11-29"
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("interpolation", "seconds"),
    # 0.4 + 0.2/3; 0.4 x 2^(ln 1.5 / ln 4); Newton's form through all three
    [("linear", 0.466667), ("log-log", 0.489898), ("quadratic", 0.455556)],
)
def test_an_interpolation_is_chosen_by_its_name(tmp_path, interpolation, seconds):
    points = str([list(point) for point in POINTS])
    text = MEASURED.replace('"linear"', f'"{interpolation}"')
    profile = load_profile(written(tmp_path, text.replace("[[64, 0.01], [512, 0.05]]", points)))
    assert profile.prefill_s(2000) == pytest.approx(seconds, abs=1e-6)


def test_a_measured_profile_loads_and_fits_its_decode_points(tmp_path):
    profile = load_profile(written(tmp_path, MEASURED))
    assert profile.kv_bytes(50) == 1500
    # step = 1.1 ms + 0.1 ms a sequence + 1 us a token of context
    assert profile.decode_step_s(4, 2000) == pytest.approx(0.0035, rel=1e-6)
    assert profile.provenance["decode"].commit == "abc123"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_batch = 8", "max_batch = 8\n    batch = 1", "decode.batch: unknown key"),
        ("max_batch = 8", "max_batch = true", "decode.max_batch: must be a number, not true"),
        ("[64, 0.01]", "[64, nan]", "prefill.points.*must be a finite number"),
        ("[64, 0.01]", "[64, 0.06]", "prefill: points: .*seconds must not fall"),
        ('"linear"', '"cubic"', "prefill.interpolation: .*'cubic'"),
        ("n_layers = 4", "", "cache: give layers, or all of"),
        ('commit = "abc123"', "", "provenance.prefill: a measured number also needs commit"),
        ('name = "tiny"', "", "name: is missing"),
        ("schema_version = 1", "schema_version = 2", "schema_version: .*found 2"),
        ("[provenance.cache]", "[provenance.kache]", "provenance: cache is missing"),
        ('"linear"', '"quadratic"', "prefill: points: found 2, quadratic needs 3"),
        ("[decode]", "[decode", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_file_and_field(tmp_path, old, new, message):
    path = written(tmp_path, MEASURED.replace(old, new, 1))
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ProfileError, match=r"nope: no such profile or file .*1t-h200"):
        load_profile("nope")
