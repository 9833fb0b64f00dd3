"""What a KDA layer feeds its recurrence, before activation; and the activations in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class KdaInputs:
    """q, k: [T, H, K] and v: [T, H, V] as they leave the short convolution; decay: [T, H, K] and
    beta: [T, H] as they leave their projections; a_log: [H] fp32; dt_bias: [H, K] fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    a_log: Tensor
    dt_bias: Tensor

    def rows(self, begin: int, end: int) -> KdaInputs:
        part = slice(begin, end)
        return KdaInputs(
            self.q[part],
            self.k[part],
            self.v[part],
            self.decay[part],
            self.beta[part],
            self.a_log,
            self.dt_bias,
        )

    def activated(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(q, k, v, g, beta) in fp32: q and k of unit length, q scaled by K^-0.5,
        g = -exp(a_log) softplus(decay + dt_bias) <= 0, beta in (0, 1).

        Decay and beta are never rounded below fp32: a bf16 factor near 1 would become 1, and a
        state that decays slowly would not decay at all.
        """
        q, k = self.q.float(), self.k.float()
        q = q * (q.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt_().mul_(q.shape[-1] ** -0.5)
        k = k * (k.square().sum(-1, keepdim=True) + _L2_EPS).rsqrt_()
        g = F.softplus(self.decay.float() + self.dt_bias).mul_(-self.a_log.exp().unsqueeze(-1))
        return q, k, self.v.float(), g, torch.sigmoid(self.beta.float())
