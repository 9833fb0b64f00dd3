"""KDA by the kernels of flash-linear-attention (`fla-core`).

Activations (unit length, decay, beta) happen inside the kernels, from bf16 projections in fp32.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from fla.ops.kda import chunk_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from torch import Tensor

from engine.model.batch import DecodeRows, PrefillRows
from engine.ops.kda_inputs import KdaInputs


def kda_prefill(inputs: KdaInputs, state: Tensor, initial: Tensor, rows: PrefillRows) -> Tensor:
    """`initial` [N, H, V, K] is the state before each piece; `state` [n_slots, H, V, K] receives
    the final states and the checkpoints. Returns [T, H, V].

    fla keeps the states between chunks in bf16, and a checkpoint must be as exact as the state
    that it stands for. So a piece is cut at its checkpoints, and the k-th cuts of all pieces form
    one variable-length call.
    """
    out = torch.empty_like(inputs.v)
    bounds = [
        [0, *sorted({p - piece.start for p, _ in piece.checkpoints} | {len(piece.tokens)})]
        for piece in rows.pieces
    ]
    targets = [{p - piece.start: slot for p, slot in piece.checkpoints} for piece in rows.pieces]
    current = initial
    for wave in range(max(len(b) for b in bounds) - 1):
        active = [i for i, b in enumerate(bounds) if len(b) > wave + 1]
        spans = [
            (rows.cu_seqlens[i] + bounds[i][wave], rows.cu_seqlens[i] + bounds[i][wave + 1])
            for i in active
        ]
        whole = len(active) == len(bounds) and all(len(b) == 2 for b in bounds)
        index = None if whole else _rows(spans, inputs.q.device)
        part, final = _chunk(inputs, current[active], spans, index)
        if index is None:
            out = part
        else:
            out[index] = part
        current = current.clone()
        current[active] = final
        for i, (_, end) in zip(active, spans, strict=True):
            at = end - rows.cu_seqlens[i]
            if at in targets[i]:
                state[targets[i][at]] = current[i]
    for i, piece in enumerate(rows.pieces):
        state[piece.slot] = current[i]
    return out


def kda_decode(inputs: KdaInputs, state: Tensor, rows: DecodeRows) -> Tensor:
    """One step on slots, in place: state [n_slots, H, V, K]. Returns [B, H, V]."""
    out, _ = fused_recurrent_kda_fwd(
        q=inputs.q.unsqueeze(1).contiguous(),
        k=inputs.k.unsqueeze(1).contiguous(),
        v=inputs.v.unsqueeze(1).contiguous(),
        g=inputs.decay.unsqueeze(1).contiguous(),
        beta=inputs.beta.unsqueeze(1).contiguous(),
        A_log=inputs.a_log,
        dt_bias=inputs.dt_bias,
        initial_state=state,
        inplace_final_state=True,
        state_v_first=True,
        ssm_state_indices=rows.slots,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    return out.squeeze(1)


def _chunk(
    inputs: KdaInputs, initial: Tensor, spans: list[tuple[int, int]], index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One call over the rows of `spans` (all rows where `index` is None)."""

    def rows(x: Tensor) -> Tensor:
        return (x if index is None else x[index]).unsqueeze(0).contiguous()

    ends = [0]
    for begin, end in spans:
        ends.append(ends[-1] + end - begin)
    assert all(a < b for a, b in pairwise(ends))
    cu_seqlens = torch.tensor(ends)
    out, final = chunk_kda(
        q=rows(inputs.q),
        k=rows(inputs.k),
        v=rows(inputs.v),
        g=rows(inputs.decay),
        beta=rows(inputs.beta),
        A_log=inputs.a_log,
        dt_bias=inputs.dt_bias.reshape(-1),
        initial_state=initial.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
        cu_seqlens=cu_seqlens.to(inputs.q.device, non_blocking=True),
        cu_seqlens_cpu=cu_seqlens,
    )
    return out[0], final


def _rows(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(begin, end, device=device) for begin, end in spans])
