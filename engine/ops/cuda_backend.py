"""The operators on CUDA: fla-core for KDA, own Triton kernels for decode, torch elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from engine.model.batch import DecodeRows, PrefillRows
from engine.ops import kda_fla, moe, triton_mla_decode
from engine.ops.kda_inputs import KdaInputs
from engine.ops.mla import expand, piece_rows
from engine.ops.short_conv import conv_decode, conv_prefill
from engine.ops.torch_backend import initial_states

_CAPTURED_ROWS = 64
"""Decode steps of up to so many rows are captured in graphs: they must not wait for the device."""


def mla_prefill_fused(
    q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, rows: PrefillRows
) -> Tensor:
    """As `engine.ops.mla.mla_prefill`: expanded keys and values of a piece's whole context, in one
    fused attention call whose causal mask is aligned to the last key."""
    flat = latents.view(-1, latents.shape[-1])
    out = q.new_empty(q.shape[0], q.shape[1], w_uv.shape[1])
    for piece, begin, end in rows.spans():
        index = piece_rows(piece, latents.shape[1], q.device)
        key, value = expand(flat, index, w_uk, w_uv, q.dtype)
        # The fused kernel wants one head size; the padding is cut off again.
        value = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        attended = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1).unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=causal_lower_right(end - begin, piece.end),
            scale=q.shape[-1] ** -0.5,
        )
        out[begin:end] = attended[0, :, :, : out.shape[-1]].transpose(0, 1)
    return out


class CudaOperators:
    """Implements `Operators`."""

    def conv_prefill(self, x: Tensor, weight: Tensor, cache: Tensor, rows: PrefillRows) -> Tensor:
        return conv_prefill(x, weight, cache, rows)

    def conv_decode(self, x: Tensor, weight: Tensor, cache: Tensor, rows: DecodeRows) -> Tensor:
        return conv_decode(x, weight, cache, rows.slots)

    def kda_prefill(self, inputs: KdaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
        with torch.inference_mode():
            return kda_fla.kda_prefill(inputs, state, initial_states(state, rows), rows)

    def kda_decode(self, inputs: KdaInputs, state: Tensor, rows: DecodeRows) -> Tensor:
        return kda_fla.kda_decode(inputs, state, rows)

    def mla_prefill(
        self, q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, rows: PrefillRows
    ) -> Tensor:
        return mla_prefill_fused(q, latents, w_uk, w_uv, rows)

    def mla_decode(
        self, q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, rows: DecodeRows
    ) -> Tensor:
        return triton_mla_decode.mla_decode(q, latents, w_uk, w_uv, rows)

    def experts(
        self, x: Tensor, chosen: Tensor, picked: Tensor, weights: moe.ExpertWeights
    ) -> Tensor:
        # The grouped product is for bf16; other types fall back to one that waits for the device.
        if x.dtype is torch.bfloat16:
            return moe.experts(x, chosen, picked, weights, moe.grouped)
        if x.shape[0] <= _CAPTURED_ROWS:
            return moe.experts_for_few(x, chosen, picked, weights)
        return moe.experts(x, chosen, picked, weights, moe.looped)
