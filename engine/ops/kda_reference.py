"""The gated delta rule token by token in float64: what every other KDA operator is held against."""

from __future__ import annotations

import torch
from torch import Tensor


def kda_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence. q (already scaled), k, g: [T, H, K]; v: [T, H, V]; beta: [T, H];
    state: [H, V, K]. Returns float64 outputs [T, H, V] and the final state.

    Per token: S <- S Diag(exp g);  S <- S + beta (v - S k) k^T;  o = S q   (S is V-first).
    """
    q, k, v, g, beta, state = (x.to(torch.float64) for x in (q, k, v, g, beta, state))
    outputs = []
    for t in range(q.shape[0]):
        state = state * g[t].exp().unsqueeze(-2)
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("hv,hk->hvk", beta[t].unsqueeze(-1) * error, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(outputs), state
