"""Who tells the prefix directory what is stored, by what stands behind the instances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.keys import keys_of_ids
from engine.cache.pool import CacheEvent, Group
from harness.directory import PrefixDirectory
from harness.instances.prefix_pool import PrefixPool
from harness.ports import InstanceSpec
from workloads.request import Request


class PrefixKeeper(Protocol):
    """Hears from the router what became of a prompt's cache."""

    def prefilled(
        self,
        request: Request,
        prefill: InstanceSpec,
        decode: InstanceSpec,
        expected_tokens: int,
        reused_tokens: int,
    ) -> None:
        """`prefill` computed the prompt from `reused_tokens` on (`expected_tokens` were thought to
        be there), and `decode` has its cache."""
        ...

    def copied(self, request: Request, sink: InstanceSpec, tokens: int) -> None:
        """The first `tokens` of the prompt and the state there were fetched for `sink`."""
        ...


class PoolKeeper:
    """Modelled clusters with one pool each, whose events feed the directory."""

    def __init__(self, pools: Mapping[str, PrefixPool]) -> None:
        self.pools = pools

    def prefilled(
        self,
        request: Request,
        prefill: InstanceSpec,
        decode: InstanceSpec,
        expected_tokens: int,
        reused_tokens: int,
    ) -> None:
        self.pools[prefill.cluster].keep_computed(request, reused_tokens)
        if decode.cluster != prefill.cluster:
            whole = request.input_tokens
            aligned = request.block_tokens and whole % request.block_tokens == 0
            self.pools[decode.cluster].keep_received(request, whole, whole if aligned else 0)

    def copied(self, request: Request, sink: InstanceSpec, tokens: int) -> None:
        self.pools[sink.cluster].keep_received(request, tokens, tokens)


class LearningKeeper:
    """Workers with a pool each that send no events: the router assumes what their pools do.

    A worker keeps the full blocks of what it computed, with states where `policy` puts them, and
    the blocks of what it received. Evictions are not seen; a prompt that could reuse less than was
    thought corrects the directory.
    """

    def __init__(self, directory: PrefixDirectory, policy: CheckpointPolicy) -> None:
        self._directory = directory
        self._policy = policy

    def prefilled(
        self,
        request: Request,
        prefill: InstanceSpec,
        decode: InstanceSpec,
        expected_tokens: int,
        reused_tokens: int,
    ) -> None:
        size = request.block_tokens
        if not size:
            return
        directory, tokens = self._directory, request.input_tokens
        if reused_tokens < expected_tokens:
            directory.correct(prefill.name, request, reused_tokens)
        matched = directory.instance_held_tokens(prefill.name, request)
        keys = keys_of_ids(request.block_ids, request.tenant)[: tokens // size]
        for holder in dict.fromkeys((prefill.name, decode.name)):
            for key in keys:
                directory.event(holder, CacheEvent(Group.KV, True, key))
        for boundary in self._policy.boundaries(reused_tokens, matched, tokens, size):
            index = boundary // size - 1
            if boundary % size == 0 and index < len(keys):
                directory.event(prefill.name, CacheEvent(Group.STATE, True, keys[index]))

    def copied(self, request: Request, sink: InstanceSpec, tokens: int) -> None:
        """Nothing is fetched here: `View.copies` is off."""
