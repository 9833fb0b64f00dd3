"""The operators in plain torch: the default on a CPU, and what every kernel is compared with."""

from __future__ import annotations

from torch import Tensor

from engine.model.batch import DecodeRows, PrefillRows
from engine.ops import moe
from engine.ops.kda_chunked import kda_chunked
from engine.ops.kda_decode import kda_step
from engine.ops.kda_inputs import KdaInputs
from engine.ops.mla import mla_decode, mla_prefill
from engine.ops.short_conv import conv_decode, conv_prefill

_FEW_TOKENS = 32
"""Up to here calls cost more than arithmetic does."""


def initial_states(state: Tensor, rows: PrefillRows) -> Tensor:
    """State before each piece, [N, H, V, K]: its read slot's, or zero where a sequence begins.

    A beginning sequence never multiplies what its slot holds, so a NaN left there stays there.
    """
    gathered = state.new_zeros(len(rows), *state.shape[1:])
    for i, piece in enumerate(rows.pieces):
        if piece.start:
            gathered[i] = state[piece.read_slot]
    return gathered


class TorchOperators:
    """Implements `Operators`."""

    def conv_prefill(self, x: Tensor, weight: Tensor, cache: Tensor, rows: PrefillRows) -> Tensor:
        return conv_prefill(x, weight, cache, rows)

    def conv_decode(self, x: Tensor, weight: Tensor, cache: Tensor, rows: DecodeRows) -> Tensor:
        return conv_decode(x, weight, cache, rows.slots)

    def kda_prefill(self, inputs: KdaInputs, state: Tensor, rows: PrefillRows) -> Tensor:
        cuts = [[p - piece.start for p, _ in piece.checkpoints] for piece in rows.pieces]
        lengths = [len(piece.tokens) for piece in rows.pieces]
        out, final, captured = kda_chunked(
            *inputs.activated(), initial_states(state, rows), lengths, cuts
        )
        for i, piece in enumerate(rows.pieces):
            state[piece.slot] = final[i]
            for position, slot in piece.checkpoints:
                state[slot] = captured[i, position - piece.start]
        return out.to(inputs.v.dtype)

    def kda_decode(self, inputs: KdaInputs, state: Tensor, rows: DecodeRows) -> Tensor:
        return kda_step(*inputs.activated(), state, rows.slots).to(inputs.v.dtype)

    def mla_prefill(
        self, q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, rows: PrefillRows
    ) -> Tensor:
        return mla_prefill(q, latents, w_uk, w_uv, rows)

    def mla_decode(
        self, q: Tensor, latents: Tensor, w_uk: Tensor, w_uv: Tensor, rows: DecodeRows
    ) -> Tensor:
        return mla_decode(q, latents, w_uk, w_uv, rows)

    def experts(
        self, x: Tensor, chosen: Tensor, picked: Tensor, weights: moe.ExpertWeights
    ) -> Tensor:
        if x.shape[0] <= _FEW_TOKENS and chosen.numel() >= weights.gate_up.shape[0]:
            return moe.experts_for_few(x, chosen, picked, weights)
        return moe.experts(x, chosen, picked, weights, moe.looped)
