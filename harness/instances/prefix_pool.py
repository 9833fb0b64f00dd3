"""The prefix pool of a modelled cluster: the engine's own accounting, without the memory.

All instances of a cluster share it, as the paper has it. What a request in flight holds is
accounted by the instances; here are only the blocks and states that others can reuse.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.keys import keys_of_ids
from engine.cache.pool import CacheEvent, HybridPool
from workloads.request import Request

#: Stands for a pool without bound.
_UNBOUNDED = 1 << 40


class PrefixPool:
    """At most `max_blocks` blocks and `max_states` recurrent states (None: no bound), least
    recently used first out. Blocks have the size of the first request that is kept; requests with
    blocks of another size are not kept.
    """

    def __init__(
        self,
        on_event: Callable[[CacheEvent], None],
        max_blocks: int | None = None,
        max_states: int | None = None,
        policy: CheckpointPolicy = CheckpointPolicy(),
    ) -> None:
        self.policy = policy
        self.max_blocks = _UNBOUNDED if max_blocks is None else max_blocks
        # One more: a lease keeps a slot for its live state, which here is never used.
        self.max_states = _UNBOUNDED if max_states is None else max_states + 1
        self._on_event = on_event
        self._pool: HybridPool | None = None

    def usable_tokens(self, request: Request) -> int:
        """What a prefill can start from: blocks up to the deepest state, not the last token."""
        pool = self._pool
        if pool is None or pool.block_tokens != request.block_tokens:
            return 0
        return pool.match(_keys(request), request.input_tokens).tokens

    def held_tokens(self, request: Request) -> int:
        """Tokens whose attention blocks are here."""
        pool = self._pool
        if pool is None or pool.block_tokens != request.block_tokens:
            return 0
        return pool.match(_keys(request), request.input_tokens).kv_tokens

    def keep_computed(self, request: Request, cached_tokens: int) -> None:
        """A prompt was prefilled here from `cached_tokens` on, with states where `policy` says."""
        if request.block_ids:
            matched = self.held_tokens(request)
            wanted = self.policy.boundaries(
                cached_tokens, matched, request.input_tokens, request.block_tokens
            )
            self._keep(request, request.input_tokens, wanted)

    def keep_received(self, request: Request, tokens: int, state_at: int = 0) -> None:
        """The attention blocks of the first `tokens` came, and the state at `state_at` if not 0."""
        if request.block_ids:
            self._keep(request, tokens, [state_at] if state_at else [])

    def _keep(self, request: Request, tokens: int, states_at: list[int]) -> None:
        size = request.block_tokens
        pool = self._pool
        if pool is None:
            pool = self._pool = HybridPool(
                self.max_blocks, self.max_states, size, on_event=self._on_event
            )
        if pool.block_tokens != size:
            return
        keys = _keys(request)[: min(tokens // size, self.max_blocks)]
        if not keys:
            return
        whole = len(keys) * size
        lease = pool.acquire(keys, whole, arriving=True)
        for boundary in states_at:
            if size <= boundary <= whole:
                lease.reserve_checkpoint(boundary)
        lease.commit(whole)
        lease.release()


def _keys(request: Request) -> list[int]:
    return keys_of_ids(request.block_ids, request.tenant)
