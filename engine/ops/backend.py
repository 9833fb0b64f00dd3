"""The one interface between the model and its operators, and the choice by device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.model.batch import DecodeRows, PrefillRows
from engine.ops.kda_inputs import KdaInputs
from engine.ops.moe import ExpertWeights


class Operators(Protocol):
    """Stateful operators of one layer. Prefill takes chunks of any lengths, decode one token a
    row; both read and write the layer's cache tensors (`CacheStorage`) in place.

    The decode half uses device tensors only and never waits for the device, so that it can be
    captured in a graph.
    """

    def conv_prefill(self, x: Tensor, weight: Tensor, cache: Tensor, rows: PrefillRows) -> Tensor:
        """x [T, C], weight [W, C], cache [n_slots, W-1, C] -> SiLU(conv) [T, C]."""
        ...

    def conv_decode(self, x: Tensor, weight: Tensor, cache: Tensor, rows: DecodeRows) -> Tensor:
        """x [B, C] -> [B, C]."""
        ...

    def kda_prefill(self, inputs: KdaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
        """state [n_slots, H, V, K] fp32 -> outputs [T, H, V]."""
        ...

    def kda_decode(self, inputs: KdaInputs, state: Tensor, rows: DecodeRows) -> Tensor:
        """-> [B, H, V]."""
        ...

    def mla_prefill(
        self, q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, rows: PrefillRows
    ) -> Tensor:
        """q [T, H, nope+rope], latents [n_pages, page_tokens, rank+rope] -> [T, H, v]."""
        ...

    def mla_decode(
        self, q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, rows: DecodeRows
    ) -> Tensor:
        """-> [B, H, v]."""
        ...

    def experts(self, x: Tensor, chosen: Tensor, picked: Tensor, weights: ExpertWeights) -> Tensor:
        """x [T, hidden], each token's experts and weights [T, k] -> [T, hidden]."""
        ...


def operators_for(device: torch.device | str) -> Operators:
    """Torch on the CPU; fla-core and Triton kernels on CUDA (extra `gpu`)."""
    if torch.device(device).type == "cuda":
        from engine.ops.cuda_backend import CudaOperators

        return CudaOperators()
    from engine.ops.torch_backend import TorchOperators

    return TorchOperators()
