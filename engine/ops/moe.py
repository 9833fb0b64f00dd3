"""Mixture of experts: sigmoid router, chosen by a corrected score, weighted by the score itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """router [E, hidden] fp32; correction [E] fp32; gate_up [E, 2 ffn, hidden];
    down [E, hidden, ffn]."""

    router: Tensor
    correction: Tensor
    gate_up: Tensor
    down: Tensor


ExpertRun = Callable[[Tensor, Tensor, ExpertWeights], Tensor]
"""(rows [T k, hidden] sorted by expert, unsorted expert ids [T k], weights) -> [T k, hidden]"""


def route(
    x: Tensor, weights: ExpertWeights, top_k: int, scale: float, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> expert ids [T, top_k] and fp32 weights [T, top_k].

    The correction decides which experts are chosen and never how much they count.
    """
    scores = torch.sigmoid(x.float() @ weights.router.t())
    chosen = (scores + weights.correction).topk(top_k, -1, sorted=False).indices
    picked = scores.gather(-1, chosen)
    if renormalize:
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    return chosen, picked * scale


def experts(
    x: Tensor, chosen: Tensor, picked: Tensor, weights: ExpertWeights, run: ExpertRun
) -> Tensor:
    """Sum over each token's experts of weight x W_down(SiLU(gate) up). Returns [T, hidden].

    Tokens are sorted by expert, and `run` multiplies each expert's run of rows.
    """
    order = chosen.flatten().argsort()
    result = run(x.index_select(0, order // chosen.shape[1]), chosen.flatten(), weights)
    result *= picked.flatten().index_select(0, order).unsqueeze(-1).to(x.dtype)
    # Each token's terms are brought together and summed in one order. Adding them in place would
    # sum them in any order on CUDA, and the same prompt would not give the same bits twice.
    place = torch.empty_like(order)
    place.scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return result.index_select(0, place).view(*chosen.shape, -1).sum(1)


def experts_for_few(x: Tensor, chosen: Tensor, picked: Tensor, weights: ExpertWeights) -> Tensor:
    """As `experts`, every expert on every token: a handful of calls instead of several an expert,
    for a decode step whose tokens meet most experts anyway. Graph-safe."""
    share = x.new_zeros(x.shape[0], weights.gate_up.shape[0])
    share.scatter_(1, chosen, picked.to(x.dtype))
    gate, up = torch.matmul(x, weights.gate_up.transpose(1, 2)).chunk(2, -1)
    result = torch.bmm(F.silu(gate).mul_(up), weights.down.transpose(1, 2))
    return result.mul_(share.t().unsqueeze(-1)).sum(0)


def looped(sorted_x: Tensor, chosen: Tensor, weights: ExpertWeights) -> Tensor:
    """Each expert in turn: for a device where the host knows the counts at no cost."""
    counts = torch.bincount(chosen, minlength=weights.gate_up.shape[0]).tolist()
    result = torch.empty_like(sorted_x)
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(begin, begin + count)
            gate, up = F.linear(sorted_x[rows], weights.gate_up[expert]).chunk(2, -1)
            result[rows] = F.linear(F.silu(gate) * up, weights.down[expert])
            begin += count
    return result


def grouped(sorted_x: Tensor, chosen: Tensor, weights: ExpertWeights) -> Tensor:
    """All experts in two grouped products, without the host knowing the counts (graph-safe)."""
    experts = weights.gate_up.shape[0]
    ids = torch.arange(experts, device=chosen.device)
    ends = (chosen.unsqueeze(0) == ids.unsqueeze(1)).sum(1).cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(sorted_x, weights.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    return F.grouped_mm(F.silu(gate) * up, weights.down.transpose(1, 2), offs=ends)
