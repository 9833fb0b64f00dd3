"""Cached prefixes from one worker's pool to another's, over the data plane.

A prefix is whole pages and the recurrent state at their end: what a prefill can start from. It
crosses as a cache of a request does (offer, grant, verified commit), but belongs to no request:
the receiver keeps it in its prefix cache, under the keys it computes itself from the offer's prompt
and tenant. Nothing of it can be found there before all of it has arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache.keys import block_keys
from engine.cache.pool import HybridPool, Lease, NeverFits, Pin, PoolFull
from engine.model.layout import CacheLayout
from engine.transport.client import DataPlane, Refusal
from engine.transport.errors import TransferRefused, TransportError
from engine.transport.messages import Key as WireKey
from engine.transport.messages import Manifest
from engine.transport.outbound import Peer
from engine.transport.regions import Region
from engine.worker.errors import TransferFailed, UnknownPrefix
from engine.worker.media import Medium, Parcel, Ranges
from engine.worker.messages import PrefixRequest
from engine.worker.offers import HELD, describe, held_instead, prompt_of
from engine.worker.settling import until_done

#: Set in the meta of an offer that carries a prefix.
PURPOSE = "prefix"
#: What the receiver holds may change between its refusal and the next offer.
MOST_OFFERS = 3
RETRY_S = 0.01


@dataclass(frozen=True, slots=True)
class PrefixSent:
    """`tokens` (engine tokens) of the prompt are in the other worker's prefix cache now."""

    tokens: int
    wire_bytes: int
    delivered_s: float


@dataclass(slots=True)
class _Arriving:
    lease: Lease
    parcel: Parcel


class Prefixes:
    """Both directions of one worker. `on_change` hears when something in hand has ended."""

    def __init__(
        self,
        layout: CacheLayout,
        medium: Medium,
        pool: HybridPool,
        on_change: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._medium = medium
        self._pool = pool
        self._on_change = on_change
        self._arriving: dict[WireKey, _Arriving] = {}
        self._sending = 0
        #: Set while this worker takes prefixes; offers at other times are refused.
        self.receiving = False
        self.sent = 0
        self.sent_bytes = 0
        self.received = 0

    def __len__(self) -> int:
        """Prefixes that leave or arrive."""
        return len(self._arriving) + self._sending

    def __contains__(self, key: WireKey) -> bool:
        """Whether it is arriving here."""
        return key in self._arriving

    # -- sending

    async def send(self, plane: DataPlane, request: PrefixRequest) -> PrefixSent:
        """Returns when the destination has committed, or raises when nothing reads this side's
        memory any more. Raises UnknownPrefix, TransferFailed.
        """
        page = self._layout.page_tokens
        prompt = request.prompt[: request.pages * page]
        pin = self._pool.pin(block_keys(prompt, page, request.tenant))
        if pin is None:
            raise UnknownPrefix(f"{request.pages} pages of {request.key.request_id} are not here")
        self._sending += 1
        to, held = request.destination, request.held_pages * page
        try:
            for _ in range(MOST_OFFERS):
                manifest = describe(
                    self._layout, prompt, held, request.tenant, {}, {"purpose": PURPOSE}
                )
                try:
                    return await self._transfer(plane, request, manifest, pin)
                except TransferRefused as error:
                    known = held_instead(error.reason)
                    if known is None:
                        raise TransferFailed(f"to {to.host}:{to.port}: {error.reason}") from error
                    held = known
                except TransportError as error:
                    raise TransferFailed(f"to {to.host}:{to.port}: {error}") from error
            raise TransferFailed(f"to {to.host}:{to.port}: what it holds kept changing")
        finally:
            self._sending -= 1
            pin.release()
            self._on_change()

    async def _transfer(
        self, plane: DataPlane, request: PrefixRequest, manifest: Manifest, pin: Pin
    ) -> PrefixSent:
        """One offer. Raises TransportError."""
        start, stop = manifest.held_tokens, manifest.n_tokens
        parcel = await self._open(pin, stop, start)
        try:
            to = request.destination
            transfer = plane.offer(
                Peer(to.host, to.port, to.incarnation),
                # A name of its own: the request's cache may go to the same worker one day.
                WireKey(f"{PURPOSE}:{request.key.request_id}", request.key.attempt),
                manifest,
            )
            try:
                await transfer.granted()
                for layer in range(self._layout.config.layers):
                    await self._medium.load(parcel, layer, start, stop, None)
                    transfer.push_many(self._medium.pieces(parcel, layer, start, stop))
                stats = await transfer.commit()
            except BaseException:
                # Memory is released after this returns; until then it may still be read.
                await until_done(asyncio.ensure_future(transfer.cancel()))
                raise
        finally:
            self._medium.close(parcel)
        self.sent += 1
        self.sent_bytes += stats.wire_bytes
        return PrefixSent(stop, stats.wire_bytes, time.monotonic())

    async def _open(self, pin: Pin, n_tokens: int, held: int) -> Parcel:
        while True:
            try:
                return self._medium.open(pin, n_tokens, held)
            except PoolFull:
                await asyncio.sleep(RETRY_S)
            except NeverFits as error:
                raise TransferFailed(str(error)) from error

    # -- receiving: see `engine.transport.callbacks`

    async def on_offer(self, key: WireKey, manifest: Manifest) -> dict[Region, Ranges]:
        """Reserves memory, or refuses at once: a prefix is worth no wait."""
        if not self.receiving:
            raise Refusal("this instance takes no prefixes now")
        if key in self._arriving:
            raise Refusal("this prefix is arriving already")
        prompt = prompt_of(self._layout, manifest)
        page, start, stop = self._layout.page_tokens, manifest.held_tokens, manifest.n_tokens
        if stop % page or not stop:
            raise Refusal("a prefix is made of whole pages", retryable=False)
        keys = block_keys(prompt, page, manifest.tenant)
        try:
            lease = self._pool.acquire(keys, stop, arriving=True)
        except (PoolFull, NeverFits) as error:
            raise Refusal(f"no memory for a prefix: {error}") from error
        try:
            if lease.reused_tokens != start:
                raise Refusal(f"{HELD}{lease.reused_tokens}")
            parcel = self._medium.open(lease, stop, start)
        except (PoolFull, NeverFits) as error:
            lease.release()
            raise Refusal(f"no memory for a prefix: {error}") from error
        except Refusal:
            lease.release()
            raise
        self._arriving[key] = _Arriving(lease, parcel)
        return {
            region: ranges
            for layer in range(self._layout.config.layers)
            for region, ranges in self._medium.pieces(parcel, layer, start, stop)
        }

    async def on_commit(self, key: WireKey) -> None:
        """The prefix is whole: from here on prompts find it."""
        arriving = self._arriving[key]
        await self._medium.land(arriving.parcel)
        lease, n_tokens = arriving.lease, arriving.parcel.n_tokens
        lease.keep_state(n_tokens)
        lease.commit(n_tokens)
        self.received += 1
        self._end(key)

    def on_abort(self, key: WireKey) -> None:
        """Nothing writes there any more."""
        self._end(key)

    def _end(self, key: WireKey) -> None:
        """Give back what is not shared."""
        arriving = self._arriving.pop(key)
        self._medium.close(arriving.parcel)
        arriving.lease.release()
        self._on_change()
