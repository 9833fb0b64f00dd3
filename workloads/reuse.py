"""Prefix reuse computed offline: what a cache of whole blocks would have hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from workloads.request import Request

_Block = int | tuple[str, int]


class PrefixCache:
    """A cache of full prefix blocks, without bound or least recently used within `max_blocks`.

    A hit is the longest run of held blocks from the start of the prompt, whole blocks only, and at
    most input_tokens - 1 (the last token is always computed). A tenant meets its own blocks only.
    """

    __slots__ = ("_held", "evicted_blocks", "max_blocks")

    def __init__(self, max_blocks: int | None = None) -> None:
        self.max_blocks = max_blocks
        self.evicted_blocks = 0
        self._held: OrderedDict[_Block, None] = OrderedDict()

    def hit_tokens(self, request: Request) -> int:
        """Tokens of the prompt that are held. Changes nothing."""
        if not request.block_ids:
            return 0
        held = self._held
        limit = (request.input_tokens - 1) // request.block_tokens
        depth = 0
        for block in _blocks(request, limit):
            if block not in held:
                break
            depth += 1
        return depth * request.block_tokens

    def insert(self, request: Request) -> None:
        """Hold the full blocks of the prompt, its first block the most recently used."""
        if not request.block_ids:
            return
        held = self._held
        full = request.input_tokens // request.block_tokens
        if self.max_blocks is None:
            held.update(dict.fromkeys(_blocks(request, full)))
            return
        for block in reversed(_blocks(request, full)):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.max_blocks:
            held.popitem(last=False)
            self.evicted_blocks += 1

    def serve(self, request: Request) -> int:
        """The hit of `request`, whose blocks are held from now on."""
        hit = self.hit_tokens(request)
        self.insert(request)
        return hit


def _blocks(request: Request, count: int) -> Sequence[_Block]:
    """The first `count` blocks by the names under which they are held."""
    ids, tenant = request.block_ids[:count], request.tenant
    return [(tenant, block) for block in ids] if tenant else ids
