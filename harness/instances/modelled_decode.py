"""The decode side of a modelled instance: cache memory, admission and the running batch."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import Protocol

from harness.instances.modelled_batch import StepClock, StepTimes
from harness.instances.modelled_memory import MemoryLedger, Reservation
from harness.ports import DecodeDone, DecodeJob, InstanceLost, RequestRejected
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


class Incoming:
    """A cache that is expected, arriving, or here and not yet decoded, and its memory."""

    __slots__ = ("memory", "sender")

    def __init__(self, n_bytes: float, sender: Sender) -> None:
        self.memory = Reservation(n_bytes, sender.memory_granted)
        self.sender: Sender | None = sender


class DecodeWork(asyncio.Future[DecodeDone]):
    """A request being decoded. Cancelling it takes it out of the batch at the next boundary."""

    def __init__(self, stage: DecodeStage, job: DecodeJob, memory: Reservation) -> None:
        super().__init__(loop=stage.loop)
        self.stage = stage
        self.key = (job.request.id, job.attempt)
        self.input_tokens = job.request.input_tokens
        self.output_tokens = job.request.output_tokens
        self.memory = memory
        self.admitted_at = -1

    def cancel(self, msg: object = None) -> bool:
        if super().cancel(msg):
            self.stage.drop(self)
            return True
        return False


class DecodeStage:
    """Continuous batching of at most `profile.max_batch` requests, admitted first come first served
    at step boundaries; see `modelled_batch` for how time passes.
    """

    def __init__(
        self,
        name: str,
        profile: DecodeProfile,
        loop: asyncio.AbstractEventLoop,
        context_bucket_tokens: int,
        on_change: Callable[[], None],
    ) -> None:
        self.name = name
        self.loop = loop
        self.memory = MemoryLedger(profile.kv_memory_bytes)
        self._profile = profile
        self._on_change = on_change
        self._times = StepTimes(profile, context_bucket_tokens)
        self._clock = StepClock(loop.time())
        self._incoming: dict[Key, Incoming] = {}
        self._waiting: deque[DecodeWork] = deque()
        #: (boundary at which it leaves, order of admission, work); cancelled ones are skipped.
        self._running: list[tuple[int, int, DecodeWork]] = []
        self._admissions = 0
        self._batch = 0
        #: Tokens of context of the running batch at boundary `_context_at`.
        self._context_tokens = 0
        self._context_at = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self._paused_s: float | None = None
        self._paused_boundary = 0
        self._was_running = False

    # Load ---------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        return self._batch

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def incoming(self) -> int:
        return len(self._incoming)

    @property
    def idle(self) -> bool:
        return not (self._batch or self._waiting or self._incoming)

    # Caches on their way ------------------------------------------------------------------------

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
        return incoming.memory

    def arrived(self, key: Key) -> None:
        """The whole cache is here; it now waits for `submit` or `forget`."""
        self._incoming[key].sender = None

    def forget(self, key: Key) -> None:
        """Nobody will decode it: free its memory. Idempotent."""
        incoming = self._incoming.pop(key, None)
        if incoming is not None:
            self.memory.free(incoming.memory)
            self._on_change()

    # Requests -----------------------------------------------------------------------------------

    def submit(self, job: DecodeJob) -> DecodeWork:
        """Decode the cache that arrived. The result fails with InstanceLost when there is none."""
        key = (job.request.id, job.attempt)
        incoming = self._incoming.pop(key, None)
        if incoming is None:
            work = DecodeWork(self, job, Reservation(0.0, _nothing))
            work.set_exception(InstanceLost(self.name, f"holds no cache of request {key[0]}"))
            return work
        work = DecodeWork(self, job, incoming.memory)
        self._waiting.append(work)
        if self._paused_s is None and self._batch < self._profile.max_batch:
            self._at_next_boundary()
        return work

    def drop(self, work: DecodeWork) -> None:
        """`work` was cancelled: free its memory now and its place at the next boundary."""
        self.memory.free(work.memory)
        if work.admitted_at < 0:
            self._waiting.remove(work)
        else:
            paused = self._paused_s is not None
            clock = self._clock
            boundary = self._paused_boundary if paused else clock.next_boundary(self.loop.time())
            self._leave(work, boundary)
            if not self._batch:
                clock.close(boundary)
            if not paused:
                self._at_next_boundary()
        self._on_change()

    # Faults -------------------------------------------------------------------------------------

    def lose_all(self, why: str) -> None:
        """The instance died: all requests fail, all senders are told, all memory is gone."""
        works = [work for _, _, work in sorted(self._running) if not work.done()]
        works += [work for work in self._waiting if not work.done()]
        senders = [
            incoming.sender for incoming in self._incoming.values() if incoming.sender is not None
        ]
        self._running.clear()
        self._waiting.clear()
        self._incoming.clear()
        self.memory.reset()
        self._batch = self._context_tokens = 0
        self._paused_s = None
        self._disarm()
        now_s = self.loop.time()
        clock = self._clock
        clock.close(clock.next_boundary(now_s) if clock.step_s else clock.anchor)
        for work in works:
            work.set_exception(InstanceLost(self.name, why))
        for sender in senders:
            sender.destination_lost(InstanceLost(self.name, why))

    def slow(self, factor: float) -> None:
        """From the next boundary on a step takes `factor` times what the profile says."""
        self._times.slowdown = factor
        if self._batch and self._paused_s is None:
            self._at_next_boundary()

    def pause(self) -> None:
        """Freeze in the middle of a step. Idempotent."""
        if self._paused_s is None:
            self._paused_s = self.loop.time()
            self._paused_boundary = self._clock.next_boundary(self._paused_s) if self._batch else 0
            self._was_running = self._batch > 0
            self._disarm()

    def resume(self) -> None:
        """Go on where `pause` stopped: the step that was running ends that much later."""
        if self._paused_s is None:
            return
        paused_s, self._paused_s = self._paused_s, None
        clock, extra_s = self._clock, self.loop.time() - paused_s
        if self._was_running:
            if clock.anchor == self._paused_boundary and clock.anchor_s <= paused_s:
                clock.idle_until(clock.anchor_s + extra_s)  # no step had begun
            else:
                clock.stretch(self._paused_boundary, extra_s)
        self._at_next_boundary()

    # Boundaries ---------------------------------------------------------------------------------

    def _at_next_boundary(self) -> None:
        """Let what has changed take effect at the next boundary.

        If nobody leaves until then, that boundary can be worked out now and needs no event.
        """
        clock, running = self._clock, self._running
        now_s = self.loop.time()
        self._skip_cancelled()
        if self._batch:
            boundary = clock.next_boundary(now_s)
        else:
            # A step whose requests were all cancelled still runs to its end, which may lie ahead.
            if now_s > clock.anchor_s:
                clock.idle_until(now_s)
            boundary = clock.anchor
        if running and running[0][0] <= boundary:
            self._arm(clock.at(running[0][0]))
        else:
            self._pass_boundary(boundary)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_s = float("inf")
        self._skip_cancelled()
        if not self._running:
            return
        next_boundary = self._next_event()
        if self._clock.at(next_boundary) > self.loop.time():
            self._arm(self._clock.at(next_boundary))
        else:
            self._pass_boundary(next_boundary)

    def _skip_cancelled(self) -> None:
        running = self._running
        while running and running[0][2].done():
            heapq.heappop(running)

    def _next_event(self) -> int:
        """The boundary at which somebody leaves or the context changes bucket."""
        leaves = self._running[0][0]
        steps = self._times.steps_in_bucket(self._batch, self._context_tokens)
        return min(leaves, self._context_at + steps) if steps else leaves

    def _pass_boundary(self, boundary: int) -> None:
        """At `boundary`, which may lie ahead: who is done leaves, who waits comes in."""
        clock, running = self._clock, self._running
        finished: list[DecodeWork] = []
        while running and running[0][0] <= boundary:
            work = heapq.heappop(running)[2]
            if not work.done():
                self._leave(work, boundary)
                finished.append(work)
        results = [DecodeDone(0.0, clock.runs(work.admitted_at, boundary)) for work in finished]
        self._move_context(boundary)
        self._admit(boundary)
        if self._batch:
            step_s = self._times.step_s(self._batch, self._context_tokens)
            clock.change_step(boundary, step_s)
            self._arm(clock.at(self._next_event()))
        else:
            clock.close(boundary)
        for work, done in zip(finished, results, strict=True):
            done.admitted_s = done.runs[0][0]
            self.memory.free(work.memory)
            work.set_result(done)
        if finished:
            if clock.crowded and running:
                clock.forget_before(min(work.admitted_at for _, _, work in running))
            self._on_change()

    def _admit(self, boundary: int) -> None:
        waiting, max_batch = self._waiting, self._profile.max_batch
        while waiting and self._batch < max_batch:
            work = waiting.popleft()
            work.admitted_at = boundary
            self._admissions += 1
            self._batch += 1
            self._context_tokens += work.input_tokens + 1
            leaves = boundary + work.output_tokens - 1
            heapq.heappush(self._running, (leaves, self._admissions, work))

    def _leave(self, work: DecodeWork, boundary: int) -> None:
        self._move_context(boundary)
        self._batch -= 1
        self._context_tokens -= work.input_tokens + 1 + boundary - work.admitted_at

    def _move_context(self, boundary: int) -> None:
        self._context_tokens += self._batch * (boundary - self._context_at)
        self._context_at = boundary

    def _arm(self, when_s: float) -> None:
        """One timer; one that is set for an earlier time stays and looks again."""
        if when_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_s = when_s
            self._timer = self.loop.call_at(when_s, self._on_timer)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = float("inf")


def _nothing() -> None:
    """Nobody waits for this memory."""
