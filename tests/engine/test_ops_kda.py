"""KDA operators against the float64 recurrence, always with d_k != d_v."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops import kda_chunked as chunked_form
from engine.ops.kda_chunked import kda_chunked
from engine.ops.kda_decode import kda_step
from engine.ops.kda_inputs import KdaInputs
from engine.ops.kda_reference import kda_recurrence

H, K, V = 2, 16, 24
TOLERANCE = 2e-5


def inputs(rows: int, decay: float = 0.1, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta; log decays uniform in [-decay, 0]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = torch.nn.functional.normalize(normal(rows, H, K), dim=-1) * K**-0.5
    k = torch.nn.functional.normalize(normal(rows, H, K), dim=-1)
    g = -decay * torch.rand(rows, H, K, generator=generator)
    return q, k, normal(rows, H, V), g, torch.rand(rows, H, generator=generator)


def state(n: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(n, H, V, K, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE):
    assert actual.isfinite().all()
    assert (actual - expected).abs().max() < tolerance


@pytest.mark.parametrize("decay", [0.01, 1.0, 20.0, 60.0])
def test_every_length_up_to_two_chunks(decay: float):
    for length in range(1, 66):
        x, s = inputs(length, decay, seed=length), state(1)
        expected_o, expected_s = kda_recurrence(*x, s[0])
        o, final, _ = kda_chunked(*x, s, [length])
        assert_close(o, expected_o)
        assert_close(final[0], expected_s)


@pytest.mark.parametrize("rows", [128, 130])
@pytest.mark.parametrize("g", [-1e-6, -5.0, -19.9, -20.1, -80.0, -1e4])
def test_constant_gates_from_slow_to_extreme(g: float, rows: int):
    """Whole chunks, which are taken as they lie, and one that has to be padded."""
    x = list(inputs(rows))
    x[3] = torch.full_like(x[3], g)
    o, final, _ = kda_chunked(*x, state(1), [rows])
    expected_o, expected_s = kda_recurrence(*x, state(1)[0])
    assert_close(o, expected_o)
    assert_close(final[0], expected_s)


@pytest.mark.parametrize("every", [2, 7])
@pytest.mark.parametrize("rows", [128, 130])
def test_gates_that_jump_between_none_and_extreme(rows: int, every: int):
    x = list(inputs(rows))
    x[3] = torch.where(torch.arange(rows)[:, None, None] % every == 1, -1e4, -1e-3).expand_as(x[3])
    o, final, _ = kda_chunked(*x, state(1), [rows])
    expected_o, expected_s = kda_recurrence(*x, state(1)[0])
    assert_close(o, expected_o)
    assert_close(final[0], expected_s)


def test_channels_of_a_head_decay_on_their_own():
    """Half of them forget at once, half never: both in the same products."""
    x = list(inputs(128))
    x[3] = torch.where(torch.arange(K) % 2 == 0, -1e3, -1e-4).expand_as(x[3])
    o, final, _ = kda_chunked(*x, state(1), [128])
    expected_o, expected_s = kda_recurrence(*x, state(1)[0])
    assert_close(o, expected_o)
    assert_close(final[0], expected_s)


def test_repeated_keys_with_full_write_strength_stay_stable():
    """The triangular system at its worst: every key the same, beta 1, no decay."""
    q, k, v, g, _ = inputs(64)
    x = (q, k[:1].expand_as(k).contiguous(), v, torch.zeros_like(g), torch.ones(64, H))
    o, final, _ = kda_chunked(*x, state(1), [64])
    expected_o, expected_s = kda_recurrence(*x, state(1)[0])
    assert_close(o, expected_o)
    assert_close(final[0], expected_s)


def test_slow_decay_over_4096_tokens_is_not_rounded_away():
    """A decay of 1 - 2^-10 a token is 1 in bf16; over 4,096 tokens it leaves 1.8 %."""
    rows = 4096
    q, k, v, g, beta = inputs(rows)
    x = (q, k, v, torch.full_like(g, -(2.0**-10)), torch.zeros_like(beta))
    _, final, _ = kda_chunked(*x, state(1), [rows])
    assert torch.allclose(final[0], state(1)[0] * torch.e**-4, rtol=1e-4)
    slots = state(1)
    for t in range(rows):
        kda_step(*(part[t : t + 1] for part in x), slots, torch.tensor([0]))
    assert torch.allclose(slots[0], state(1)[0] * torch.e**-4, rtol=1e-3)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    data=st.data(),
)
def test_variable_length_batches_with_cuts(lengths: list[int], data: st.DataObject):
    """Each sequence of a batch equals its own recurrence, at its end and at every cut."""
    cuts = [sorted(data.draw(st.sets(st.integers(1, length), max_size=3))) for length in lengths]
    x, s = inputs(sum(lengths), 1.0), state(len(lengths))
    o, final, captured = kda_chunked(*x, s, lengths, cuts)
    begin = 0
    for i, length in enumerate(lengths):
        rows = [part[begin : begin + length] for part in x]
        expected_o, expected_s = kda_recurrence(*rows, s[i])
        assert_close(o[begin : begin + length], expected_o)
        assert_close(final[i], expected_s)
        for cut in cuts[i]:
            _, at_cut = kda_recurrence(*(part[:cut] for part in rows), s[i])
            assert_close(captured[i, cut], at_cut)
        begin += length
    assert set(captured) == {(i, cut) for i, inner in enumerate(cuts) for cut in inner}


@pytest.mark.parametrize("rows", [320, 330])
def test_chunks_that_forget_are_taken_apart_from_those_that_do_not(rows: int):
    """Of some heads' chunks all decay is mild, of others extreme: each equals the recurrence, and
    none depends by a bit on which it is computed with."""
    x = list(inputs(rows))
    x[3][70:80, 0] = -50.0
    x[3][200:, 1, 3] = -4.0
    o, final, at = kda_chunked(*x, state(1), [rows], [[64, 128, 192, 256]])
    expected_o, expected_s = kda_recurrence(*x, state(1)[0])
    assert_close(o, expected_o)
    assert_close(final[0], expected_s)
    s = state(1)
    for begin in range(0, 256, 64):
        part, s, _ = kda_chunked(*(p[begin : begin + 64] for p in x), s, [64])
        assert torch.equal(part, o[begin : begin + 64])
        assert torch.equal(s[0], at[0, begin + 64])


def test_how_many_heads_and_chunks_are_handled_at_once_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    lengths, cuts = [130, 64, 7], [[32, 100], [64], []]
    x, s = inputs(sum(lengths), 1.0), state(3)
    o, final, captured = kda_chunked(*x, s, lengths, cuts)
    monkeypatch.setattr(chunked_form, "_STATE_VALUES", 1)
    monkeypatch.setattr(chunked_form, "_SPAN_VALUES", 1)
    singly, final_singly, captured_singly = kda_chunked(*x, s, lengths, cuts)
    assert_close(singly, o, 1e-6)
    assert_close(final_singly, final, 1e-6)
    assert captured.keys() == captured_singly.keys() == {(0, 32), (0, 100), (1, 64)}
    for key, at_cut in captured.items():
        assert_close(captured_singly[key], at_cut, 1e-6)


def test_states_given_are_not_changed():
    s = state(2)
    kda_chunked(*inputs(50), s, [20, 30])
    assert torch.equal(s, state(2))


def test_decode_step_updates_its_slots_and_no_other():
    slots, before = state(6), state(6)
    rows = torch.tensor([4, 1, 3])
    x = inputs(3)
    o = kda_step(*x, slots, rows)
    for row, slot in enumerate(rows.tolist()):
        expected_o, expected_s = kda_recurrence(*(p[row : row + 1] for p in x), before[slot])
        assert_close(o[row], expected_o[0])
        assert_close(slots[slot], expected_s)
    assert torch.equal(slots[[0, 2, 5]], before[[0, 2, 5]])


def test_activation_normalises_scales_and_bounds():
    raw = torch.randn(5, H, K)
    ready = KdaInputs(
        q=raw, k=raw, v=torch.randn(5, H, V), decay=100 * torch.randn(5, H, K),
        beta=torch.randn(5, H), a_log=torch.randn(H), dt_bias=torch.randn(H, K),
    )  # fmt: skip
    q, k, _, g, beta = ready.activated()
    assert torch.allclose(k.norm(dim=-1), torch.ones(5, H), atol=1e-5)
    assert torch.allclose(q, k * K**-0.5)
    assert (g <= 0).all()
    assert ((beta > 0) & (beta < 1)).all()


def test_activation_keeps_decay_and_beta_in_fp32_for_bf16_inputs():
    raw = torch.full((1, H, K), -7.0, dtype=torch.bfloat16)
    half = torch.zeros(1, H, V, dtype=torch.bfloat16)
    ready = KdaInputs(raw, raw, half, raw, raw[..., 0], torch.zeros(H), torch.full((H, K), 1e-3))
    _, _, _, g, beta = ready.activated()
    assert g.dtype == beta.dtype == torch.float32
    expected = -torch.log1p(torch.exp(torch.tensor(-7.0 + 1e-3)))
    assert torch.allclose(g, expected.expand_as(g), rtol=1e-5)
