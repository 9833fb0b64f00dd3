"""What one instance does, apart from HTTP: prefill, decode, roles, draining."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.pool import HybridPool, NeverFits
from engine.disciplines import make_discipline
from engine.pacing import Pacing
from engine.prefill_time import MeasuredTime, PacedTime
from engine.runner import Runner
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence
from engine.transport.settings import Settings
from engine.worker.arrivals import Arrivals
from engine.worker.courier import Courier, Delivery
from engine.worker.engine import EngineLoop, Job
from engine.worker.errors import Cancelled, NotReady, Rejected
from engine.worker.events import CacheEvents
from engine.worker.loading import LoadedEngine
from engine.worker.media import Direct, Staged
from engine.worker.messages import DecodeRequest, Key, PrefillRequest, PrefixRequest
from engine.worker.options import WorkerOptions
from engine.worker.prefixes import PrefixSent


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Times are seconds of CLOCK_MONOTONIC. `cached_tokens` were really reused here, in tokens of
    the modelled system where the request gave its length. `overrun`: actual / modelled duration
    where computing took too long, else 0.
    """

    first_token: int
    started_s: float
    finished_s: float
    delivered_s: float
    wire_bytes: int
    compute_s: float
    overrun: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a decode, and when it was there. The first of a delivered cache comes with
    admission to the batch. `finish` says why the sequence ended with it ("": it goes on).
    """

    id: int
    t_s: float
    finish: str = ""


@dataclass(slots=True)
class Counters:
    """Requests since the start, by how they ended."""

    prefills: int = 0
    decodes: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    overrun_requests: int = 0


class Worker:
    """One engine in one role. Construct on the running loop, then `start`."""

    def __init__(self, options: WorkerOptions, engine: LoadedEngine, pacing: Pacing | None) -> None:
        self.options = options
        self.role = options.role
        self.engine = engine
        self.pacing = pacing
        self.state = "starting"
        #: Unique to this life of the instance; a peer that remembers another one is refused.
        self.incarnation = secrets.randbits(62) | 1
        self.counters = Counters()
        self.events = CacheEvents()
        self.pool = HybridPool(
            options.pages,
            options.slots,
            options.page_tokens,
            policy=CheckpointPolicy(options.checkpoint_interval),
            first_page=1,
            first_slot=1,
            on_event=self.events.note,
        )
        times = MeasuredTime() if pacing is None else PacedTime(pacing)
        discipline = make_discipline(
            options.queue_discipline, options.queue_ageing, options.slo_ttft_s
        )
        self.scheduler = Scheduler(self.pool, self._limits(options.role), discipline, times.left_s)
        self._runner = Runner(engine.model, engine.storage, options.pass_tokens)
        self.loop = EngineLoop(self.scheduler, self._runner, times, options.threads)
        self._activity = asyncio.Event()
        self.arrivals = Arrivals(self._memory_freed)
        self.courier = Courier(
            engine.layout,
            Staged(engine.storage, engine.arena) if engine.staged else Direct(engine.layout),
            self.pool,
            self.scheduler,
            self.arrivals,
            Settings(
                incarnation=self.incarnation,
                layout=engine.layout.layout_id,
                host=options.data_host,
                port=options.data_port,
                lanes=options.lanes,
                allow_plain=options.allow_plain,
                security=options.security,
            ),
            options.state_codec,
            self._memory_freed,
        )
        self.jobs: dict[Key, Job] = {}
        self._deliveries: dict[Key, asyncio.Future[Delivery]] = {}
        self._running: asyncio.Task[None] | None = None

    async def start(self, on_crash: Callable[[BaseException], None]) -> None:
        """Open the data plane and start computing. `on_crash` hears of a bug that ends the loop."""
        self._runner.warm_up()
        await self.courier.start(self.engine.arena)
        self._running = asyncio.create_task(self.loop.run())

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                on_crash(error)

        self._running.add_done_callback(ended)
        self._set_state("ready")

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.courier.stop()

    # -- requests

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Compute the prompt and deliver its cache. Cancelling it frees everything, here and there.

        Raises a WorkerError.
        """
        self._expect("prefill")
        sequence = Sequence(
            id=request.key.request_id,
            tokens=list(request.prompt),
            max_tokens=1,
            tenant=request.tenant,
            sampling=request.sampling,
            hand_over=True,
            system_tokens=request.system_tokens,
            cached_tokens=request.cached_tokens,
            arrived_s=time.monotonic() - request.waited_s,
        )
        if request.key in self.jobs:
            raise Rejected(f"{request.key.request_id} attempt {request.key.attempt} is in hand")
        job = self._submit(sequence)
        self.jobs[request.key] = job
        deliver = (
            self._keep(request, job)
            if request.destination is None
            else self.courier.send(request, job, request.destination)
        )
        self._deliveries[request.key] = delivering = asyncio.ensure_future(deliver)
        try:
            delivery = await delivering
            self.counters.prefills += 1
            self.counters.overrun_requests += sequence.overruns > 0
            return PrefillResult(
                first_token=sequence.tokens[-1],
                started_s=job.started_s or 0.0,
                finished_s=job.times_s[-1],
                delivered_s=delivery.delivered_s,
                wire_bytes=delivery.wire_bytes,
                compute_s=job.compute_s,
                overrun=sequence.worst_overrun,
                cached_tokens=self._system_tokens(request, delivery.reused_tokens),
            )
        except asyncio.CancelledError:
            self.counters.cancelled += 1
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Cancelled(f"{request.key.request_id} was abandoned") from None
        except Exception:
            self.counters.failed += 1
            raise
        finally:
            del self.jobs[request.key], self._deliveries[request.key]
            self._release(job)

    async def send_prefix(self, request: PrefixRequest) -> PrefixSent:
        """Copy a prefix that is cached here to another worker's cache. Cancelling it frees
        everything, here and there. Raises a WorkerError.
        """
        if self.state != "ready":
            raise NotReady(f"{self.options.name} is {self.state}")
        return await self.courier.send_prefix(request)

    async def _keep(self, request: PrefillRequest, job: Job) -> Delivery:
        """Hand the cache over to this worker's own decode."""
        await job.until(lambda: bool(job.times_s))
        sequence = job.sequence
        lease = sequence.lease
        assert lease is not None and sequence.computed == sequence.prompt_tokens
        self.arrivals.drop(request.key)
        arrival = self.arrivals.reserve(request.key, request.prompt, request.tenant, lease)
        sequence.lease = None
        self.arrivals.deliver(arrival.key, sequence.tokens[-1])
        return Delivery(time.monotonic(), 0, lease.reused_tokens)

    def take(self, request: DecodeRequest) -> Sequence:
        """The sequence of a delivered cache; give it to `stream` at once. Raises a WorkerError."""
        if not (self.state == "draining" and request.key in self.arrivals):
            self._expect("decode")
        arrival = self.arrivals.take(request.key)
        sequence = Sequence(
            id=request.key.request_id,
            tokens=list(arrival.prompt),
            max_tokens=request.max_tokens,
            tenant=arrival.tenant,
            sampling=request.sampling,
            stop_tokens=frozenset() if request.ignore_eos else self.engine.stop_tokens,
            arrived_s=time.monotonic(),
        )
        sequence.keys = list(arrival.lease.keys)
        sequence.arrive(arrival.lease, arrival.first_token)
        return sequence

    async def stream(self, key: Key, sequence: Sequence) -> AsyncGenerator[Token]:
        """Run a sequence to its end; yields each token, one sampled elsewhere included. Closing the
        generator frees its memory. Raises a WorkerError.
        """
        job: Job | None = None
        try:
            if not sequence.generated:
                self._expect("both")
            if key in self.jobs:
                raise Rejected(f"{key.request_id} attempt {key.attempt} is in hand")
            arrived = sequence.generated
            if arrived and sequence.tokens[-1] in sequence.stop_tokens:
                sequence.max_tokens = 1
            if arrived >= sequence.max_tokens:
                sequence.finish = "length"
                yield Token(sequence.tokens[-1], time.monotonic(), "length")
                self.counters.decodes += 1
                self.counters.tokens += 1
                return
            job = self._submit(sequence)
            self.jobs[key] = job
            if arrived:
                await job.until(lambda: job.admitted_s is not None)
                assert job.admitted_s is not None
                yield Token(sequence.tokens[sequence.prompt_tokens], job.admitted_s)
            sent = 0
            while await job.more(sent):
                position = sequence.prompt_tokens + arrived + sent
                last = position == len(sequence.tokens) - 1
                finish = sequence.finish if last else ""
                yield Token(sequence.tokens[position], job.times_s[sent], finish)
                sent += 1
            self.counters.decodes += 1
            self.counters.tokens += sequence.generated
            self.counters.overrun_requests += sequence.overruns > 0
        except (asyncio.CancelledError, GeneratorExit, Cancelled):
            self.counters.cancelled += 1
            raise
        except Exception:
            self.counters.failed += 1
            raise
        finally:
            if job is None:
                sequence.drop_memory()
            else:
                del self.jobs[key]
                self._release(job)

    def abandon(self, key: Key) -> None:
        """Drop whatever is held or under way for this attempt, and refuse it if it comes later."""
        if (delivering := self._deliveries.get(key)) is not None:
            # Ends the transfer first: until then the data plane reads this job's memory.
            delivering.cancel()
        elif (job := self.jobs.get(key)) is not None:
            self.loop.cancel(job)
        self.arrivals.abandon(key)

    # -- roles

    async def drain(self) -> None:
        """Take no new work; return when all in hand is done and no delivered cache is left."""
        if self.state == "ready":
            self._set_state("draining")
        while self.jobs or self.arrivals or len(self.scheduler) or len(self.courier.prefixes):
            self._activity.clear()
            await self._activity.wait()

    async def convert(self, role: str) -> None:
        """Drain, change role, and take work again."""
        await self.drain()
        self.role = role
        self.scheduler.limits = self._limits(role)
        self._set_state("ready")

    def _set_state(self, state: str) -> None:
        self.state = state
        self.courier.receiving = state == "ready" and self.role != "prefill"
        self.courier.prefixes.receiving = state == "ready" and self.role != "decode"

    def _limits(self, role: str) -> Limits:
        options, pacing = self.options, self.pacing
        if role == "prefill":
            return Limits(options.slots, options.step_tokens, one_prompt=True)
        if pacing is None:
            return Limits(options.max_batch, options.step_tokens)
        return Limits(pacing.max_batch, options.step_tokens, phases=pacing.phases)

    def _expect(self, work: str) -> None:
        """Raises NotReady unless this worker takes such work now."""
        if self.state != "ready":
            raise NotReady(f"{self.options.name} is {self.state}")
        if self.role not in (work, "both"):
            raise NotReady(f"{self.options.name} does {self.role}, not {work}")

    # -- parts

    def _submit(self, sequence: Sequence) -> Job:
        try:
            return self.loop.submit(sequence)
        except NeverFits as error:
            sequence.drop_memory()
            raise Rejected(str(error)) from error

    def _release(self, job: Job) -> None:
        """End the job if it has not ended, and give its memory back unless a step still uses it."""
        if not job.ended:
            self.loop.cancel(job)
        elif not job.sequence.in_step:
            job.sequence.drop_memory()
        self._memory_freed()

    def _memory_freed(self) -> None:
        self._activity.set()
        self.loop.kick()

    def _system_tokens(self, request: PrefillRequest, engine_tokens: int) -> int:
        """Engine tokens as tokens of the modelled system."""
        if request.block_tokens:
            return engine_tokens // self.options.page_tokens * request.block_tokens
        if request.system_tokens:
            return round(engine_tokens * request.system_tokens / len(request.prompt))
        return engine_tokens
