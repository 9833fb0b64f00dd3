"""One cache on its way out, as the worker holds it; the plane does the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.transport.callbacks import TransferStats
from engine.transport.errors import TransferFailed, TransferRefused
from engine.transport.ipc import Message
from engine.transport.messages import Key, Manifest, check_size
from engine.transport.regions import Region, checked_ranges


class Transfer:
    """One outgoing cache."""

    def __init__(
        self,
        tell: Callable[[Message], None],
        arena_bytes: int,
        number: int,
        key: Key,
        manifest: Manifest,
    ) -> None:
        """`tell` says something to the plane that knows this transfer by `number`. Raises what it
        raises: PlaneLost."""
        loop = asyncio.get_running_loop()
        self.key = key
        self.manifest = manifest
        self._tell = tell
        self._arena_bytes = arena_bytes
        self._number = number
        self._granted: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[Message] = loop.create_future()
        #: Of each region: its position in the manifest, and the bytes that were not pushed yet.
        self._missing = {item.region: [n, item[1]] for n, item in enumerate(manifest.regions)}

    def push(self, region: Region, ranges: Sequence[Sequence[int]]) -> None:
        """The next bytes of `region` lie in these ranges and will not change. Never blocks;
        nothing is sent before the grant. A region may be pushed in many parts.

        Raises ValueError beyond the manifest or the arena.
        """
        self.push_many([(region, ranges)])

    def push_many(self, pieces: Sequence[tuple[Region, Sequence[Sequence[int]]]]) -> None:
        """Several pushes in one message."""
        told = []
        for region, ranges in pieces:
            known = self._missing.get(region)
            if known is None:
                raise ValueError(f"{region} is not in the manifest")
            position, missing = known
            size, flat = checked_ranges(region, ranges, self._arena_bytes)
            if size > missing:
                raise ValueError(f"{region}: {size} bytes pushed, {missing} are missing")
            known[1] = missing - size
            told.append([position, flat])
        self._tell({"op": "push", "t": self._number, "pieces": told})

    async def granted(self) -> None:
        """Returns when the receiver has reserved memory. Raises TransferRefused, TransferFailed."""
        either: list[asyncio.Future[Any]] = [self._granted, self._ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            self._raise_unless_committed(self._ended.result())

    async def commit(
        self, first_token: int = -1, meta: Mapping[str, Any] | None = None
    ) -> TransferStats:
        """Every region is pushed whole: returns when the receiver has admitted the cache.

        Raises TransferFailed, and what that says holds. ValueError where bytes are missing.
        Cancelling this call does not cancel the transfer: call `cancel`.
        """
        for region, (_, missing) in self._missing.items():
            if missing:
                raise ValueError(f"{region}: {missing} bytes were not pushed")
        check_size(meta or {}, "meta of a commit")
        self._tell(
            {
                "op": "commit",
                "t": self._number,
                "first_token": first_token,
                "meta": dict(meta or {}),
            }
        )
        message = await asyncio.shield(self._ended)
        self._raise_unless_committed(message)
        return TransferStats(
            message["wire_bytes"],
            message["seconds"],
            message["resent"],
            int(message["digest"], 16),
        )

    async def cancel(self) -> bool:
        """Stop; returns when nothing reads this side's memory and the receiver has let go (or is
        lost). True: too late, the receiver had admitted the cache. Idempotent."""
        if not self._ended.done():
            self.abandon()
        message = await asyncio.shield(self._ended)
        return bool(message["committed"])

    def abandon(self) -> None:
        """Stop, without waiting for anything."""
        self._tell({"op": "cancel", "t": self._number})

    # --- what the plane says -----------------------------------------------------------------

    def was_granted(self) -> None:
        if not self._granted.done():
            self._granted.set_result(None)

    def has_ended(self, message: Message) -> None:
        """committed, refused, reason, retryable; and of a committed one wire_bytes, seconds, resent
        and digest. The first one counts."""
        if not self._ended.done():
            self._ended.set_result(message)

    def _raise_unless_committed(self, message: Message) -> None:
        if not message["committed"]:
            kind = TransferRefused if message["refused"] else TransferFailed
            raise kind(message["reason"], message["retryable"])
