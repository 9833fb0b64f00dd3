"""One KDA step for each row of a decode batch, in place on state slots."""

from __future__ import annotations

import torch
from torch import Tensor


def kda_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor
) -> Tensor:
    """q (scaled), k, g: [B, H, K]; v: [B, H, V]; beta: [B, H]; state: [n_slots, H, V, K] fp32,
    read and written at `slots` [B] (padding rows share the scratch slot). Returns [B, H, V]."""
    current = state.index_select(0, slots).mul_(g.exp().unsqueeze(-2))
    error = v - torch.matmul(current, k.unsqueeze(-1)).squeeze(-1)
    current += (beta.unsqueeze(-1) * error).unsqueeze(-1) * k.unsqueeze(-2)
    state.index_copy_(0, slots, current)
    return torch.matmul(current, q.unsqueeze(-1)).squeeze(-1)
