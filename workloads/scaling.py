"""The scale model's tokens: one engine token stands for `token_scale` tokens of the system."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from workloads.errors import InputError
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Turns requests of the modelled system into requests for a small engine.

    Blocks are regrouped so that a scaled block is a whole number of engine tokens: `group` blocks
    of b tokens become one of b * group / token_scale. With 512-token blocks at 64 that is one block
    of 8; with 16-token blocks, four make one of 1. A group takes the id of its last block, which
    (ids being chains) names all of it: scaled blocks are shared exactly where all theirs were.
    """

    token_scale: int

    def __post_init__(self) -> None:
        if self.token_scale < 1:
            raise InputError(f"token_scale: found {self.token_scale}, needs at least 1")

    def tokens(self, system_tokens: int) -> int:
        """Engine tokens that stand for `system_tokens`: rounded up, at least 1."""
        return max(1, -(-system_tokens // self.token_scale))

    def group(self, block_tokens: int) -> int:
        """How many blocks of `block_tokens` make one scaled block."""
        return self.token_scale // math.gcd(self.token_scale, block_tokens)

    def request(self, request: Request) -> Request:
        """`request` in engine tokens. Its arrival and names stay as they are."""
        block_ids, block_tokens = request.block_ids, request.block_tokens
        if block_ids:
            group = self.group(block_tokens)
            if group > 1:
                ends = block_ids[group - 1 :: group]
                # A last, partial group has an id only if its blocks reach the prompt's end.
                covered = len(block_ids) * block_tokens >= request.input_tokens
                if covered and len(ends) * group < len(block_ids):
                    ends = (*ends, block_ids[-1])
                block_ids = ends
            block_tokens = block_tokens * group // self.token_scale if block_ids else 0
        return replace(
            request,
            input_tokens=self.tokens(request.input_tokens),
            output_tokens=self.tokens(request.output_tokens),
            block_ids=block_ids,
            block_tokens=block_tokens,
        )
