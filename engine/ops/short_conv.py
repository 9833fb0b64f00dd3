"""Causal depthwise convolution over a few tokens, with SiLU, on cached slots.

The cache of a slot holds the last W - 1 inputs of its sequence, oldest first; a sequence shorter
than that has zeros in front, exactly as if it had been padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.batch import PrefillRows


def conv_prefill(x: Tensor, weight: Tensor, cache: Tensor, rows: PrefillRows) -> Tensor:
    """x: [T, C]; weight: [W, C], oldest tap first; cache: [n_slots, W - 1, C], read at each piece's
    read slot and written at its slot and its checkpoints. Returns SiLU(conv) [T, C]."""
    taps = weight.shape[0]
    kept = taps - 1
    out = torch.empty_like(x)
    for piece, begin, end in rows.spans():
        prior = cache[piece.read_slot].to(x.dtype) if piece.start else x.new_zeros(kept, x.shape[1])
        window = torch.cat([prior, x[begin:end]])
        size = end - begin
        y = out[begin:end]
        torch.mul(window[:size], weight[0], out=y)
        for tap in range(1, taps):
            y.addcmul_(window[tap : tap + size], weight[tap])
        F.silu(y, inplace=True)
        cache[piece.slot] = window[size:]
        for position, slot in piece.checkpoints:
            at = position - piece.start
            cache[slot] = window[at : at + kept]
    return out


def conv_decode(x: Tensor, weight: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """One token a row: x [B, C], cache read and written at `slots` [B]. Returns [B, C]."""
    window = torch.cat([cache.index_select(0, slots).to(x.dtype), x.unsqueeze(1)], 1)
    cache.index_copy_(0, slots, window[:, 1:].to(cache.dtype))
    return F.silu((window * weight).sum(1), inplace=True)
