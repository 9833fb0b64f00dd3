"""Router and experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.ops import moe

HIDDEN, WIDTH, EXPERTS, TOP_K = 16, 24, 8, 2


@pytest.fixture
def weights() -> moe.ExpertWeights:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    return moe.ExpertWeights(
        router=normal(EXPERTS, HIDDEN),
        correction=torch.zeros(EXPERTS),
        gate_up=normal(EXPERTS, 2 * WIDTH, HIDDEN),
        down=normal(EXPERTS, HIDDEN, WIDTH),
    )


def by_token(x: torch.Tensor, chosen: torch.Tensor, picked: torch.Tensor, w: moe.ExpertWeights):
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for expert, weight in zip(chosen[t].tolist(), picked[t], strict=True):
            gate, up = (w.gate_up[expert] @ x[t]).chunk(2)
            out[t] += weight * (w.down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [1, 8, 100])
@pytest.mark.parametrize("run", [moe.looped, moe.grouped])
def test_experts_equal_one_token_at_a_time(weights, tokens, run):
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    chosen, picked = moe.route(x, weights, TOP_K, 2.446, True)
    actual = moe.experts(x, chosen, picked, weights, run)
    assert torch.allclose(actual, by_token(x, chosen, picked, weights), atol=1e-5)


def test_every_expert_on_every_token_is_the_same_sum(weights):
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5))
    chosen, picked = moe.route(x, weights, TOP_K, 2.446, True)
    actual = moe.experts_for_few(x, chosen, picked, weights)
    assert torch.allclose(actual, by_token(x, chosen, picked, weights), atol=1e-5)


def test_correction_chooses_and_does_not_weigh(weights):
    x = torch.randn(20, HIDDEN)
    weights.correction[5] = 100.0
    chosen, picked = moe.route(x, weights, TOP_K, 2.446, True)
    assert (chosen == 5).any(-1).all()
    assert torch.allclose(picked.sum(-1), torch.full((20,), 2.446))
    scores = torch.sigmoid(x @ weights.router.t()).gather(-1, chosen)
    assert torch.allclose(picked, 2.446 * scores / scores.sum(-1, keepdim=True))


def test_without_renormalisation_scores_stand_as_they_are(weights):
    x = torch.randn(20, HIDDEN)
    chosen, picked = moe.route(x, weights, TOP_K, 1.0, False)
    assert torch.equal(picked, torch.sigmoid(x @ weights.router.t()).gather(-1, chosen))
