"""Sends finished caches to other workers and receives theirs, over the data plane.

The prompt travels in the offer, so that the receiver can find what it holds already, share the
blocks that arrive, and compute the prompt again should the request be preempted. Prefixes, which
belong to no request, go through the same data plane (`engine.worker.prefixes`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.cache.keys import block_keys
from engine.cache.pool import HybridPool, Lease, NeverFits, PoolFull
from engine.model.layout import CacheLayout
from engine.pacing import layer_due_s, sleep_until
from engine.scheduler import Scheduler
from engine.transport import client
from engine.transport.client import Callbacks, DataPlane, Refusal, Transfer
from engine.transport.codec import RAW
from engine.transport.errors import TransferRefused, TransportError
from engine.transport.messages import Key as WireKey
from engine.transport.messages import Manifest
from engine.transport.outbound import Peer
from engine.transport.regions import Kind, Region
from engine.transport.settings import Settings
from engine.worker.arrivals import Arrivals
from engine.worker.engine import Job
from engine.worker.errors import Rejected, TransferFailed
from engine.worker.media import Medium, Parcel, Ranges
from engine.worker.messages import Destination, Key, PrefillRequest, PrefixRequest
from engine.worker.offers import HELD, describe, held_instead, prompt_of
from engine.worker.prefixes import PURPOSE, Prefixes, PrefixSent
from engine.worker.settling import until_done

log = logging.getLogger(__name__)

#: How often an offer that finds no memory tries again, until the data plane gives up on it.
RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class Delivery:
    """`delivered_s`: when the destination had committed the cache (CLOCK_MONOTONIC, as the sender
    learned it). `reused_tokens` of the prompt (engine tokens) were not computed.
    """

    delivered_s: float
    wire_bytes: int
    reused_tokens: int


class Courier:
    """Both directions of one worker. All memory goes through `pool` and `arrivals`."""

    def __init__(
        self,
        layout: CacheLayout,
        medium: Medium,
        pool: HybridPool,
        scheduler: Scheduler,
        arrivals: Arrivals,
        settings: Settings,
        state_codec: str = RAW,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` hears of each prefix that has left or arrived."""
        self._layout = layout
        self._medium = medium
        self._pool = pool
        self._scheduler = scheduler
        self._arrivals = arrivals
        self._settings = settings
        self._codecs = {} if state_codec == RAW else {Kind.STATE: state_codec}
        self._plane: DataPlane | None = None
        self._inbound: dict[Key, Parcel] = {}
        # A state that many prompts will start from crosses as it is, whatever the codec.
        self.prefixes = Prefixes(layout, medium, pool, on_change)
        #: Set while this worker takes caches; offers at other times are refused.
        self.receiving = False
        self._sent_bytes = 0
        self.received = 0

    async def start(self, arena: Any) -> None:
        """Raises TransportError where the address cannot be had."""
        callbacks = Callbacks(self._on_offer, self._on_commit, self._on_abort)
        self._plane = await DataPlane.start(arena, self._settings, callbacks)

    async def stop(self) -> None:
        if self._plane is not None:
            await self._plane.close()

    @property
    def plane(self) -> DataPlane:
        assert self._plane is not None, "the courier is not started"
        return self._plane

    @property
    def sent_bytes(self) -> int:
        """Of all that was delivered, prefixes included, as it crossed."""
        return self._sent_bytes + self.prefixes.sent_bytes

    # -- sending

    async def send(self, request: PrefillRequest, job: Job, to: Destination) -> Delivery:
        """Push each layer as it is computed (or, paced, as it would be), then commit.

        Returns when the destination has committed, or raises when nothing reads this side's memory
        any more. Raises TransferFailed, and what ends the job.
        """
        await job.until(lambda: job.started_s is not None)
        held = self._held_pages(request) * self._layout.page_tokens
        peer = Peer(to.host, to.port, to.incarnation)
        while True:
            parcel = await self._open(job, held)
            try:
                transfer = self.plane.offer(
                    peer,
                    WireKey(request.key.request_id, request.key.attempt),
                    describe(self._layout, request.prompt, held, request.tenant, self._codecs),
                )
                return await self._deliver(transfer, job, parcel)
            except TransferRefused as error:
                known = held_instead(error.reason)
                if known is None or known >= held:
                    raise TransferFailed(f"to {to.host}:{to.port}: {error.reason}") from error
                held = known
            except TransportError as error:
                raise TransferFailed(f"to {to.host}:{to.port}: {error}") from error
            finally:
                self._medium.close(parcel)

    async def _open(self, job: Job, held: int) -> Parcel:
        sequence = job.sequence
        assert sequence.lease is not None
        while True:
            try:
                return self._medium.open(sequence.lease, sequence.prompt_tokens, held)
            except PoolFull:
                await asyncio.sleep(RETRY_S)
            except NeverFits as error:
                raise Rejected(str(error)) from error

    async def _deliver(self, transfer: Transfer, job: Job, parcel: Parcel) -> Delivery:
        granted = asyncio.ensure_future(transfer.granted())
        granted.add_done_callback(lambda _: job.notify())
        sequence = job.sequence
        try:
            await self._push_layers(transfer, granted, job, parcel)
            await job.until(lambda: bool(job.times_s))
            assert sequence.computed == sequence.prompt_tokens == transfer.manifest.n_tokens
            stats = await transfer.commit(sequence.tokens[-1])
        except BaseException:
            # Memory is released after this returns; until then the data plane may still read it.
            await until_done(asyncio.ensure_future(transfer.cancel()))
            raise
        finally:
            granted.cancel()
            await asyncio.gather(granted, return_exceptions=True)
        self._sent_bytes += stats.wire_bytes
        lease = sequence.lease
        assert lease is not None
        return Delivery(time.monotonic(), stats.wire_bytes, lease.reused_tokens)

    async def _push_layers(
        self, transfer: Transfer, granted: asyncio.Future[None], job: Job, parcel: Parcel
    ) -> None:
        """Push what the passes write, as they write it (or, paced, as it would be). A long prompt
        takes several: latents leave with each, the state with the last.
        """
        layers = self._layout.config.layers
        pushed, seen = [parcel.held] * layers, 0
        while True:
            # A refusal must show at once, not after the whole prompt is computed.
            if granted.done():
                granted.result()
                await job.until(lambda: len(job.written) > seen)  # noqa: B023
            else:
                await job.until(lambda: granted.done() or len(job.written) > seen)  # noqa: B023
                if granted.done():
                    continue
            written = job.written[seen]
            seen += 1
            layer, last = written.layer, written.stop == parcel.n_tokens
            if not last and layer in self._layout.state:
                continue
            if written.duration_s:
                due_s = layer_due_s(written.started_s, written.duration_s, layer, layers)
                await sleep_until(due_s)
            if written.stop > pushed[layer] or last:
                await self._medium.load(parcel, layer, pushed[layer], written.stop, written.fence)
                transfer.push_many(self._medium.pieces(parcel, layer, pushed[layer], written.stop))
                pushed[layer] = max(pushed[layer], written.stop)
            if last and layer == layers - 1:
                return

    def _held_pages(self, request: PrefillRequest) -> int:
        """Whole pages of the prompt that the destination is said to hold."""
        page = self._layout.page_tokens
        if request.block_tokens:
            pages = request.held_tokens // request.block_tokens
        elif request.system_tokens:
            pages = request.held_tokens * len(request.prompt) // request.system_tokens // page
        else:
            pages = request.held_tokens // page
        return min(pages, len(request.prompt) // page)

    async def send_prefix(self, request: PrefixRequest) -> PrefixSent:
        """See `Prefixes.send`."""
        return await self.prefixes.send(self.plane, request)

    # -- receiving

    async def _on_offer(self, wire_key: WireKey, manifest: Manifest) -> dict[Region, Ranges]:
        """Reserve memory for the whole manifest; waits for memory until cancelled."""
        if manifest.meta.get("purpose") == PURPOSE:
            return await self.prefixes.on_offer(wire_key, manifest)
        key = Key(*wire_key)
        prompt, held = prompt_of(self._layout, manifest), manifest.held_tokens
        keys = block_keys(prompt, self._layout.page_tokens, manifest.tenant)
        while True:
            if self._arrivals.abandoned(key) or key in self._arrivals:
                raise Refusal("this attempt was abandoned, or is here already", retryable=False)
            if not self.receiving:
                raise Refusal("this instance takes no caches now")
            self._arrivals.expire(time.monotonic())
            try:
                if not self._scheduler.starved:
                    lease, parcel = self._reserve(keys, len(prompt), held)
                    break
            except PoolFull:
                pass
            except NeverFits as error:
                raise Refusal(str(error), retryable=False) from error
            await asyncio.sleep(RETRY_S)
        self._arrivals.reserve(key, prompt, manifest.tenant, lease)
        self._inbound[key] = parcel
        return {
            region: ranges
            for layer in range(self._layout.config.layers)
            for region, ranges in self._medium.pieces(parcel, layer, held, len(prompt))
        }

    def _reserve(self, keys: list[int], n_tokens: int, held: int) -> tuple[Lease, Parcel]:
        """Raises PoolFull, NeverFits or Refusal; then nothing is reserved."""
        # Blocks behind those declared held are about to be written, so they must not be shared.
        page = self._layout.page_tokens
        lease = self._pool.acquire(keys[: held // page], n_tokens, arriving=True)
        try:
            if lease.reused_tokens != held:
                raise Refusal(f"{HELD}{lease.reused_tokens}")
            lease.keys = keys
            return lease, self._medium.open(lease, n_tokens, held)
        except BaseException:
            lease.release()
            raise

    async def _on_commit(self, wire_key: WireKey, arrival: client.Arrival) -> None:
        """Raising rejects the cache; `_on_abort` follows then."""
        if wire_key in self.prefixes:
            await self.prefixes.on_commit(wire_key)
            return
        key = Key(*wire_key)
        if self._arrivals.abandoned(key):
            raise ValueError("this attempt was abandoned")
        if arrival.first_token < 0:
            raise ValueError("no first token came with the cache")
        await self._medium.land(self._inbound[key])
        if self._arrivals.abandoned(key):
            raise ValueError("this attempt was abandoned")
        self._medium.close(self._inbound.pop(key))
        delivered = self._arrivals.deliver(key, arrival.first_token)
        assert len(delivered.prompt) == arrival.manifest.n_tokens
        self.received += 1

    def _on_abort(self, wire_key: WireKey) -> None:
        if wire_key in self.prefixes:
            self.prefixes.on_abort(wire_key)
            return
        key = Key(*wire_key)
        self._arrivals.drop(key)
        if (parcel := self._inbound.pop(key, None)) is not None:
            self._medium.close(parcel)
