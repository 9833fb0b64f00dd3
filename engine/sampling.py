"""From logits to a token: greedy, or drawn so that seed and position alone fix the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sequence import Sampling


def sample(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token id a row of `logits` [N, vocab]. `positions` are those of the tokens to be drawn.

    A draw depends on nothing else, so a preempted or handed-over request goes on as it would have.
    """
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0:
            generator = torch.Generator().manual_seed(_stream(sampling.seed, position))
            scaled = logits[row].to("cpu", torch.float64) / sampling.temperature
            uniform = torch.rand(scaled.shape, generator=generator, dtype=torch.float64)
            # The largest of logit + Gumbel noise is a draw from the softmax.
            noise = -torch.log(-torch.log(uniform.clamp_min(1e-300)))
            tokens[row] = int((scaled + noise).argmax())
    return tokens


def _stream(seed: int, position: int) -> int:
    """A 63-bit generator seed; multipliers are odd, so equal positions of unlike seeds differ."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 1) & (1 << 64) - 1
    return (mixed ^ (mixed >> 31)) & (1 << 63) - 1
