"""A worker of this project inside the client process: the engine without a network between.

Its computing shares the process with the client, on a thread of its own, so this is for looking at
the engine and not for measuring a client: the self-check tells when the one disturbs the other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from harness.load.flight import Flight
from harness.targets.base import Done, TargetSpec
from results.records import Status
from workloads.prompts import prompt_tokens

if TYPE_CHECKING:
    from engine.worker.worker import Worker


class InProcessTarget:
    """Loads `spec.worker_model` when probed. Needs the engine's dependencies (extra `engine`)."""

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._worker: Worker | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def probe(self) -> str:
        if self._worker is None:
            from engine.worker.loading import load_engine
            from engine.worker.options import WorkerOptions
            from engine.worker.worker import Worker

            options = WorkerOptions(None, None, model=self._spec.worker_model)
            self._worker = Worker(options, load_engine(options), None)
            await self._worker.start(self._crashed)
        return self._worker.engine.model.config.name

    def send(self, flight: Flight, done: Done) -> None:
        task = self._loop.create_task(self._serve(flight, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def cancel(reason: str) -> None:
            flight.fail(reason)
            task.cancel()

        flight.cancel = cancel

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._worker is not None:
            await self._worker.stop()

    async def _serve(self, flight: Flight, done: Done) -> None:
        from engine.sequence import Sequence
        from engine.worker.errors import WorkerError
        from engine.worker.messages import Key

        worker = self._worker
        assert worker is not None
        request = flight.request
        name = f"{flight.phase}-{request.id}"
        flight.attempts = 1
        tokens = prompt_tokens(request, worker.engine.model.config.vocab, flight.seed).tolist()
        stops = frozenset() if self._spec.ignore_eos else worker.engine.stop_tokens
        try:
            sequence = Sequence(
                name, tokens, request.output_tokens, request.tenant, stop_tokens=stops
            )
            async for token in worker.stream(Key(name, 0), sequence):
                # The time of the step that made it, not that at which this task came to run.
                flight.chunk_s.append(token.t_s)
                flight.finish_reason = token.finish
            flight.first_byte_s = flight.first_answer_s = next(iter(flight.chunk_s), None)
            flight.server_tokens = sequence.generated
            flight.prompt_tokens = sequence.prompt_tokens
            if not flight.failure:
                flight.status = Status.SUCCEEDED
        except WorkerError as error:
            flight.fail(str(error))
        except asyncio.CancelledError:
            flight.fail("cancelled")
        finally:
            flight.cancel = None
            flight.ended_s = self._loop.time()
            done(flight)

    def _crashed(self, error: BaseException) -> None:
        for task in self._tasks:
            task.cancel()
        raise error
