"""Inputs that the benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.storage import CacheStorage
from engine.model.batch import ForwardBatch, Piece
from engine.model.config import ModelConfig
from engine.model.layout import CacheLayout
from engine.ops.kda_chunked import CHUNK

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class KdaShape:
    """Size of the KDA operator's comparisons: `dim` is that of keys and of values."""

    tokens: int
    heads: int
    dim: int

    def inputs(self) -> KdaTensors:
        return kda_inputs(self.tokens, self.heads, self.dim, self.dim)

    def state(self) -> Tensor:
        """Zeros, [1, H, V, K]."""
        return torch.zeros(1, self.heads, self.dim, self.dim)

    def chunked_flops(self) -> int:
        """Of the chunked form's matrix products: three with the state, and inside a chunk four
        triangles, keys and queries with keys and both of these with what is missing from v."""
        inside = 4 * self.dim * CHUNK
        return self.tokens * self.heads * (6 * self.dim**2 + inside)


KDA_SHAPES = {"small": KdaShape(1024, 2, 64), "kimi-linear-48b": KdaShape(256, 32, 128)}
"""What fits a cache, and a layer of the published model."""

KdaTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def kda_inputs(tokens: int, heads: int, d_k: int, d_v: int) -> KdaTensors:
    """Activated (q, k, v, g, beta) of one sequence, fp32."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    q, k = unit(normal(tokens, heads, d_k)), unit(normal(tokens, heads, d_k))
    g = -torch.rand(tokens, heads, d_k, generator=generator)
    beta = torch.rand(tokens, heads, generator=generator)
    return q * d_k**-0.5, k, normal(tokens, heads, d_v), g, beta


def per_token_loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The plain fp32 loop over tokens that the chunked form is measured against. Shapes as in
    `kda_recurrence`."""
    state, decay, out = state.clone(), g.exp().unsqueeze(-2), torch.empty_like(v)
    k, q, beta = k.unsqueeze(-1), q.unsqueeze(-1), beta.unsqueeze(-1)
    for t in range(v.shape[0]):
        state *= decay[t]
        error = beta[t] * (v[t] - torch.bmm(state, k[t]).squeeze(-1))
        state.baddbmm_(error.unsqueeze(-1), k[t].transpose(-1, -2))
        out[t] = torch.bmm(state, q[t]).squeeze(-1)
    return out, state


class Sequences:
    """`batch` sequences of up to `max_tokens`, with their cache, for one model."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        dtype: str = "float32",
    ) -> None:
        self._per_sequence = -(-max_tokens // PAGE_TOKENS)
        layout = CacheLayout(config, 1 + batch * self._per_sequence, 1 + batch, PAGE_TOKENS, dtype)
        self.storage = CacheStorage(layout, device)
        self._config = config
        self._batch = batch

    def pages(self, i: int) -> list[int]:
        first = 1 + i * self._per_sequence
        return list(range(first, first + self._per_sequence))

    def prompt(self, i: int, tokens: int) -> Piece:
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(0, self._config.vocab, (tokens,), generator=generator)
        return Piece(ids.tolist(), 0, 1 + i, self.pages(i))

    def decode_step(self, context: int) -> list[Piece]:
        """The next token of every sequence on top of `context` cached ones."""
        return [Piece([7], context, 1 + i, self.pages(i)) for i in range(self._batch)]

    def build(self, pieces: list[Piece]) -> ForwardBatch:
        return ForwardBatch.build(pieces, PAGE_TOKENS, self.storage.device)
