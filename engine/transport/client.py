"""The asyncio face of the transport, used inside a worker process.

    plane = await DataPlane.start(arena, Settings(incarnation=7, layout="..."), callbacks)
    transfer = await plane.open(Peer(host, port, incarnation), Key("r1", 0), manifest)
    transfer.push(Region(layer, Kind.KV), ranges)      # as each layer is fenced; no copy is made
    stats = await transfer.commit(first_token=17)

Memory pushed must not change until `commit` or `cancel` returns or raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.transport.arena import SharedArena
from engine.transport.callbacks import Arrival, Callbacks, Destinations, Refusal, TransferStats
from engine.transport.errors import PlaneLost, TransferFailed, TransferRefused
from engine.transport.incoming import Handle
from engine.transport.ipc import Message, MessageReader, encode
from engine.transport.messages import Key, Manifest, check_size
from engine.transport.outbound import Peer
from engine.transport.regions import RangeList, Region
from engine.transport.settings import Settings

__all__ = [
    "Arrival",
    "Callbacks",
    "DataPlane",
    "Destinations",
    "Refusal",
    "Transfer",
    "TransferStats",
]

BEAT_S = 0.2
START_TIMEOUT_S = 20.0
#: Samples and audit rows kept until they are fetched; the oldest give way.
KEPT_ROWS = 65_536


class Transfer:
    """One outgoing cache."""

    def __init__(self, plane: DataPlane, number: int, key: Key, manifest: Manifest) -> None:
        loop = asyncio.get_running_loop()
        self.key = key
        self.manifest = manifest
        self._plane = plane
        self._number = number
        self._granted: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[Message] = loop.create_future()
        self._missing = {item.region: item.size_bytes for item in manifest.regions}

    def push(self, region: Region, ranges: Sequence[Sequence[int]]) -> None:
        """The next bytes of `region` lie in these ranges and will not change. Never blocks;
        nothing is sent before the grant. A region may be pushed in many parts.

        Raises ValueError beyond the manifest or the arena.
        """
        self.push_many([(region, ranges)])

    def push_many(self, pieces: Sequence[tuple[Region, Sequence[Sequence[int]]]]) -> None:
        """Several pushes in one message."""
        for region, ranges in pieces:
            given = RangeList(ranges)
            missing = self._missing.get(region)
            if missing is None:
                raise ValueError(f"{region} is not in the manifest")
            if len(given) > missing:
                raise ValueError(f"{region}: {len(given)} bytes pushed, {missing} are missing")
            if given.end_offset() > self._plane.arena.size_bytes:
                raise ValueError(f"{region}: ranges end beyond the arena")
            self._missing[region] = missing - len(given)
        self._plane._tell(
            {
                "op": "push",
                "t": self._number,
                "pieces": [
                    [region.layer, int(region.kind), [list(r) for r in ranges]]
                    for region, ranges in pieces
                ],
            }
        )

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

        Raises TransferFailed; then no part of it was exposed. ValueError where bytes are missing.
        Cancelling this call does not cancel the transfer: call `cancel`.
        """
        short = {region: count for region, count in self._missing.items() if count}
        if short:
            region, count = next(iter(short.items()))
            raise ValueError(f"{region}: {count} bytes were not pushed")
        check_size(meta or {}, "meta of a commit")
        self._plane._tell(
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
            message["wire_bytes"], message["seconds"], message["resent"], message["digest"]
        )

    async def cancel(self) -> bool:
        """Stop; returns when nothing reads this side's memory and the receiver has let go (or is
        lost). True: too late, the receiver had admitted the cache. Idempotent."""
        if not self._ended.done():
            self._plane._tell({"op": "cancel", "t": self._number})
        message = await asyncio.shield(self._ended)
        return bool(message["committed"])

    def _raise_unless_committed(self, message: Message) -> None:
        if not message["committed"]:
            kind = TransferRefused if message["refused"] else TransferFailed
            raise kind(message["reason"], message["retryable"])


@dataclass(slots=True)
class _Incoming:
    key: Key
    manifest: Manifest
    task: asyncio.Task[None] | None = None
    reserved: bool = False
    admitting: bool = False
    void: bool = False


class DataPlane:
    """A data plane process and the connection to it. Make one with `start`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        arena: SharedArena,
        settings: Settings,
        callbacks: Callbacks | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.arena = arena
        self.settings = settings
        self.port = 0
        #: Done when the plane is gone, whoever ended it.
        self.closed: asyncio.Future[None] = loop.create_future()
        self._process = process
        self._socket = sock
        self._callbacks = callbacks
        self._ready: asyncio.Future[int] = loop.create_future()
        self._transfers: dict[int, Transfer] = {}
        self._incoming: dict[Handle, _Incoming] = {}
        self._next_number = 1
        self._samples: deque[dict[str, Any]] = deque(maxlen=KEPT_ROWS)
        self._latest: dict[tuple[str, int], dict[str, Any]] = {}
        self._audit: deque[dict[str, Any]] = deque(maxlen=KEPT_ROWS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._untold: list[Message] = []

    @classmethod
    async def start(
        cls, arena: SharedArena, settings: Settings, callbacks: Callbacks | None = None
    ) -> DataPlane:
        """Start the process and wait until it listens. Without callbacks every offer is refused.

        Raises PlaneLost: the address is taken, certificates are missing, plain TCP was not asked
        for.
        """
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        process = subprocess.Popen(  # noqa: ASYNC220 - a fork and exec of milliseconds
            [
                sys.executable,
                "-m",
                "engine.transport.plane",
                f"--worker-fd={theirs.fileno()}",
                f"--arena-fd={arena.fd}",
            ],
            pass_fds=(theirs.fileno(), arena.fd),
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        plane = cls(process, ours, arena, settings, callbacks)
        await plane._run()
        return plane

    async def _run(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._writer.write(encode(self.settings.to_json()))
        self._spawn(self._read(reader))
        self._spawn(self._beat())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self.port = await self._ready
        except TimeoutError as error:
            await self.close()
            raise PlaneLost("the data plane did not start in time") from error

    @property
    def address(self) -> tuple[str, int]:
        """Where peers dial."""
        return self.settings.host, self.port

    @property
    def pid(self) -> int:
        """Process id of the data plane (fault injection)."""
        return self._process.pid

    # --- sending -----------------------------------------------------------------------------

    def offer(self, peer: Peer, key: Key, manifest: Manifest) -> Transfer:
        """Announce a cache; returns at once, so that the receiver reserves while this side
        computes. Raises ValueError for a manifest out of bounds, PlaneLost."""
        manifest.validate()
        described = manifest.to_json()
        check_size(described, "manifest")
        number = self._next_number
        self._next_number += 1
        transfer = Transfer(self, number, key, manifest)
        self._tell(
            {
                "op": "open",
                "t": number,
                "peer": [peer.host, peer.port, peer.incarnation, peer.identity],
                "key": list(key),
                "manifest": described,
            }
        )
        self._transfers[number] = transfer
        return transfer

    async def open(self, peer: Peer, key: Key, manifest: Manifest) -> Transfer:
        """`offer` and wait for the grant. Raises TransferRefused, TransferFailed, PlaneLost."""
        transfer = self.offer(peer, key, manifest)
        try:
            await transfer.granted()
        except asyncio.CancelledError:
            self._tell({"op": "cancel", "t": transfer._number})
            raise
        return transfer

    # --- what was measured -------------------------------------------------------------------

    def link_samples(self) -> list[dict[str, Any]]:
        """Rows since the last call: host, port and incarnation of the peer, the fields of
        `monitor.LinkSample`, and `verdict`. `time_s` is CLOCK_MONOTONIC of this host, which is also
        what `loop.time()` reads. An idle link gives no rows."""
        rows = list(self._samples)
        self._samples.clear()
        return rows

    def link_states(self) -> dict[tuple[str, int], dict[str, Any]]:
        """The last row of each peer, by its (host, port)."""
        return dict(self._latest)

    def audit_rows(self) -> list[dict[str, Any]]:
        """Rows since the last call (`audit.audit_row`)."""
        rows = list(self._audit)
        self._audit.clear()
        return rows

    async def close(self) -> None:
        """End the plane; transfers in progress fail. Idempotent."""
        if self._writer is not None and not self.closed.done():
            self._flush()
            with contextlib.suppress(OSError):
                self._writer.write(encode({"op": "close"}))
                await self._writer.drain()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._process.wait, 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
        self._lost("the data plane was closed")
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    # --- inside ------------------------------------------------------------------------------

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, message: Message) -> None:
        if self._writer is None or self.closed.done():
            raise PlaneLost("the data plane has ended")
        # What one turn of the loop has to say goes in one write, and pushes of one transfer in one
        # message: a plane then wakes once for many layers.
        last = self._untold[-1] if self._untold else None
        if last is None:
            asyncio.get_running_loop().call_soon(self._flush)
        elif message["op"] == last["op"] == "push" and message["t"] == last["t"]:
            last["pieces"] += message["pieces"]
            return
        self._untold.append(message)

    def _flush(self) -> None:
        untold, self._untold = self._untold, []
        if untold and self._writer is not None and not self.closed.done():
            self._writer.write(b"".join(map(encode, untold)))

    async def _beat(self) -> None:
        while not self.closed.done():
            with contextlib.suppress(PlaneLost):
                self._tell({"op": "beat"})
            await asyncio.sleep(BEAT_S)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        reader = MessageReader()
        with contextlib.suppress(OSError):
            while data := await stream.read(1 << 18):
                for message in reader.feed(data):
                    self._on_message(message)
        self._lost("the data plane has ended")

    def _lost(self, why: str) -> None:
        """No plane, no writers: everything reserved is free, everything sent has failed."""
        if self.closed.done():
            return
        self.closed.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(PlaneLost(why))
        for transfer in self._transfers.values():
            if not transfer._ended.done():
                transfer._ended.set_result(
                    {"committed": False, "refused": False, "reason": why, "retryable": True}
                )
        self._transfers.clear()
        for handle in list(self._incoming):
            self._void(handle)

    def _on_message(self, message: Message) -> None:
        match message["op"]:
            case "ready":
                self._ready.set_result(message["port"])
            case "failed":
                if not self._ready.done():
                    self._ready.set_exception(PlaneLost(message["reason"]))
            case "granted":
                transfer = self._transfers.get(message["t"])
                if transfer is not None and not transfer._granted.done():
                    transfer._granted.set_result(None)
            case "ended":
                transfer = self._transfers.pop(message["t"], None)
                if transfer is not None and not transfer._ended.done():
                    transfer._ended.set_result(message)
            case "offered":
                self._offered(message)
            case "withdrawn" | "aborted":
                self._void((message["h"][0], message["h"][1]))
            case "verified":
                self._verified(message)
            case "samples":
                self._samples.extend(message["rows"])
                for row in message["rows"]:
                    self._latest[row["host"], row["port"]] = row
            case "audit":
                self._audit.append(message["row"])

    def _offered(self, message: Message) -> None:
        handle = (message["h"][0], message["h"][1])
        incoming = _Incoming(Key(*message["key"]), Manifest.from_json(message["manifest"]))
        self._incoming[handle] = incoming
        incoming.task = self._spawn(self._reserve(handle, incoming))

    async def _reserve(self, handle: Handle, incoming: _Incoming) -> None:
        refusal = {"op": "refuse", "h": list(handle), "retryable": True}
        try:
            if self._callbacks is None:
                raise Refusal("this instance takes no caches", retryable=False)
            async with asyncio.timeout(self.settings.deadlines.grant_s * 0.9):
                ranges = await self._callbacks.on_offer(incoming.key, incoming.manifest)
            incoming.reserved = True
            if incoming.void:  # withdrawn, and `on_offer` returned all the same
                self._callbacks.on_abort(incoming.key)
                return
            destinations = _checked(ranges, incoming.manifest, self.arena.size_bytes)
        except Refusal as error:
            self._incoming.pop(handle, None)
            self._answer({**refusal, "reason": error.reason, "retryable": error.retryable})
        except TimeoutError:
            self._incoming.pop(handle, None)
            self._answer({**refusal, "reason": "no memory was free in time"})
        except Exception as error:
            self._void(handle)
            self._answer({**refusal, "reason": f"{type(error).__name__}: {error}"})
        else:
            self._answer({"op": "grant", "h": list(handle), "destinations": destinations})

    def _verified(self, message: Message) -> None:
        handle = (message["h"][0], message["h"][1])
        incoming = self._incoming.get(handle)
        if incoming is not None:
            arrival = Arrival(
                incoming.manifest, message["first_token"], message["meta"], message["identity"]
            )
            incoming.admitting = True
            self._spawn(self._admit(handle, incoming, arrival))

    async def _admit(self, handle: Handle, incoming: _Incoming, arrival: Arrival) -> None:
        assert self._callbacks is not None
        try:
            async with asyncio.timeout(self.settings.deadlines.admit_s * 0.9):
                await self._callbacks.on_commit(incoming.key, arrival)
        except Exception as error:
            incoming.admitting = False
            if incoming.void:
                self._callbacks.on_abort(incoming.key)
            reason = f"not admitted: {type(error).__name__}: {error}"
            self._answer({"op": "reject", "h": list(handle), "reason": reason})
        else:
            # The cache is the worker's from here on, whatever becomes of the answer.
            self._incoming.pop(handle, None)
            self._answer({"op": "admit", "h": list(handle)})

    def _answer(self, message: Message) -> None:
        """To an offer or a commit; a plane that is gone needs none."""
        with contextlib.suppress(PlaneLost):
            self._tell(message)

    def _void(self, handle: Handle) -> None:
        """An offer is withdrawn, or its memory is quiet again."""
        incoming = self._incoming.pop(handle, None)
        if incoming is None:
            return
        incoming.void = True
        if incoming.admitting:
            return  # `on_commit` decides; only if it raises does `on_abort` follow
        if incoming.reserved:
            assert self._callbacks is not None
            self._callbacks.on_abort(incoming.key)
        elif incoming.task is not None and incoming.task is not asyncio.current_task():
            incoming.task.cancel()


def _checked(
    ranges: Destinations, manifest: Manifest, arena_bytes: int
) -> list[tuple[int, int, list[list[int]]]]:
    """Destinations as a message. Raises ValueError unless they fit the manifest and the arena."""
    destinations = []
    for item in manifest.regions:
        given = RangeList(ranges.get(item.region, ()))
        if len(given) != item.size_bytes:
            raise ValueError(
                f"{item.region}: {len(given)} bytes reserved for {item.size_bytes} in the manifest"
            )
        if given.end_offset() > arena_bytes:
            raise ValueError(f"{item.region}: ranges end beyond the arena")
        destinations.append((item.region.layer, int(item.region.kind), [list(r) for r in given]))
    return destinations
