"""One view of who holds which prefix, fed by the events of all pools.

A holder is a cluster whose instances share a pool, or an instance with a pool of its own. The
directory knows keys of blocks and whether a recurrent state was kept at a block's end, no tokens.
It is a hint: events may be lost, late or doubled, and what it remembers is bounded, so an answer
may be wrong in both directions. Who prefills says what it really reused (`correct`).

Each key has one bit a holder, for either kind of memory, so that one walk along a prompt's blocks
finds what every holder has of it, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from engine.cache.keys import keys_of_ids
from engine.cache.pool import CacheEvent, Group
from workloads.request import Request


@lru_cache(maxsize=4096)
def tenant_base(tenant: str) -> int:
    """What `keys_of_ids` puts before each id: with it the key of block id 0."""
    return keys_of_ids((0,), tenant)[0]


class _Entries:
    """Masks by key, bounded: the keys used least recently are forgotten, half of them at a time.

    Two generations instead of a linked order: what is used moves to the young one, and when that
    has half of the bound the old one goes. A lookup costs a dictionary access and no reordering.
    """

    __slots__ = ("_half", "old", "young")

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self.young: dict[int, int] = {}
        self.old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    def get(self, key: int) -> int:
        mask = self.young.get(key)
        if mask is None:
            mask = self.old.pop(key, 0)
            if mask:
                self._keep(key, mask)
        return mask

    def set(self, key: int, mask: int) -> None:
        """`mask` 0 forgets the key."""
        if not mask:
            self.young.pop(key, None)
            self.old.pop(key, None)
        elif key in self.young:
            self.young[key] = mask
        else:
            self.old.pop(key, None)
            self._keep(key, mask)

    def _keep(self, key: int, mask: int) -> None:
        if len(self.young) >= self._half:
            self.old = self.young
            self.young = {}
        self.young[key] = mask

    def clear_bits(self, bits: int) -> None:
        for generation in (self.young, self.old):
            for key in [key for key, mask in generation.items() if mask & bits]:
                mask = generation[key] & ~bits
                if mask:
                    generation[key] = mask
                else:
                    del generation[key]


class _Found:
    """What one walk found: masks of holders by depth in blocks, deepest first."""

    __slots__ = ("joint", "keys", "kv", "request", "version")

    def __init__(self, request: Request, version: int) -> None:
        self.request = request
        self.version = version
        self.joint: list[tuple[int, int]] = []
        self.kv: list[tuple[int, int]] = []


class PrefixDirectory:
    """Implements harness.view.PrefixHits. Remembers at most `max_entries` keys of each kind."""

    def __init__(self, max_entries: int = 1_000_000) -> None:
        self._kv = _Entries(max_entries)
        self._states = _Entries(max_entries)
        self._bit: dict[str, int] = {}
        self._names: list[str] = []
        self._shared: dict[str, str] = {}
        self._cluster_bits: dict[str, int] = {}
        self._version = 0
        self._found: _Found | None = None

    # Holders and what they say ------------------------------------------------------------------

    def add_cluster(self, cluster: str, instances: Sequence[str]) -> None:
        """The instances of `cluster` share one pool, which is the holder `cluster`."""
        self._add(cluster, cluster)
        for instance in instances:
            self._shared[instance] = cluster

    def add_instance(self, instance: str, cluster: str) -> None:
        """`instance` has a pool of its own."""
        self._add(instance, cluster)

    def _add(self, holder: str, cluster: str) -> None:
        bit = self._bit[holder] = 1 << len(self._names)
        self._names.append(holder)
        self._cluster_bits[cluster] = self._cluster_bits.get(cluster, 0) | bit

    def event(self, holder: str, event: CacheEvent) -> None:
        """An entry appeared in the pool of `holder`, or went. In any order, any number of times."""
        entries = self._kv if event.group is Group.KV else self._states
        bit, mask = self._bit[holder], entries.get(event.key)
        changed = mask | bit if event.stored else mask & ~bit
        if changed != mask:
            entries.set(event.key, changed)
            self._version += 1

    def forget(self, holder: str) -> None:
        """The memory of `holder` is lost."""
        bit = self._bit[holder]
        self._kv.clear_bits(bit)
        self._states.clear_bits(bit)
        self._version += 1

    def correct(self, holder: str, request: Request, reused_tokens: int) -> None:
        """`holder` could start only from `reused_tokens`: states beyond are not there."""
        first = reused_tokens // request.block_tokens
        bit = self._bit[holder]
        for key in keys_of_ids(request.block_ids, request.tenant)[first:]:
            self._states.set(key, self._states.get(key) & ~bit)
        self._version += 1

    def __len__(self) -> int:
        """Keys remembered, both kinds."""
        return len(self._kv) + len(self._states)

    # What a policy asks -------------------------------------------------------------------------

    def hit_tokens(self, cluster: str, request: Request) -> int:
        """Tokens that the best pool of `cluster` could start a prefill from."""
        return self._deepest(self._walk(request).joint, self._cluster_bits.get(cluster, 0), request)

    def instance_tokens(self, instance: str, request: Request) -> int:
        bit = self._bit.get(self._shared.get(instance, instance), 0)
        return self._deepest(self._walk(request).joint, bit, request)

    def held_tokens(self, cluster: str, request: Request) -> int:
        """Tokens whose attention blocks are in a pool of `cluster`, whole blocks."""
        return self._deepest(self._walk(request).kv, self._cluster_bits.get(cluster, 0), request)

    def instance_held_tokens(self, instance: str, request: Request) -> int:
        bit = self._bit.get(self._shared.get(instance, instance), 0)
        return self._deepest(self._walk(request).kv, bit, request)

    def holders(self, cluster: str, request: Request, most: int) -> list[tuple[str, int]]:
        """Up to `most` instances of `cluster` that hold a prefix, the longest first."""
        if cluster in self._bit:
            return []
        bits = self._cluster_bits.get(cluster, 0)
        found: list[tuple[str, int]] = []
        for depth, mask in self._walk(request).joint:
            mask &= bits
            while mask and len(found) < most:
                lowest = mask & -mask
                name = self._names[lowest.bit_length() - 1]
                found.append((name, depth * request.block_tokens))
                mask ^= lowest
            if len(found) == most:
                break
        return found

    def _deepest(self, depths: list[tuple[int, int]], bits: int, request: Request) -> int:
        for depth, mask in depths:
            if mask & bits:
                return depth * request.block_tokens
        return 0

    def _walk(self, request: Request) -> _Found:
        """What all holders have of the prompt; remembered for the questions of one decision."""
        found = self._found
        if found is not None and found.request is request and found.version == self._version:
            return found
        found = self._found = _Found(request, self._version)
        if not request.block_tokens:
            return found
        salt = tenant_base(request.tenant)
        keys = [salt | block_id for block_id in request.block_ids]
        full = min(len(keys), request.input_tokens // request.block_tokens)
        usable = min(full, (request.input_tokens - 1) // request.block_tokens)
        alive = -1
        # Almost every key is young, and most blocks have no state: look without a call. Where the
        # generations change on the way, what is in neither of these is found by the call.
        young_kv, young_states, old_states = self._kv.young, self._states.young, self._states.old
        get_kv, get_state = self._kv.get, self._states.get
        joint: list[tuple[int, int]] = []
        kv: list[tuple[int, int]] = []
        for depth, key in enumerate(keys[:full], 1):
            mask = young_kv.get(key)
            still = alive & (get_kv(key) if mask is None else mask)
            if still != alive and depth > 1:
                kv.append((depth - 1, alive & ~still))
            alive = still
            if not alive:
                break
            if depth <= usable:
                mask = young_states.get(key)
                if mask is None and key in old_states:
                    mask = get_state(key)
                if mask and mask & alive:
                    joint.append((depth, mask & alive))
        else:
            if full:
                kv.append((full, alive))
        kv.reverse()
        found.kv = kv
        # Of each holder the deepest state counts: shallower mentions of it go.
        seen = 0
        deepest: list[tuple[int, int]] = []
        for depth, mask in reversed(joint):
            mask &= ~seen
            if mask:
                deepest.append((depth, mask))
                seen |= mask
        found.joint = deepest
        return found
