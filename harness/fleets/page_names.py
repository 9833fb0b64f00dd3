"""What a worker's cache pages are called in the workload's prefix blocks.

A worker names a page by a hash of its tokens and all before them; a request names its blocks by
ids. Both are chains, so a request whose prompt is known says which blocks end in which page.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.figures import Group
from engine.cache.keys import block_keys, keys_of_ids
from workloads.request import Request


class PageNames:
    """Pages of `engine_tokens`, each of which stands for `page_tokens` of the modelled system.

    At most `most` pages are remembered; those learned first are forgotten first.
    """

    def __init__(self, engine_tokens: int, page_tokens: int, most: int) -> None:
        self._engine_tokens = engine_tokens
        self._page_tokens = page_tokens
        self._most = most
        #: Page key -> directory keys of the blocks that end in it, and whether the last ends with
        #: it, where a state of the page is one of the block. In the order of learning.
        self._blocks: dict[int, tuple[tuple[int, ...], bool]] = {}
        #: Pages learned so far, and what it was before each prompt, by its last whole block; in the
        #: order of learning. A prompt is known while no page of it can have been forgotten.
        self._count = 0
        self._learned: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def learn(self, request: Request, prompt: Sequence[int]) -> None:
        """`prompt` are the engine tokens of `request`."""
        size, page = request.block_tokens, self._page_tokens
        if not request.block_ids or not size:
            return
        names = keys_of_ids(request.block_ids, request.tenant)[: request.input_tokens // size]
        if not names or names[-1] in self._learned:
            return  # the last block names all before it
        pages = block_keys(prompt, self._engine_tokens, request.tenant)
        if pages:
            self._learned[names[-1]] = self._count
        for number, key in enumerate(pages, 1):
            first, end = (number - 1) * page // size, number * page // size
            inside = tuple(names[first:end])
            whole = bool(inside) and end * size == number * page and end <= len(names)
            self._blocks.pop(key, None)
            self._blocks[key] = inside, whole
            self._count += 1
        self._forget()

    def blocks(self, group: Group, page: int) -> Sequence[int]:
        """Directory keys that an entry of the worker's cache stands for; none where unknown."""
        inside, whole = self._blocks.get(page, ((), False))
        if group is Group.KV:
            return inside
        return inside[-1:] if whole else ()

    def _forget(self) -> None:
        while len(self._blocks) > self._most:
            del self._blocks[next(iter(self._blocks))]
        # Where more pages than are kept were learned since a prompt's first, that may be gone.
        oldest = self._count - self._most
        while self._learned and self._learned[name := next(iter(self._learned))] < oldest:
            del self._learned[name]
