"""One prompt at a modelled instance: what it asks of the device, the link and its destination."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from engine.disciplines import FIFO, Discipline, even_chunk
from harness.instances.modelled_decode import DecodeStage, Key
from harness.instances.modelled_memory import Reservation
from harness.links.flow import Flow
from harness.links.fluid import FluidLink
from harness.ports import InstanceLost, PrefillDone, PrefillJob, ServingError, TransferFailed


class PrefillProfile(Protocol):
    """The part of a device profile that prefill needs (see `harness.profiles`)."""

    @property
    def n_layers(self) -> int: ...
    @property
    def kv_memory_bytes(self) -> float | None: ...

    def prefill_s(self, input_tokens: float, cached_tokens: float = 0) -> float: ...

    def kv_bytes(self, tokens: float, held_tokens: float = 0) -> float: ...


@dataclass(frozen=True, slots=True)
class PrefillRules:
    """`handover_s`: from the end of a prefill to the cache's arrival inside the same cluster.
    `grant_timeout_s`: how long a finished prompt waits for memory at its destination before the
    attempt fails. A prompt is cut in even chunks of at most `chunk_tokens`."""

    chunk_tokens: int = 8192
    discipline: Discipline = FIFO
    handover_s: float = 0.0
    grant_timeout_s: float = 60.0


class State(IntEnum):
    """Where a prompt is: it waits, is computed, or its cache is on its way."""

    QUEUED = 0
    COMPUTING = 1
    SENDING = 2


# Looked up several times a request; an enumeration's attributes are slow to find.
QUEUED, COMPUTING, SENDING = State


class Stage(Protocol):
    """The instance's prefill side, as its prompts see it (`modelled_prefill.PrefillStage`)."""

    loop: asyncio.AbstractEventLoop
    profile: PrefillProfile
    rules: PrefillRules

    def drop(self, work: PrefillWork) -> None: ...

    def fail(self, work: PrefillWork, error: ServingError) -> None: ...

    def hand_over(self, work: PrefillWork) -> None: ...

    def deliver(self, work: PrefillWork) -> None: ...


class PrefillWork(asyncio.Future[PrefillDone]):
    """A prompt that waits, computes or has its cache on the way. Cancelling it frees all it has."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "destination",
        "done_s",
        "enqueued_s",
        "finished_s",
        "flow",
        "grant_timer",
        "input_tokens",
        "key",
        "link",
        "memory",
        "n_bytes",
        "rank",
        "stage",
        "started",
        "started_s",
        "state",
        "work_s",
    )

    def __init__(
        self,
        stage: Stage,
        job: PrefillJob,
        destination: DecodeStage,
        link: FluidLink | None,
    ) -> None:
        loop, profile, request = stage.loop, stage.profile, job.request
        super().__init__(loop=loop)
        tokens, cached_tokens = request.input_tokens, job.cached_tokens
        self.stage = stage
        self.key: Key = (request.id, job.attempt)
        self.input_tokens = tokens
        self.cached_tokens = cached_tokens
        self.destination = destination
        self.link = link
        self.state = QUEUED
        self.work_s = profile.prefill_s(tokens, cached_tokens)
        self.n_bytes = profile.kv_bytes(tokens, job.held_tokens)
        self.memory: Reservation = destination.expect(request, self.key, self)
        self.arrived_s = job.arrived_s
        self.enqueued_s = loop.time()
        #: Seconds of work done by the last time it was stopped.
        self.done_s = 0.0
        #: In the order of the queue; what is computed never makes it worse.
        self.rank = math.inf
        self.started = False
        self.started_s = self.finished_s = math.nan
        self.flow: Flow | None = None
        self.grant_timer: asyncio.TimerHandle | None = None

    def chunk_end(self, done_s: float) -> float:
        """Seconds of work at which the chunk ends that holds `done_s`."""
        prefill_s = self.stage.profile.prefill_s
        cached, uncached = self.cached_tokens, self.input_tokens - self.cached_tokens
        chunk_tokens = even_chunk(uncached, self.stage.rules.chunk_tokens)
        chunks = range(1, round(uncached / chunk_tokens))

        def work_until(chunk: int) -> float:
            return prefill_s(cached + chunk * chunk_tokens, cached)

        index = bisect_left(chunks, done_s, key=work_until)
        return work_until(chunks[index]) if index < len(chunks) else self.work_s

    def cancel(self, msg: object = None) -> bool:
        if super().cancel(msg):
            self.stage.drop(self)
            return True
        return False

    def memory_granted(self) -> None:
        if self.grant_timer is not None:
            self.grant_timer.cancel()
            self.grant_timer = None
        if self.flow is not None and self.link is not None:
            self.link.release(self.flow)
        elif self.state is SENDING:
            self.stage.hand_over(self)

    def destination_lost(self, error: InstanceLost) -> None:
        self.stage.fail(self, error)

    def grant_timed_out(self) -> None:
        waited_s = self.stage.rules.grant_timeout_s
        why = f"{self.destination.name}: no cache memory within {waited_s:g} s"
        self.stage.fail(self, TransferFailed(why))

    def flow_delivered(self, flow: Flow) -> None:
        self.stage.deliver(self)

    def flow_failed(self, flow: Flow, why: str) -> None:
        self.stage.fail(self, TransferFailed(why))
