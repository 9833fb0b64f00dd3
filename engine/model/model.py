"""The forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache.storage import CacheStorage
from engine.model.batch import ForwardBatch
from engine.model.config import ModelConfig
from engine.model.weights import (
    DenseWeights,
    KdaWeights,
    LayerWeights,
    MlaWeights,
    ModelWeights,
    MoeWeights,
)
from engine.ops import moe
from engine.ops.backend import Operators, operators_for
from engine.ops.kda_inputs import KdaInputs

_LATENT_NORM_EPS = 1e-6
"""The latent's norm keeps its own epsilon, whatever the model's is."""


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain over the last dimension, reduced in fp32."""
    if x.is_cuda:
        return F.rms_norm(x, (x.shape[-1],), gain, eps)
    wide = x.float()
    return (wide * wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).to(x.dtype) * gain


class Model:
    """A Kimi Linear model on one device.

    `forward` computes the next tokens of any number of sequences against a `CacheStorage` on the
    same device; it holds no state of its own. `operators` replaces those of the device. Set
    `torch.set_num_threads` before heavy use: small shapes are fastest on one thread.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, operators: Operators | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embed.device
        self.dtype = weights.embed.dtype
        self._ops = operators or operators_for(self.device)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        storage: CacheStorage,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Logits [pieces, vocab] (fp32) of each piece's last token, in the order of the pieces.

        `on_layer(layer)` is called when the layer's part of the cache is written for the whole
        batch; on CUDA the writes are then enqueued on the current stream, and the caller records an
        event there before another stream or process may read them.
        """
        x = F.embedding(batch.tokens, self.weights.embed)
        for layer, weights in enumerate(self.weights.layers):
            normed = rms_norm(x, weights.mixer_norm, self.config.norm_eps)
            x = x + self._mix(layer, weights, normed, batch, storage)
            if on_layer is not None:
                on_layer(layer)
            normed = rms_norm(x, weights.ffn_norm, self.config.norm_eps)
            x = x + self._feed_forward(weights, normed)
        last = rms_norm(x[batch.last_rows], self.weights.norm, self.config.norm_eps)
        return F.linear(last, self.weights.head).float()

    def _mix(
        self,
        layer: int,
        weights: LayerWeights,
        x: Tensor,
        batch: ForwardBatch,
        storage: CacheStorage,
    ) -> Tensor:
        if isinstance(weights.mixer, MlaWeights):
            return self._mla(weights.mixer, x, batch, storage.latents[layer])
        return self._kda(weights.mixer, x, batch, storage.state[layer], storage.conv[layer])

    def _kda(
        self, w: KdaWeights, x: Tensor, batch: ForwardBatch, state: Tensor, conv: Tensor
    ) -> Tensor:
        c, ops, n_decode = self.config, self._ops, batch.n_decode
        heads, keys, values = c.kda_heads, c.kda_heads * c.d_k, c.kda_heads * c.d_v
        streams, decay_low, gate_low, beta = F.linear(x, w.project).split(
            [c.conv_channels, c.low_rank, c.low_rank, heads], -1
        )
        mixed = []
        if batch.decode is not None:
            mixed.append(ops.conv_decode(streams[:n_decode], w.conv, conv, batch.decode))
        if batch.prefill is not None:
            mixed.append(ops.conv_prefill(streams[n_decode:], w.conv, conv, batch.prefill))
        q, k, v = _joined(mixed).split([keys, keys, values], -1)
        inputs = KdaInputs(
            q=q.unflatten(-1, (heads, c.d_k)),
            k=k.unflatten(-1, (heads, c.d_k)),
            v=v.unflatten(-1, (heads, c.d_v)),
            decay=F.linear(decay_low, w.decay_up).unflatten(-1, (heads, c.d_k)),
            beta=beta,
            a_log=w.a_log,
            dt_bias=w.dt_bias,
        )
        attended = []
        if batch.decode is not None:
            attended.append(ops.kda_decode(inputs.rows(0, n_decode), state, batch.decode))
        if batch.prefill is not None:
            rows = inputs.rows(n_decode, x.shape[0])
            attended.append(ops.kda_prefill(rows, state, batch.prefill))
        normed = rms_norm(_joined(attended), w.norm, c.norm_eps)
        gate = torch.sigmoid(F.linear(gate_low, w.gate_up)).view_as(normed)
        return F.linear((normed * gate).flatten(1), w.out)

    def _mla(self, w: MlaWeights, x: Tensor, batch: ForwardBatch, latents: Tensor) -> Tensor:
        c, ops, n_decode = self.config, self._ops, batch.n_decode
        q, latent, shared = F.linear(x, w.project).split(
            [c.mla_heads * c.qk_dim, c.kv_lora_rank, c.rope_dim], -1
        )
        q = q.unflatten(-1, (c.mla_heads, c.qk_dim))
        row = torch.cat([rms_norm(latent, w.norm, _LATENT_NORM_EPS), shared], -1)
        latents.view(-1, c.latent_dim).index_copy_(0, batch.latent_rows, row.to(latents.dtype))
        attended = []
        if batch.decode is not None:
            attended.append(
                ops.mla_decode(q[:n_decode], latents, w.up_key, w.up_value, batch.decode)
            )
        if batch.prefill is not None:
            attended.append(
                ops.mla_prefill(q[n_decode:], latents, w.up_key, w.up_value, batch.prefill)
            )
        return F.linear(_joined(attended).flatten(1), w.out)

    def _feed_forward(self, weights: LayerWeights, x: Tensor) -> Tensor:
        c = self.config
        if isinstance(weights.ffn, MoeWeights):
            chosen, picked = moe.route(
                x, weights.ffn.experts, c.experts_per_token, c.routed_scale, c.renormalize
            )
            routed = self._ops.experts(x, chosen, picked, weights.ffn.experts)
            return routed if weights.ffn.shared is None else routed + _dense(weights.ffn.shared, x)
        return _dense(weights.ffn, x)


def _dense(w: DenseWeights, x: Tensor) -> Tensor:
    gate, up = F.linear(x, w.gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w.down)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
