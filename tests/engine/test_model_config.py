"""Cache bytes and parameters against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.model.config import SHAPES, InputError, ModelConfig, shape

MIB, KIB = 2**20, 2**10


@pytest.mark.parametrize(
    ("name", "fixed_mib", "per_token_kib"),
    [("paper-1t", 173.906, 16.875), ("kimi-linear-48b", 41.41, 7.875)],
)
def test_cache_bytes_are_the_published_ones(name: str, fixed_mib: float, per_token_kib: float):
    config = shape(name)
    assert config.state_bytes() / MIB == pytest.approx(fixed_mib, abs=0.005)
    assert config.kv_bytes_per_token() / KIB == per_token_kib


@pytest.mark.parametrize(
    ("tokens", "mib"), [(1024, 190.8), (8192, 308.9), (32_000, 701.3), (130_000, 2316.3)]
)
def test_request_bytes_give_table_5(tokens: int, mib: float):
    assert shape("paper-1t").request_bytes(tokens) / MIB == pytest.approx(mib, abs=0.06)


def test_cache_bytes_of_kimi_k3():
    """69 KDA layers of 96 heads and 24 MLA layers; its convolution keeps four entries."""
    k3 = replace(shape("kimi-linear-48b"), layers=93, kda_heads=96, conv_width=5)
    assert (len(k3.kda_layers), len(k3.mla_layers)) == (69, 24)
    assert k3.state_bytes() / MIB == pytest.approx(433.4, abs=0.05)
    assert k3.kv_bytes_per_token() / KIB == 27


def test_cache_bytes_of_a_seven_to_one_mix():
    mix = replace(shape("kimi-linear-48b"), layers=64, mla_every=8, kda_heads=64)
    assert (len(mix.kda_layers), len(mix.mla_layers)) == (56, 8)
    assert mix.state_bytes() / MIB == pytest.approx(231.9, abs=0.05)
    assert mix.kv_bytes_per_token() / KIB == 9


def test_layer_rule_is_every_nth_and_the_last():
    assert [i + 1 for i in shape("kimi-linear-48b").mla_layers] == [4, 8, 12, 16, 20, 24, 27]
    assert shape("tiny").mla_layers == (3,)
    assert shape("tiny-7to1").mla_layers == (7,)


def test_parameters_are_the_published_ones():
    config = shape("kimi-linear-48b")
    assert config.parameters() / 1e9 == pytest.approx(49.1, abs=0.05)
    assert config.active_parameters() / 1e9 == pytest.approx(3.1, abs=0.05)
    assert shape("paper-1t").parameters() / 1e12 == pytest.approx(1.0, abs=0.05)


def test_bench_shape_keeps_the_papers_fixed_share():
    """173.906 MiB / (16.875 KiB x 64) = 164.9 engine tokens' worth of fixed bytes."""
    config = shape("bench")
    share = config.state_bytes("float32") / config.kv_bytes_per_token("float32")
    assert share == pytest.approx(173.906 * 1024 / (16.875 * 64), rel=0.01)
    assert config.request_bytes(430, "float32") == pytest.approx(100_000, rel=0.1)


def test_floor_of_reading_and_writing_the_state():
    """The state alone, read and written at 4.3 TB/s: 82 us for the 1T model, 19.5 us for 48B."""
    for name, floor_us in (("paper-1t", 82), ("kimi-linear-48b", 19.5)):
        config = shape(name)
        state = len(config.kda_layers) * config.kda_state_bytes()
        assert 2 * state / 4.3e12 * 1e6 == pytest.approx(floor_us, rel=0.01)


def test_work_of_a_prompt_adds_up_over_chunks():
    config = shape("kimi-linear-48b")
    head = 2 * config.vocab * config.hidden
    parts = config.prefill_flops(1000) + config.prefill_flops(5000, 1000)
    assert parts - head == pytest.approx(config.prefill_flops(5000))
    assert config.decode_flops(5000) > config.decode_flops(1000) > 2 * config.active_parameters()
    assert config.decode_bytes(8, 1000) < 8 * config.decode_bytes(1, 1000)


def test_fingerprint_tells_layouts_apart_and_ignores_the_name():
    tiny = shape("tiny")
    assert replace(tiny, name="other").fingerprint() == tiny.fingerprint()
    assert replace(tiny, d_k=tiny.d_v, d_v=tiny.d_k).fingerprint() != tiny.fingerprint()
    assert len({config.fingerprint() for config in SHAPES.values()}) == len(SHAPES)


def test_every_tiny_shape_has_different_key_and_value_sizes():
    for name in ("tiny", "tiny-7to1", "bench"):
        assert shape(name).d_k != shape(name).d_v


def test_bad_input_is_one_clear_line():
    with pytest.raises(InputError, match="shape 'huge' is unknown; have tiny, "):
        shape("huge")
    with pytest.raises(InputError, match="experts_per_token is 9, must be 1 to 8"):
        replace(shape("tiny"), experts_per_token=9)
    assert InputError.exit_code == 2
    assert ModelConfig.__dataclass_params__.frozen  # type: ignore[attr-defined]
