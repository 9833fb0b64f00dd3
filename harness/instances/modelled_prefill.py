"""The prefill side of a modelled instance: a queue, one prompt at a time, and caches on their way.

A prompt is computed in chunks; cancellation and the queue's discipline take effect between them.
The cache leaves layer by layer while later layers compute: bytes are produced evenly from the end
of the first layer on, and those of the last layer come when the prompt is done.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from harness.instances.modelled_decode import DecodeStage, Key
from harness.instances.modelled_prompt import (
    COMPUTING,
    QUEUED,
    SENDING,
    PrefillProfile,
    PrefillRules,
    PrefillWork,
)
from harness.instances.modelled_queue import PromptQueue
from harness.links.fluid import FluidLink
from harness.ports import InstanceLost, PrefillDone, PrefillJob, ServingError

#: Share of a prompt's work that is more than rounding and less than any chunk: at the end of one
#: chunk, the end that comes next is the next one's.
_NEXT_CHUNK = 1e-9

__all__ = ["PrefillProfile", "PrefillRules", "PrefillStage", "PrefillWork"]


class PrefillStage:
    """One prompt at a time in the order of `rules.discipline`.

    With `profile.kv_memory_bytes` a prompt starts only when its cache fits beside those that are
    still on their way, so a slow link or a full destination holds prefill back.
    """

    __slots__ = (
        "_capacity_bytes",
        "_chunk_left_s",
        "_chunk_timer",
        "_current",
        "_finish_timer",
        "_held_bytes",
        "_paused",
        "_preempt_timer",
        "_queue",
        "_queued",
        "_since_s",
        "_slowdown",
        "_works",
        "loop",
        "name",
        "on_change",
        "profile",
        "rules",
    )

    def __init__(
        self,
        name: str,
        profile: PrefillProfile,
        loop: asyncio.AbstractEventLoop,
        rules: PrefillRules,
    ) -> None:
        self.name = name
        self.loop = loop
        self.profile = profile
        self.rules = rules
        #: Told of all that leaves, while somebody wants to know.
        self.on_change: Callable[[], None] | None = None
        memory_bytes = profile.kv_memory_bytes
        self._capacity_bytes = math.inf if memory_bytes is None else memory_bytes
        self._held_bytes = 0.0
        self._works: dict[Key, PrefillWork] = {}
        self._queue = PromptQueue()
        #: Those in the queue that have not ended.
        self._queued = 0
        self._current: PrefillWork | None = None
        self._since_s = 0.0
        self._finish_timer: asyncio.TimerHandle | None = None
        self._preempt_timer: asyncio.TimerHandle | None = None
        #: While the chunk of a prompt that is gone runs to its end, the device is taken.
        self._chunk_timer: asyncio.TimerHandle | None = None
        self._chunk_left_s = 0.0
        self._slowdown = 1.0
        self._paused = False

    # Load ---------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        return self._queued

    @property
    def computing(self) -> bool:
        return self._current is not None

    @property
    def sending(self) -> int:
        return len(self._works) - self._queued - (self._current is not None)

    @property
    def held_bytes(self) -> float:
        """Bytes of caches that are being computed or sent."""
        return self._held_bytes

    @property
    def idle(self) -> bool:
        return not self._works

    # Requests -----------------------------------------------------------------------------------

    def submit(
        self, job: PrefillJob, destination: DecodeStage, link: FluidLink | None
    ) -> PrefillWork:
        """Raises RequestRejected when the destination can never hold the cache."""
        work = PrefillWork(self, job, destination, link)
        self._works[work.key] = work
        if self.rules.discipline.preempts:
            self._rank(work, 0.0)
        if not self._queued and self._is_free() and self._fits(work):
            self._start(work, work.enqueued_s)
        else:
            self._enqueue(work)
            if self._current is None:
                self._start_next()
            elif self.rules.discipline.preempts:
                self._consider_preemption()
        return work

    def abandon(self, key: Key) -> None:
        """Drop the attempt if it is still here. Idempotent."""
        work = self._works.get(key)
        if work is not None:
            work.cancel()

    def fail(self, work: PrefillWork, error: ServingError) -> None:
        if not work.done():
            work.set_exception(error)
            self.drop(work)

    def drop(self, work: PrefillWork) -> None:
        """`work` was cancelled or has failed: free all it has. A chunk that runs ends first."""
        if self._works.pop(work.key, None) is None:
            return
        if work.state is QUEUED:
            self._queued -= 1
        elif work is self._current:
            self._let_chunk_end(work)
        self._free(work)
        work.destination.forget(work.key)
        self._start_next()
        if self.on_change is not None:
            self.on_change()

    def hand_over(self, work: PrefillWork) -> None:
        """A cache that stays inside the cluster is computed, and its memory is granted."""
        if self.rules.handover_s > 0.0:
            self.loop.call_later(self.rules.handover_s, self.deliver, work)
        else:
            self.deliver(work)

    def deliver(self, work: PrefillWork) -> None:
        """The whole cache is at its destination."""
        if work.done():
            return
        del self._works[work.key]
        work.destination.arrived(work.key)
        wire_bytes = 0 if work.link is None else round(work.n_bytes)
        now_s = self.loop.time()
        work.set_result(
            PrefillDone(work.started_s, work.finished_s, now_s, wire_bytes, -1, work.cached_tokens)
        )
        work.flow = None
        self._held_bytes = self._held_bytes - work.n_bytes if self._works else 0.0
        if self._queued:
            self._start_next()
        if self.on_change is not None:
            self.on_change()

    # Faults -------------------------------------------------------------------------------------

    def lose_all(self, why: str) -> None:
        """The instance died: every prompt fails, every flow breaks, every reservation is freed."""
        works = list(self._works.values())
        self._works.clear()
        self._queue.clear()
        self._queued = 0
        self._current = None
        self._chunk_left_s = 0.0
        self._paused = False
        for timer in (self._finish_timer, self._preempt_timer, self._chunk_timer):
            if timer is not None:
                timer.cancel()
        self._finish_timer = self._preempt_timer = self._chunk_timer = None
        for work in works:
            self._free(work)
            work.destination.forget(work.key)
            if not work.done():
                work.set_exception(InstanceLost(self.name, why))

    def slow(self, factor: float) -> None:
        """From now on prefill takes `factor` times what the profile says."""
        work = self._current
        if work is None or self._paused:
            self._slowdown = factor
            return
        self._stop(work)
        self._slowdown = factor
        self._run(work, self.loop.time())

    def pause(self) -> None:
        """Freeze. Idempotent."""
        if self._paused:
            return
        self._paused = True
        if self._current is not None:
            self._stop(self._current)
        if self._chunk_timer is not None:
            self._chunk_left_s = self._chunk_timer.when() - self.loop.time()
            self._chunk_timer.cancel()
            self._chunk_timer = None

    def resume(self) -> None:
        """Go on where `pause` stopped."""
        if not self._paused:
            return
        self._paused = False
        if self._current is not None:
            self._run(self._current, self.loop.time())
        elif self._chunk_left_s > 0.0:
            self._chunk_timer = self.loop.call_later(self._chunk_left_s, self._chunk_ended)
            self._chunk_left_s = 0.0
        else:
            self._start_next()

    # The queue ----------------------------------------------------------------------------------

    def _enqueue(self, work: PrefillWork) -> None:
        work.state = QUEUED
        self._queued += 1
        self._queue.push(work, self._rank(work, work.done_s))

    def _rank(self, work: PrefillWork, done_s: float) -> float:
        """Where a prompt stands of which `done_s` are done: never lower than where it stood."""
        work.rank = min(work.rank, self.rules.discipline.rank(work.arrived_s, work.work_s - done_s))
        return work.rank

    def _fits(self, work: PrefillWork) -> bool:
        held_bytes = self._held_bytes
        return work.started or not held_bytes or held_bytes + work.n_bytes <= self._capacity_bytes

    def _is_free(self) -> bool:
        """Nothing is computed, and nothing keeps the device from it."""
        return self._current is None and self._chunk_timer is None and not self._paused

    def _start_next(self) -> None:
        if self._queued and self._is_free():
            work = self._queue.take(self._fits)
            if work is not None:
                self._queued -= 1
                self._start(work, self.loop.time())

    def _start(self, work: PrefillWork, now_s: float) -> None:
        if not work.started:
            work.started = True
            work.started_s = now_s
            self._held_bytes += work.n_bytes
            granted = work.destination.memory.ask(work.memory)
            if work.link is not None:
                work.flow = work.link.open(work.n_bytes, work, held=not granted)
        self._run(work, now_s)

    def _free(self, work: PrefillWork) -> None:
        """The bytes, the flow and the timer of a prompt that leaves this instance."""
        if work.started:
            self._held_bytes = self._held_bytes - work.n_bytes if self._works else 0.0
        if work.grant_timer is not None:
            work.grant_timer.cancel()
            work.grant_timer = None
        if work.flow is not None and work.link is not None:
            work.link.abort(work.flow)
            work.flow = None

    # The device ---------------------------------------------------------------------------------

    def _run(self, work: PrefillWork, now_s: float) -> None:
        """Compute what is left of `work` from now on."""
        self._current = work
        work.state = COMPUTING
        self._since_s = now_s
        slowdown = self._slowdown
        finish_s = now_s + (work.work_s - work.done_s) * slowdown
        self._finish_timer = self.loop.call_at(finish_s, self._finish, work)
        flow = work.flow
        if flow is not None and work.link is not None:
            n_layers = self.profile.n_layers
            first_layer_s = max(0.0, work.work_s / n_layers - work.done_s)
            last_layer_bytes = work.n_bytes / n_layers
            paced_bytes = max(0.0, work.n_bytes - last_layer_bytes - flow.produced(now_s))
            begin_s = min(now_s + first_layer_s * slowdown, finish_s)
            work.link.produce(flow, begin_s, finish_s, paced_bytes, last_layer_bytes)
        if self.rules.discipline.preempts:
            self._consider_preemption(_NEXT_CHUNK)

    def _stop(self, work: PrefillWork) -> None:
        """Stop computing `work`, keeping what is done."""
        now_s = self.loop.time()
        work.done_s += (now_s - self._since_s) / self._slowdown
        self._since_s = now_s
        if self._finish_timer is not None:
            self._finish_timer.cancel()
            self._finish_timer = None
        if self._preempt_timer is not None:
            self._preempt_timer.cancel()
            self._preempt_timer = None
        if work.flow is not None and work.link is not None:
            work.link.produce(work.flow, now_s, now_s, 0.0, 0.0)

    def _finish(self, work: PrefillWork) -> None:
        now_s = self.loop.time()
        self._current = None
        self._finish_timer = None
        if self._preempt_timer is not None:
            self._preempt_timer.cancel()
            self._preempt_timer = None
        work.state = SENDING
        work.finished_s = now_s
        if not work.memory.granted:
            work.grant_timer = self.loop.call_later(
                self.rules.grant_timeout_s, work.grant_timed_out
            )
        elif work.link is None:
            self.hand_over(work)
        if self._queued and self._current is None:
            self._start_next()

    def _done_s(self, work: PrefillWork) -> float:
        """Seconds of work done of the current prompt."""
        if self._paused:
            return work.done_s
        return work.done_s + (self.loop.time() - self._since_s) / self._slowdown

    # Chunks -------------------------------------------------------------------------------------

    def _let_chunk_end(self, work: PrefillWork) -> None:
        """The current prompt is gone; the device is free when its chunk ends."""
        done_s = self._done_s(work)
        left_s = max(0.0, work.chunk_end(done_s) - done_s) * self._slowdown
        self._current = None
        if self._paused:
            self._chunk_left_s = left_s
            return
        self._stop(work)
        if left_s > 0.0:
            self._chunk_timer = self.loop.call_later(left_s, self._chunk_ended)

    def _chunk_ended(self) -> None:
        self._chunk_timer = None
        self._start_next()

    def _consider_preemption(self, least_share: float = 0.0) -> None:
        """If anybody waits, see who is ranked best when the current prompt's chunk ends: the first
        to end after `least_share` of its work more."""
        work = self._current
        if work is None or self._paused or self._preempt_timer is not None or not self._queued:
            return
        done_s = self._done_s(work)
        end_s = work.chunk_end(done_s + least_share * work.work_s)
        if end_s < work.work_s:
            left_s = max(0.0, end_s - done_s) * self._slowdown
            self._preempt_timer = self.loop.call_later(left_s, self._preempt)

    def _preempt(self) -> None:
        self._preempt_timer = None
        work = self._current
        if work is None:
            return
        if not self._outranked(work):
            self._consider_preemption(_NEXT_CHUNK)
            return
        self._stop(work)
        self._current = None
        self._enqueue(work)
        self._start_next()

    def _outranked(self, work: PrefillWork) -> bool:
        head = self._queue.head()
        if head is None or not self._fits(head[2]):
            return False
        return head[0] < self._rank(work, self._done_s(work))
