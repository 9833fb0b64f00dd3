"""Accounting of the hybrid cache: pages of attention latents and slots of recurrent state, as one.

*Prefix-cache* blocks are full, aligned, named by a key, counted by reference and shared; unused
ones stay until evicted, least recently used first. *Transfer-cache* blocks are a lease's own pages
of any fill, freed with it. A checkpoint is a state slot attached to the prefix-cache block at whose
end it was taken.

Invariants:
- A lease's shared blocks are a prefix of its pages, pinned as long as it lives. So a block is never
  evicted before those that follow it in its chain, and what is found by walking keys is whole.
- A checkpoint never outlives its block, and its slot stays put while it is being copied from.
- A page or slot is in exactly one place: free, cached, or owned by one lease.

Knows numbers only, never memory: the engine's storage and the simulator both sit on top of it. Not
thread-safe; one event loop owns a pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.figures import CacheEvent, Group, GroupFigures, Hit
from engine.cache.lease import Block, Lease, Pin
from engine.cache.numbers import Numbers

__all__ = [
    "CacheEvent",
    "Group",
    "GroupFigures",
    "Hit",
    "HybridPool",
    "Lease",
    "NeverFits",
    "Pin",
    "PoolFull",
]


class PoolFull(Exception):
    """Not enough memory now; later, when leases have ended, there may be."""


class NeverFits(ValueError):
    """The request needs more memory than the whole pool has."""

    exit_code = 2


class HybridPool:
    """`pages` pages of `block_tokens` tokens and `slots` state slots, numbered from first_page and
    first_slot. `on_event` hears of each cached entry that appears or goes; `on_freed` of each page
    or slot that became free (tests poison it).
    """

    def __init__(
        self,
        pages: int,
        slots: int,
        block_tokens: int,
        *,
        policy: CheckpointPolicy = CheckpointPolicy(),
        first_page: int = 0,
        first_slot: int = 0,
        on_event: Callable[[CacheEvent], None] | None = None,
        on_freed: Callable[[Group, int], None] | None = None,
    ) -> None:
        if pages < 1 or slots < 1 or block_tokens < 1:
            raise NeverFits(
                f"a cache pool needs at least one page, one slot and one token a block, "
                f"not pages={pages}, slots={slots}, block_tokens={block_tokens}"
            )
        self.block_tokens = block_tokens
        self.policy = policy
        self._pages = Numbers(first_page, pages)
        self._slots = Numbers(first_slot, slots)
        self._blocks: dict[int, Block] = {}
        self._idle: OrderedDict[int, Block] = OrderedDict()
        self._states: OrderedDict[int, Block] = OrderedDict()
        self._kv = GroupFigures(pages)
        self._state = GroupFigures(slots)
        self._on_event = on_event
        self._on_freed = on_freed
        self.leases = 0

    @property
    def page_capacity(self) -> int:
        return self._kv.capacity

    # -- looking up

    def match(self, keys: Sequence[int], prompt_tokens: int) -> Hit:
        """What a prompt of `prompt_tokens` whose full blocks are `keys` would find now."""
        chain = self._walk(keys, prompt_tokens)
        return Hit(len(chain) * self.block_tokens, self._usable(chain, prompt_tokens))

    def figures(self) -> dict[Group, GroupFigures]:
        """Counters (live objects) and occupancy (refreshed by this call) of each group."""
        kv, state = self._kv, self._state
        kv.free, kv.cached = len(self._pages), len(self._blocks)
        kv.pinned = kv.cached - len(self._idle)
        kv.owned = kv.capacity - kv.free - kv.cached
        state.free, state.cached = len(self._slots), len(self._states)
        state.pinned = sum(1 for block in self._states.values() if block.readers)
        state.owned = state.capacity - state.free - state.cached
        return {Group.KV: kv, Group.STATE: state}

    def entries(self) -> Iterator[CacheEvent]:
        """What is cached now, as the events that would tell an empty directory of it: a block comes
        before those that follow it in its chain."""
        for key in self._blocks:
            yield CacheEvent(Group.KV, True, key)
        for key in self._states:
            yield CacheEvent(Group.STATE, True, key)

    def _walk(self, keys: Sequence[int], prompt_tokens: int) -> list[Block]:
        """The cached blocks at the front of `keys`, as far as the prompt fills them."""
        chain: list[Block] = []
        get = self._blocks.get
        for key in keys[: prompt_tokens // self.block_tokens]:
            block = get(key)
            if block is None:
                break
            chain.append(block)
        return chain

    def _usable(self, chain: list[Block], prompt_tokens: int) -> int:
        for index in range(min(len(chain), (prompt_tokens - 1) // self.block_tokens), 0, -1):
            if chain[index - 1].slot >= 0:
                return index * self.block_tokens
        return 0

    # -- leases

    def acquire(
        self,
        keys: Sequence[int],
        prompt_tokens: int,
        *,
        capacity_tokens: int = 0,
        arriving: bool = False,
    ) -> Lease:
        """Memory for a prompt of `prompt_tokens` (or `capacity_tokens`, if more) and one state.

        Reuses the joint hit; with `arriving`, where the state comes from elsewhere, every matching
        block.
        Raises PoolFull or NeverFits, and then nothing has changed.
        """
        size = self.block_tokens
        total = -(-max(prompt_tokens, capacity_tokens) // size)
        if total > self._kv.capacity:
            raise NeverFits(
                f"{max(prompt_tokens, capacity_tokens)} tokens need {total} pages "
                f"of {size}; the pool has {self._kv.capacity}"
            )
        chain = self._walk(keys, prompt_tokens)
        usable = self._usable(chain, prompt_tokens)
        hit = Hit(len(chain) * size, usable)
        shared = chain if arriving else chain[: usable // size]
        self._pin_blocks(shared)
        lease = Lease(self, list(keys), hit, shared)
        source = shared[-1] if shared and not arriving else None
        if total - len(shared) > len(self._pages) + len(self._idle):
            self._unpin(shared)
            raise PoolFull(f"{total - len(shared)} pages wanted")
        if source is not None:
            self._states.move_to_end(source.key)
            source.readers += 1
        lease.slot = self._take_slot()
        if lease.slot < 0 and source is not None and source.readers == 1:
            # Its own checkpoint holds the last slot: the lease takes it over instead of a copy.
            lease.slot = source.slot
            self._detach(source)
            source.readers = 0
        elif lease.slot < 0:
            if source is not None:
                source.readers -= 1
            self._unpin(shared)
            raise PoolFull("a state slot wanted")
        elif source is not None:
            lease.copy_from = source.slot
            lease._copied_block = source
        self._add_pages(lease, total)
        queried = len(keys) * size
        self._kv.lookup_tokens += queried
        self._state.lookup_tokens += queried
        self._kv.hit_tokens += hit.kv_tokens
        self._state.hit_tokens += usable
        self.leases += 1
        return lease

    def pin(self, keys: Sequence[int]) -> Pin | None:
        """The blocks of `keys` and the checkpoint at their end; None unless all of it is here."""
        chain = self._walk(keys, len(keys) * self.block_tokens)
        if not chain or len(chain) < len(keys) or chain[-1].slot < 0:
            return None
        self._pin_blocks(chain)
        end = chain[-1]
        end.readers += 1
        self._states.move_to_end(end.key)
        self.leases += 1
        return Pin(self, chain)

    def _extend(self, lease: Lease, n_tokens: int) -> None:
        total = -(-n_tokens // self.block_tokens)
        if total > self._kv.capacity:
            raise NeverFits(
                f"{n_tokens} tokens need {total} pages of {self.block_tokens}; "
                f"the pool has {self._kv.capacity}"
            )
        if total - len(lease.pages) > len(self._pages) + len(self._idle):
            raise PoolFull(f"{total - len(lease.pages)} pages wanted")
        self._add_pages(lease, total)

    def _add_pages(self, lease: Lease, total: int) -> None:
        pages, numbers = lease.pages, self._pages
        wanted = total - len(pages)
        for _ in range(min(wanted, len(numbers))):
            pages.append(numbers.take())
        while len(pages) < total:
            pages.append(self._evict())

    def _commit(self, lease: Lease, n_tokens: int) -> None:
        size = self.block_tokens
        full = min(n_tokens // size, len(lease.keys))
        shared, blocks, first = lease._shared, self._blocks, len(lease._shared)
        if lease._sharing and first < full:
            for key, page in zip(lease.keys[first:full], lease.pages[first:full], strict=True):
                if key in blocks:
                    # Another sequence computed the same block meanwhile. This one keeps its own
                    # copy: a block table never changes under a reader, and a chain stays pinned
                    # as a whole.
                    lease._sharing = False
                    break
                blocks[key] = block = Block(key, page)
                shared.append(block)
            self._kv.stored += len(shared) - first
            if self._on_event is not None:
                for block in shared[first:]:
                    self._tell(Group.KV, True, block.key)
        for boundary in [n for n in lease._pending if n <= n_tokens]:
            slot = lease._pending.pop(boundary)
            held = blocks.get(lease.keys[boundary // size - 1])
            if held is None or held.slot >= 0:
                self._free_slot(slot)
                continue
            held.slot = slot
            self._states[held.key] = held
            self._state.stored += 1
            self._tell(Group.STATE, True, held.key)

    def _release(self, lease: Lease) -> None:
        lease.released = True
        lease.copied()
        for slot in lease._pending.values():
            self._free_slot(slot)
        lease._pending.clear()
        if lease.slot >= 0:
            self._free_slot(lease.slot)
        own = lease.pages[len(lease._shared) :]
        self._pages.give(own)
        if self._on_freed is not None:
            for page in own:
                self._on_freed(Group.KV, page)
        self._unpin(lease._shared)
        self.leases -= 1

    def _pin_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.refs:
                del self._idle[block.key]
            block.refs += 1

    def _unpin(self, blocks: list[Block]) -> None:
        """Deepest first, so that the end of a chain is evicted before its beginning."""
        idle = self._idle
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                idle[block.key] = block

    # -- memory

    def _take_slot(self) -> int:
        """A free slot, if need be the least recently used checkpoint's; -1: all are in use."""
        if not len(self._slots):
            for block in self._states.values():
                if not block.readers:
                    slot = block.slot
                    self._detach(block)
                    self._free_slot(slot)
                    break
            else:
                return -1
        return self._slots.take()

    def _detach(self, block: Block) -> None:
        block.slot = -1
        del self._states[block.key]
        self._state.evicted += 1
        self._tell(Group.STATE, False, block.key)

    def _evict(self) -> int:
        """Drop the least recently used idle block, with its checkpoint; returns its page."""
        key, block = self._idle.popitem(last=False)
        del self._blocks[key]
        if block.slot >= 0:
            slot = block.slot
            self._detach(block)
            self._free_slot(slot)
        self._kv.evicted += 1
        if self._on_freed is not None:
            self._on_freed(Group.KV, block.page)
        if self._on_event is not None:
            self._tell(Group.KV, False, key)
        return block.page

    def _free_slot(self, slot: int) -> None:
        self._slots.give((slot,))
        if self._on_freed is not None:
            self._on_freed(Group.STATE, slot)

    def _tell(self, group: Group, stored: bool, key: int) -> None:
        if self._on_event is not None:
            self._on_event(CacheEvent(group, stored, key))
