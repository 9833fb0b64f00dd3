"""A modelled instance: a device profile in place of a device. Implements harness.ports.Instance.

Runs on any loop; on the virtual one (`harness.clock`) an hour passes in seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from harness.instances.modelled_batch import StepTimes
from harness.instances.modelled_decode import DecodeStage, DecodeWork
from harness.instances.modelled_prefill import PrefillRules, PrefillStage, PrefillWork
from harness.instances.modelled_steps import SteppedBatch
from harness.instances.prefix_pool import PrefixPool
from harness.links.fluid import FluidLink
from harness.ports import (
    DecodeJob,
    InstanceLost,
    InstanceSpec,
    PrefillJob,
    Role,
)
from native import require
from workloads.request import Request

try:
    require("harness.instances._modelled_macro")
    from harness.instances._modelled_macro import MacroBatch
except ImportError:
    from harness.instances.modelled_macro import MacroBatch

# Looked up several times a request; an enumeration's attributes are slow to find.
_PREFILL, _DECODE = Role.PREFILL, Role.DECODE


class DeviceProfile(Protocol):
    """What a modelled instance reads of a device profile (see `harness.profiles`): seconds, bytes
    of a whole cache, and steps of a batch with all its context in tokens."""

    @property
    def n_layers(self) -> int: ...

    @property
    def max_batch(self) -> int: ...

    @property
    def kv_memory_bytes(self) -> float | None: ...

    def prefill_s(self, input_tokens: float, cached_tokens: float = 0) -> float: ...

    def kv_bytes(self, tokens: float, held_tokens: float = 0) -> float: ...

    def decode_step_s(self, batch: int, context_tokens: float) -> float: ...


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """Decode steps are looked up by total context in buckets of `context_bucket_tokens`.
    `step_by_step` has an event for every step: the same times, for checking, thirty times slower.
    """

    context_bucket_tokens: int = 16_384
    step_by_step: bool = False


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What an instance holds at a moment. All zero when it holds nothing."""

    prefill_queued: int
    prefill_computing: int
    prefill_sending: int
    sending_bytes: float
    caches_incoming: int
    decode_waiting: int
    decode_active: int
    kv_used_bytes: float
    kv_waiting: int


class ModelledInstance:
    """`conversion_s` is the time a change of role takes after the drain. `on_serving` is told when
    the instance dies (False) and is back (True), as a health check would tell. `prefixes` is the
    pool that it shares with its cluster: what a job counts on and is not there is computed, or
    crosses the link. `steps` are those of its profile, made here if nobody shares them."""

    __slots__ = (
        "_decode",
        "_draining",
        "_loop",
        "_on_serving",
        "_prefill",
        "conversion_s",
        "lost_because",
        "prefixes",
        "role",
        "spec",
    )

    def __init__(
        self,
        spec: InstanceSpec,
        profile: DeviceProfile,
        prefill: PrefillRules = PrefillRules(),
        decode: DecodeRules = DecodeRules(),
        conversion_s: float = 0.0,
        on_serving: Callable[[InstanceSpec, bool], None] | None = None,
        prefixes: PrefixPool | None = None,
        steps: StepTimes | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self.role = spec.role
        self.conversion_s = conversion_s
        self.prefixes = prefixes
        self.lost_because = ""
        self._on_serving = on_serving
        self._loop = loop
        self._draining: asyncio.Future[None] | None = None
        self._prefill = PrefillStage(spec.name, profile, loop, prefill)
        self._decode: DecodeStage | None = None
        if profile.max_batch > 0:
            if steps is None:
                steps = StepTimes(profile, decode.context_bucket_tokens)
            batch = (SteppedBatch if decode.step_by_step else MacroBatch)(
                loop, steps, profile.max_batch
            )
            self._decode = DecodeStage(spec.name, profile, loop, batch)

    # Work ---------------------------------------------------------------------------------------

    def prefill(self, job: PrefillJob) -> PrefillWork:
        """Queue, compute and push; see harness.ports.Instance. Starts at once, awaited or not."""
        if self.lost_because or self._draining is not None or self.role is not _PREFILL:
            raise self._refusal(_PREFILL)
        destination, link = job.destination, job.link
        assert isinstance(destination, ModelledInstance)
        assert link is None or isinstance(link, FluidLink)
        if job.request.block_ids:
            self._check_counted_on(job, destination)
        return self._prefill.submit(job, destination.decode_stage(), link)

    def decode(self, job: DecodeJob) -> DecodeWork:
        """Admit and decode; see harness.ports.Instance. Starts at once, awaited or not."""
        if self.lost_because:
            raise InstanceLost(self.spec.name, self.lost_because)
        if self._decode is None:
            raise InstanceLost(self.spec.name, "its profile has no decode")
        return self._decode.submit(job)

    def decode_stage(self) -> DecodeStage:
        """Where caches for this instance go. Raises InstanceLost when it takes none."""
        if self.lost_because or self._draining is not None or self.role is not _DECODE:
            raise self._refusal(_DECODE)
        if self._decode is None:
            raise InstanceLost(self.spec.name, "its profile has no decode")
        return self._decode

    def abandon(self, request: Request, attempt: int) -> None:
        """Drop the attempt here, wherever it is, and free all it has. Idempotent."""
        key = (request.id, attempt)
        self._prefill.abandon(key)
        if self._decode is not None:
            self._decode.forget(key)

    def load(self) -> InstanceLoad:
        """What it holds now, of both roles."""
        prefill, decode = self._prefill, self._decode
        return InstanceLoad(
            prefill_queued=prefill.queued,
            prefill_computing=int(prefill.computing),
            prefill_sending=prefill.sending,
            sending_bytes=prefill.held_bytes,
            caches_incoming=decode.incoming if decode else 0,
            decode_waiting=decode.batch.waiting if decode else 0,
            decode_active=decode.batch.active if decode else 0,
            kv_used_bytes=decode.memory.used_bytes if decode else 0.0,
            kv_waiting=decode.memory.waiting if decode else 0,
        )

    # Roles --------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Work that was accepted, and caches that were promised to come here, still run to their
        end; new ones raise InstanceLost, which is retryable."""
        if self._draining is None:
            self._draining = self._loop.create_future()
            self._watch(self._on_change)
            self._on_change()
        await asyncio.shield(self._draining)

    async def convert(self, role: Role) -> None:
        """An instance that dies on the way raises InstanceLost and keeps its role."""
        if role is Role.DECODE and self._decode is None:
            raise InstanceLost(self.spec.name, "its profile has no decode")
        await self.drain()
        await asyncio.sleep(self.conversion_s)
        if self.lost_because:
            raise InstanceLost(self.spec.name, self.lost_because)
        self.role = role
        self._draining = None
        self._watch(None)

    # Faults -------------------------------------------------------------------------------------

    def crash(self, why: str = "crashed") -> None:
        """All work fails with InstanceLost, and so do prompts elsewhere whose cache was to come
        here. Nothing is accepted until `restart`. Idempotent."""
        if self.lost_because:
            return
        self.lost_because = why
        if self._on_serving is not None:
            self._on_serving(self.spec, False)
        draining, self._draining = self._draining, None
        self._watch(None)
        self._prefill.lose_all(why)
        if self._decode is not None:
            self._decode.lose_all(why)
        if draining is not None and not draining.done():
            draining.set_exception(InstanceLost(self.spec.name, why))

    def restart(self) -> None:
        """Empty, at full speed, and in the role it had."""
        if not self.lost_because:
            return
        self.lost_because = ""
        self.slow(1.0)
        if self._on_serving is not None:
            self._on_serving(self.spec, True)

    def slow(self, factor: float) -> None:
        """Everything takes `factor` times its time from now on (decode: from the next step on)."""
        self._prefill.slow(factor)
        if self._decode is not None:
            self._decode.batch.slow(factor)

    def pause(self) -> None:
        """Freeze (as SIGSTOP does): nothing fails, nothing moves. Bytes that were computed before
        still cross the link, and memory is still granted."""
        self._prefill.pause()
        if self._decode is not None:
            self._decode.batch.pause()

    def resume(self) -> None:
        """Go on where `pause` stopped. Idempotent."""
        self._prefill.resume()
        if self._decode is not None:
            self._decode.batch.resume()

    # --------------------------------------------------------------------------------------------

    def _refusal(self, role: Role) -> InstanceLost:
        """Why it takes no work of `role`."""
        why = self.lost_because or (
            f"serves {self.role}, not {role}" if self._draining is None else "draining"
        )
        return InstanceLost(self.spec.name, why)

    def _check_counted_on(self, job: PrefillJob, destination: ModelledInstance) -> None:
        """A prefix directory may be wrong; the pools are not."""
        request = job.request
        here, there = self.prefixes, destination.prefixes
        usable = 0 if here is None else here.usable_tokens(request)
        held = 0 if there is None else there.held_tokens(request)
        job.cached_tokens = min(job.cached_tokens, usable)
        job.held_tokens = min(job.held_tokens, held)

    def _watch(self, on_change: Callable[[], None] | None) -> None:
        """Call `on_change` whenever work leaves."""
        self._prefill.on_change = on_change
        if self._decode is not None:
            self._decode.on_change = on_change

    def _on_change(self) -> None:
        draining = self._draining
        if (
            draining is not None
            and not draining.done()
            and self._prefill.idle
            and (self._decode is None or self._decode.idle)
        ):
            draining.set_result(None)
