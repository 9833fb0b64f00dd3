"""The decode side of a modelled instance: caches that arrive, their memory, and the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from harness.instances.modelled_macro import Batch
from harness.instances.modelled_memory import MemoryLedger, Reservation
from harness.ports import DecodeDone, DecodeJob, InstanceLost, RequestRejected
from results.records import TokenRun
from workloads.request import Request

#: (request id, attempt)
Key = tuple[int, int]


class DecodeProfile(Protocol):
    """The part of a device profile that decode needs (see `harness.profiles`)."""

    @property
    def max_batch(self) -> int: ...
    @property
    def kv_memory_bytes(self) -> float | None: ...

    def decode_step_s(self, batch: int, context_tokens: float) -> float: ...

    def kv_bytes(self, tokens: float, held_tokens: float = 0) -> float: ...


class Sender(Protocol):
    """Who sends a cache here; told when memory is granted, or when this instance is gone."""

    def memory_granted(self) -> None: ...

    def destination_lost(self, error: InstanceLost) -> None: ...


class Incoming(Reservation):
    """The memory of a cache, with its sender until it is here (they refer to each other)."""

    __slots__ = ("sender",)

    def __init__(self, n_bytes: float, sender: Sender) -> None:
        self.n_bytes = n_bytes
        self.asked = self.granted = False
        self.sender: Sender | None = sender

    def on_grant(self) -> None:
        if self.sender is not None:
            self.sender.memory_granted()


class DecodeWork(asyncio.Future[DecodeDone]):
    """A request being decoded. Cancelling it takes it out of the batch at the next boundary."""

    __slots__ = ("admitted_at", "input_tokens", "memory", "output_tokens", "stage")

    def __init__(self, stage: DecodeStage, job: DecodeJob, memory: Reservation) -> None:
        super().__init__(loop=stage.loop)
        request = job.request
        self.stage = stage
        self.input_tokens = request.input_tokens
        self.output_tokens = request.output_tokens
        self.memory = memory
        self.admitted_at = -1

    def cancel(self, msg: object = None) -> bool:
        if super().cancel(msg):
            self.stage.drop(self)
            return True
        return False

    def finish(self, runs: list[TokenRun]) -> None:
        self.stage.free(self)
        self.set_result(DecodeDone(runs[0][0], runs))


class DecodeStage:
    """Caches for this instance, from the promise that one will come to its last token."""

    __slots__ = (
        "_incoming",
        "_profile",
        "batch",
        "loop",
        "memory",
        "name",
        "on_change",
    )

    def __init__(
        self,
        name: str,
        profile: DecodeProfile,
        loop: asyncio.AbstractEventLoop,
        batch: Batch,
    ) -> None:
        self.name = name
        self.loop = loop
        self.batch = batch
        self.memory = MemoryLedger(profile.kv_memory_bytes)
        self._profile = profile
        #: Told of all that leaves, while somebody wants to know.
        self.on_change: Callable[[], None] | None = None
        self._incoming: dict[Key, Incoming] = {}

    @property
    def incoming(self) -> int:
        """Caches that are expected, arriving, or here without a decode job."""
        return len(self._incoming)

    @property
    def idle(self) -> bool:
        return not (self.batch.active or self.batch.waiting or self._incoming)

    def expect(self, request: Request, key: Key, sender: Sender) -> Reservation:
        """A cache will come for `request`. Raises RequestRejected if it can never fit.

        The sender asks for the memory (`memory.ask`) when it has something to send.
        """
        n_bytes = self._profile.kv_bytes(request.input_tokens + request.output_tokens)
        if n_bytes > self.memory.capacity_bytes:
            raise RequestRejected(
                f"{self.name}: request {request.id} needs {n_bytes:.0f} bytes of cache, "
                f"there are {self.memory.capacity_bytes:.0f}"
            )
        incoming = self._incoming[key] = Incoming(n_bytes, sender)
        return incoming

    def arrived(self, key: Key) -> None:
        """The whole cache is here; it now waits for `submit` or `forget`."""
        self._incoming[key].sender = None

    def forget(self, key: Key) -> None:
        """Nobody will decode it: free its memory. Idempotent."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            incoming.sender = None
            self.memory.free(incoming)
            if self.on_change is not None:
                self.on_change()

    def submit(self, job: DecodeJob) -> DecodeWork:
        """Decode the cache that arrived. Raises InstanceLost when there is none."""
        incoming = self._incoming.pop((job.request.id, job.attempt), None)
        if incoming is None:
            raise InstanceLost(self.name, f"holds no cache of request {job.request.id}")
        work = DecodeWork(self, job, incoming)
        self.batch.add(work)
        return work

    def drop(self, work: DecodeWork) -> None:
        """`work` was cancelled: free its memory now and its place at the next boundary."""
        self.batch.remove(work)
        self.free(work)

    def free(self, work: DecodeWork) -> None:
        self.memory.free(work.memory)
        if self.on_change is not None:
            self.on_change()

    def lose_all(self, why: str) -> None:
        """The instance died: all requests fail, all senders are told, all memory is gone."""
        works = [work for work in self.batch.clear() if isinstance(work, DecodeWork)]
        senders = [
            incoming.sender for incoming in self._incoming.values() if incoming.sender is not None
        ]
        self._incoming.clear()
        self.memory.reset()
        for work in works:
            work.set_exception(InstanceLost(self.name, why))
        for sender in senders:
            sender.destination_lost(InstanceLost(self.name, why))
