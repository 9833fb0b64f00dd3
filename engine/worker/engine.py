"""The engine loop: schedule, compute in a thread, wait for the modelled end, deliver.

All state lives on the event loop; the thread only runs `Runner.execute` on a step that the loop
does not touch meanwhile. Times are seconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.pacing import Timeline, sleep_until
from engine.prefill_time import MeasuredTime, PacedTime
from engine.scheduler import Item, Scheduler, Step
from engine.sequence import Sequence
from engine.worker.errors import Cancelled, ComputeFailed, WorkerError

log = logging.getLogger(__name__)


class StepRunner(Protocol):
    """See `engine.runner.Runner`."""

    def execute(
        self, step: Step, on_layer: Callable[[int, tuple[int, ...]], None] | None = None
    ) -> list[int]: ...

    def fence(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Written:
    """A layer's cache is complete for the first `stop` tokens, once `fence` has passed.
    `started_s` and `duration_s` (modelled; 0 without pacing) are those of its step.
    """

    layer: int
    stop: int
    fence: Any
    started_s: float
    duration_s: float


@dataclass(slots=True, eq=False)
class Job:
    """One sequence in the engine's hands, and what its owner may wait for. One owner, one waiter.

    `started_s` is of the step that ends the prompt, or where each step is of one prompt (nobody's
    memory is taken then), of its first. `written` grows from there with each layer of each pass,
    or paced, of the last pass of each step. Its last step was computed at `computed_s`; `times_s`
    are those of generated tokens.
    """

    sequence: Sequence
    submitted_s: float
    admitted_s: float | None = None
    started_s: float | None = None
    compute_s: float = 0.0
    computed_s: float = 0.0
    written: list[Written] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: WorkerError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return bool(self.sequence.finish) or self.error is not None

    def notify(self) -> None:
        self._changed.set()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait for `ready()`. Raises the job's error, or Cancelled, when it ends without."""
        while not ready():
            if self.error is not None:
                raise self.error
            if self.sequence.finish == "cancelled":
                raise Cancelled(f"{self.sequence.id} was cancelled")
            self._changed.clear()
            await self._changed.wait()

    async def more(self, received: int) -> bool:
        """Wait for another token after `received` ones; False when the sequence ended instead."""
        done = ("stop", "length")
        await self.until(lambda: len(self.times_s) > received or self.sequence.finish in done)
        return len(self.times_s) > received


class EngineLoop:
    """Runs the steps of one scheduler, one at a time, paced to a profile or as fast as it can."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        times: PacedTime | MeasuredTime,
        threads: int = 1,
    ) -> None:
        """`times` paces the steps, or learns from them."""
        self.scheduler = scheduler
        self._times = times
        self.pacing = times.pacing if isinstance(times, PacedTime) else None
        self.timeline = Timeline()
        self.steps = 0
        self.busy_s = 0.0
        self._runner = runner
        self._jobs: dict[Sequence, Job] = {}
        self._computing: asyncio.Future[None] | None = None
        self._bug: BaseException | None = None
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "engine", _limit_threads, (threads,))

    def submit(self, sequence: Sequence) -> Job:
        """Queue a sequence. Raises NeverFits."""
        self.scheduler.add(sequence)
        job = Job(sequence, time.monotonic())
        self._jobs[sequence] = job
        self._wake.set()
        return job

    def cancel(self, job: Job) -> None:
        """End a job at any point; its memory is back at the latest when its current step ends."""
        self.scheduler.cancel(job.sequence)
        self._settle(job)
        self._wake.set()

    def kick(self) -> None:
        """Memory was released elsewhere: try again to admit what waits."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        tick = 0
        queued = False
        scheduler = self.scheduler
        try:
            while True:
                if self._bug is not None:
                    raise self._bug
                if self._computing is not None and scheduler.late(tick):
                    await self._computing
                step = scheduler.schedule(tick, computing=self._computing is not None)
                busy = step.items or self._computing is not None
                if not busy and not (self.pacing is not None and scheduler.running):
                    queued = False
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await self._run_step(step, queued)
                queued = True
                tick += 1
                self.steps += 1
        finally:
            self._thread.shutdown(wait=False)

    async def _run_step(self, step: Step, queued: bool) -> None:
        pacing, phases = self.pacing, self.scheduler.limits.phases
        now_s = time.monotonic()
        start_s = now_s if pacing is None else self.timeline.begin(now_s, queued)
        duration_s = self._modelled_s(step)
        prompts = [item.sequence for item in step.items if not item.sequence.decoding]
        for sequence in step.admitted:
            job = self._jobs[sequence]
            if job.admitted_s is None:
                job.admitted_s = max(start_s, job.submitted_s)
                job.notify()
        for item in step.items:
            job = self._jobs[item.sequence]
            if self._sends(item) and job.started_s is None:
                job.started_s = max(start_s, job.submitted_s)
                job.notify()
        if step.items:
            self._computing = asyncio.ensure_future(self._compute(step, start_s, duration_s))
            self._computing.add_done_callback(self._computed)
            if phases == 1 or prompts:
                await self._computing
        if pacing is not None:
            end_s = self.timeline.end(start_s, duration_s)
            await sleep_until(end_s)
            if self._computing is not None and any(s.in_step for s in step.due):
                await self._computing
            self._judge(step, end_s, duration_s if prompts else duration_s * phases)
        now_s = time.monotonic()
        for sequence in self.scheduler.deliver(step):
            self._jobs[sequence].times_s.append(now_s)
        for sequence in step.due:
            if sequence in self._jobs:
                self._settle(self._jobs[sequence])

    def _computed(self, computing: asyncio.Future[None]) -> None:
        """A failure that `_compute` does not expect ends the loop, even if nobody awaits it."""
        if not computing.cancelled() and (error := computing.exception()) is not None:
            self._bug = error
            self._wake.set()

    def _sends(self, item: Item) -> bool:
        """Whether what is written for an item may leave while it is computed: in steps of mixed
        prompts and tokens another could still take its memory before its prompt ends."""
        return item.samples or self.scheduler.limits.one_prompt

    async def _compute(self, step: Step, start_s: float, duration_s: float) -> None:
        """Run a step in the thread, and take its results over."""
        loop = asyncio.get_running_loop()
        pushing = [
            (index, item.stop, self._jobs[item.sequence])
            for index, item in enumerate(step.items)
            if item.sequence.hand_over and self._sends(item)
        ]

        def layer_written(layer: int, stops: tuple[int, ...], fence: Any) -> None:
            for index, last_stop, job in pushing:
                # The modelled device has written a layer once the whole step has.
                if self.pacing is None or stops[index] == last_stop:
                    job.written.append(Written(layer, stops[index], fence, start_s, duration_s))
                    job.notify()

        def on_layer(layer: int, stops: tuple[int, ...]) -> None:
            loop.call_soon_threadsafe(layer_written, layer, stops, self._runner.fence())

        try:
            tokens, began_s, done_s = await loop.run_in_executor(
                self._thread, self._execute, step, on_layer if pushing else None
            )
        except Exception as error:
            log.exception("a step of %d sequences failed", len(step.items))
            self.scheduler.abort(step)
            for item in step.items:
                self._jobs[item.sequence].error = ComputeFailed(f"{type(error).__name__}: {error}")
        else:
            self.busy_s += done_s - began_s
            for item in step.items:
                job = self._jobs[item.sequence]
                job.compute_s += done_s - began_s
                job.computed_s = done_s
            if isinstance(self._times, MeasuredTime) and not all(
                item.sequence.decoding for item in step.items
            ):
                n_tokens = sum(item.stop - item.start for item in step.items)
                self._times.learn(n_tokens, done_s - began_s)
            self.scheduler.absorb(step, tokens)
        finally:
            self._computing = None
            for item in step.items:
                self._settle(self._jobs[item.sequence])

    def _execute(
        self, step: Step, on_layer: Callable[[int, tuple[int, ...]], None] | None
    ) -> tuple[list[int], float, float]:
        began_s = time.monotonic()
        tokens = self._runner.execute(step, on_layer)
        return tokens, began_s, time.monotonic()

    def _judge(self, step: Step, end_s: float, modelled_s: float) -> None:
        """Count what was to be computed at `end_s` and was not."""
        for sequence in step.due:
            job = self._jobs.get(sequence)
            if job is None or sequence.ahead < 0:
                continue
            ratio = self.timeline.judge(end_s, modelled_s, job.computed_s)
            if ratio:
                sequence.overruns += 1
                sequence.worst_overrun = max(sequence.worst_overrun, ratio)

    def _modelled_s(self, step: Step) -> float:
        """A tick of decode, if any sequence decodes, and the prompts computed beside it; 0 without
        pacing."""
        times, duration_s = self._times, 0.0
        if not isinstance(times, PacedTime):
            return duration_s
        decoding = [s for s in self.scheduler.running if s.decoding]
        if decoding:
            context = sum(len(sequence.tokens) for sequence in decoding)
            phases = self.scheduler.limits.phases
            duration_s += times.pacing.decode_step_s(len(decoding), context) / phases
        return duration_s + sum(
            times.chunk_s(item.sequence, item.start, item.stop)
            for item in step.items
            if not item.sequence.decoding
        )

    def _settle(self, job: Job) -> None:
        """Tell the owner; forget the job once it has ended and no step computes it."""
        if job.ended and not job.sequence.in_step:
            self._jobs.pop(job.sequence, None)
        job.notify()


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
