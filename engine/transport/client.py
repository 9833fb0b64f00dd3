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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.transport.arena import SharedArena
from engine.transport.callbacks import Arrival, Callbacks, Destinations, Refusal, TransferStats
from engine.transport.errors import PlaneLost
from engine.transport.ipc import Message, MessageReader, encode
from engine.transport.messages import Key, Manifest, check_size
from engine.transport.outbound import Peer
from engine.transport.reservations import Reservations
from engine.transport.settings import Settings
from engine.transport.transfer import Transfer

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
#: Rows kept until they are fetched; the oldest give way.
KEPT_SAMPLES = 8_192
KEPT_AUDIT = 65_536


class _Wire(asyncio.BufferedProtocol):
    """The worker's end of the socket to its plane; reads into one buffer that is kept."""

    def __init__(self, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._buffer = memoryview(bytearray(1 << 16))
        self._reader = MessageReader()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        for message in self._reader.feed(self._buffer[:nbytes]):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


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
        #: What the plane last said that it has in use (`engine.in_use`); None: not yet, or unknown.
        self.in_use_bytes: int | None = None
        #: Done when the plane is gone, whoever ended it.
        self.closed: asyncio.Future[None] = loop.create_future()
        self._process = process
        self._socket = sock
        self._ready: asyncio.Future[int] = loop.create_future()
        self._transfers: dict[int, Transfer] = {}
        #: Caches on their way in.
        self.reservations = Reservations(
            callbacks, settings.deadlines, arena.size_bytes, self._tell, self._spawn
        )
        self._next_number = 1
        self._samples: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._audit: deque[dict[str, Any]] = deque(maxlen=KEPT_AUDIT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._wire: asyncio.Transport | None = None
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
        loop = asyncio.get_running_loop()
        wire = _Wire(self._on_message, lambda: self._lost("the data plane has ended"))
        self._wire, _ = await loop.create_connection(lambda: wire, sock=self._socket)
        self._wire.write(encode(self.settings.to_json()))
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
        transfer = Transfer(self._tell, self.arena.size_bytes, number, key, manifest)
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
            transfer.abandon()
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

    def audit_rows(self) -> list[dict[str, Any]]:
        """Rows since the last call (`audit.audit_row`)."""
        rows = list(self._audit)
        self._audit.clear()
        return rows

    async def close(self) -> None:
        """End the plane; transfers in progress fail. Idempotent."""
        if self._wire is not None and not self.closed.done():
            self._flush()
            self._wire.write(encode({"op": "close"}))
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
        if self._wire is not None:
            self._wire.close()

    # --- inside ------------------------------------------------------------------------------

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, message: Message) -> None:
        if self._wire is None or self.closed.done():
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
        if untold and self._wire is not None and not self.closed.done():
            self._wire.write(b"".join(map(encode, untold)))

    async def _beat(self) -> None:
        while not self.closed.done():
            with contextlib.suppress(PlaneLost):
                self._tell({"op": "beat"})
            await asyncio.sleep(BEAT_S)

    def _lost(self, why: str) -> None:
        """No plane, no writers: everything reserved is free, everything sent has failed."""
        if self.closed.done():
            return
        self.closed.set_result(None)
        if not self._ready.done():
            self._ready.set_exception(PlaneLost(why))
        for transfer in self._transfers.values():
            transfer.has_ended(
                {"committed": False, "refused": False, "reason": why, "retryable": True}
            )
        self._transfers.clear()
        self.reservations.plane_lost()

    def _on_message(self, message: Message) -> None:
        match message["op"]:
            case "ready":
                self._ready.set_result(message["port"])
            case "failed":
                if not self._ready.done():
                    self._ready.set_exception(PlaneLost(message["reason"]))
            case "granted":
                transfer = self._transfers.get(message["t"])
                if transfer is not None:
                    transfer.was_granted()
            case "ended":
                transfer = self._transfers.pop(message["t"], None)
                if transfer is not None:
                    transfer.has_ended(message)
            case "offered":
                self.reservations.offered(message)
            case "withdrawn" | "aborted":
                self.reservations.void((message["h"][0], message["h"][1]))
            case "verified":
                self.reservations.verified(message)
            case "samples":
                self._samples.extend(message["rows"])
            case "memory":
                self.in_use_bytes = message["in_use_bytes"]
            case "audit":
                self._audit.append(message["row"])
