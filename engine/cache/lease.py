"""What a pool hands out: blocks under a key, a sequence's memory, and a prefix held for reading.

The accounting itself is the pool's; these are its records, and the handles its users hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.cache.figures import Hit

if TYPE_CHECKING:
    from engine.cache.pool import HybridPool


class Block:
    """A prefix-cache block. `slot` is its checkpoint (-1: none), from which `readers` copy now."""

    __slots__ = ("key", "page", "readers", "refs", "slot")

    def __init__(self, key: int, page: int) -> None:
        self.key = key
        self.page = page
        self.refs = 1
        self.slot = -1
        self.readers = 0


class Lease:
    """The memory of one sequence. Made by `HybridPool.acquire`; ends with `release`.

    `pages` is the block table. `slot` holds the live state; before it is first used, the state in
    slot `copy_from` must be copied there (-1: nothing to copy) and `copied` called. The first
    `reused_tokens` need no computing (or, with `arriving`, no receiving).
    """

    __slots__ = (
        "_copied_block",
        "_pending",
        "_pool",
        "_shared",
        "_sharing",
        "copy_from",
        "hit",
        "keys",
        "pages",
        "released",
        "reused_tokens",
        "slot",
    )

    def __init__(self, pool: HybridPool, keys: list[int], hit: Hit, shared: list[Block]) -> None:
        self._pool = pool
        self.keys = keys
        self.hit = hit
        self._shared = shared
        self._sharing = True
        self.reused_tokens = len(shared) * pool.block_tokens
        self.pages = [block.page for block in shared]
        self.slot = -1
        self.copy_from = -1
        self._copied_block: Block | None = None
        self._pending: dict[int, int] = {}
        self.released = False

    def extend(self, n_tokens: int) -> None:
        """Make room for `n_tokens` in all. Raises PoolFull (nothing changes) or NeverFits."""
        self._pool._extend(self, n_tokens)

    def copied(self) -> None:
        """The state has been copied from `copy_from`; its checkpoint may go."""
        block = self._copied_block
        if block is not None:
            block.readers -= 1
            self._copied_block = None
        self.copy_from = -1

    def reserve_checkpoint(self, n_tokens: int) -> int:
        """A slot to copy the state at `n_tokens` into; -1 when there is none to be had.

        It becomes a checkpoint when `commit` reaches `n_tokens`.
        """
        assert n_tokens % self._pool.block_tokens == 0
        if n_tokens in self._pending or n_tokens // self._pool.block_tokens > len(self.keys):
            return -1
        slot = self._pool._take_slot()
        if slot >= 0:
            self._pending[n_tokens] = slot
        return slot

    def commit(self, n_tokens: int) -> None:
        """`n_tokens` are computed (or have arrived): share the full blocks among them that have
        keys, and attach the checkpoints reserved up to there.
        """
        self._pool._commit(self, n_tokens)

    def keep_state(self, n_tokens: int) -> None:
        """The live state is the one at `n_tokens`: the next commit up to there makes it a
        checkpoint. Nothing is computed on this lease any more.
        """
        assert n_tokens % self._pool.block_tokens == 0 and n_tokens not in self._pending
        self._pending[n_tokens] = self.slot
        self.slot = -1

    def release(self) -> None:
        """Give everything back; shared blocks stay cached. Only once."""
        assert not self.released, "a lease is released once"
        self._pool._release(self)


class Pin:
    """A cached prefix that stays as it is while somebody reads it: `pages`, and the checkpoint at
    their end in `slot`. Made by `HybridPool.pin`; ends with `release`.
    """

    __slots__ = ("_chain", "_pool", "pages", "slot")

    def __init__(self, pool: HybridPool, chain: list[Block]) -> None:
        self._pool = pool
        self._chain = chain
        self.pages = [block.page for block in chain]
        self.slot = chain[-1].slot

    def release(self) -> None:
        """Only once."""
        self._chain[-1].readers -= 1
        self._pool._unpin(self._chain)
        self._pool.leases -= 1
        self._chain = []
