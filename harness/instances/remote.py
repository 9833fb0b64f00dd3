"""An instance that is a worker process, spoken to over its control socket.

Only control goes through here: prompts in, tokens out. The cache goes from worker to worker over
the data plane, through the link's address when it leaves its cluster.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from harness.ports import (
    DecodeDone,
    DecodeJob,
    InstanceLost,
    InstanceSpec,
    PrefillDone,
    PrefillJob,
    RequestRejected,
    Role,
    ServingError,
    TransferFailed,
)
from harness.stalls import Timeout
from results.records import TokenRun
from workloads.request import Request

#: Turns a request into what the engine sees: (prompt token ids, tokens to generate).
EngineRequest = Callable[[Request], tuple[list[int], int]]

#: No answer from a worker's control socket within this time means that it is lost.
CONTROL_TIMEOUT_S = 5.0
#: A healthy worker answers in milliseconds; on a busy host in tenths of a second.
SILENCE_S = 3.0
_BOUNDED_OUTSIDE = aiohttp.ClientTimeout(total=None, sock_connect=None)


@dataclass(frozen=True, slots=True)
class DataAddress:
    """Where a worker's data plane listens, as dialled from some side of the link."""

    host: str
    port: int
    incarnation: int


class PrefixGone(TransferFailed):
    """The worker no longer holds the prefix that it was to send."""


def _failure(instance: str, kind: str, message: str) -> ServingError:
    if kind == "unknown_prefix":
        return PrefixGone(f"{instance}: {message}")
    if kind == "rejected":
        return RequestRejected(f"{instance}: {message}")
    if kind in ("transfer_failed", "unknown_request"):
        return TransferFailed(f"{instance}: {message}")
    return InstanceLost(instance, f"{kind}: {message}")


class RemoteInstance:
    """Implements harness.ports.Instance over a worker's HTTP control API."""

    def __init__(
        self,
        spec: InstanceSpec,
        session: aiohttp.ClientSession,
        local_data: DataAddress,
        across_link: DataAddress | None,
        engine_request: EngineRequest,
        page_tokens: int,
        on_silent: Callable[[str], None] | None = None,
        timeout: Timeout = asyncio.timeout,
    ) -> None:
        """`page_tokens` is a cache page of the worker in tokens of the modelled system; `on_silent`
        hears why the worker is taken to be lost, and calls `mark_lost`; `timeout` is for what the
        worker answers at once if it lives."""
        self.spec = spec
        self.role = spec.role
        self.local_data = local_data
        self.across_link = across_link
        self.overruns = 0
        self.paced_jobs = 0
        self._session = session
        self._engine_request = engine_request
        self._page_tokens = page_tokens
        self._on_silent = on_silent
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._abandoning: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[str] = self._loop.create_future()

    def mark_lost(self, why: str) -> None:
        """Fail what is in flight here and refuse what comes."""
        if not self._lost.done():
            self._lost.set_result(why)

    @property
    def lost(self) -> bool:
        return self._lost.done()

    async def prefill(self, job: PrefillJob) -> PrefillDone:
        destination = job.destination
        assert isinstance(destination, RemoteInstance)
        address = destination.local_data if job.link is None else destination.across_link
        if address is None:
            raise TransferFailed(f"{destination.spec.name} cannot be reached across the link")
        prompt, _ = self._engine_request(job.request)
        body = self._prompt_body(job.request, job.attempt, prompt) | {
            "cached_tokens": job.cached_tokens,
            "held_tokens": job.held_tokens,
            "waited_s": max(0.0, self._loop.time() - job.arrived_s),
            "destination": {
                "host": address.host,
                "port": address.port,
                "incarnation": address.incarnation,
            },
        }
        try:
            reply = await self._guard(self._post("/prefill", body))
        except TransferFailed:
            await destination.look()
            raise
        self.paced_jobs += 1
        self.overruns += bool(reply["overrun"])
        return PrefillDone(
            started_s=reply["started_s"],
            finished_s=reply["finished_s"],
            delivered_s=reply["delivered_s"],
            wire_bytes=reply["wire_bytes"] if job.link is not None else 0,
            first_token=reply["first_token"],
            cached_tokens=reply["cached_tokens"],
        )

    async def send_prefix(
        self, request: Request, attempt: int, tokens: int, held_tokens: int, sink: RemoteInstance
    ) -> int:
        """Copy the first `tokens` of the prompt, cached here, to `sink` in the other cluster, which
        is thought to hold `held_tokens` of them. Returns the bytes that crossed the link. Raises
        PrefixGone and other ServingErrors.
        """
        address = sink.across_link
        if address is None:
            raise TransferFailed(f"{sink.spec.name} cannot be reached across the link")
        prompt, _ = self._engine_request(request)
        body = {
            "request_id": str(request.id),
            "attempt": attempt,
            "prompt": prompt,
            "pages": tokens // self._page_tokens,
            "held_pages": held_tokens // self._page_tokens,
            "tenant": request.tenant,
            "destination": {
                "host": address.host,
                "port": address.port,
                "incarnation": address.incarnation,
            },
        }
        reply = await self._guard(self._post("/prefix", body))
        return int(reply["wire_bytes"])

    async def cache_events(self) -> list[list[Any]]:
        """What appeared in the worker's cache and went since the last call. Raises InstanceLost,
        ClientError, TimeoutError."""
        events: list[list[Any]] = await self._guard(self._get("/cache-events"))
        return events

    async def audit_rows(self) -> list[dict[str, Any]]:
        """What the worker's transport wrote of each cache since the last call
        (`engine.transport.audit`). Raises InstanceLost, ClientError, TimeoutError."""
        rows: list[dict[str, Any]] = await self._guard(self._get("/audit"))
        return rows

    async def decode(self, job: DecodeJob) -> DecodeDone:
        return await self._guard(self._decode(job.request, job.attempt))

    async def generate(self, request: Request) -> list[int]:
        """The tokens of `request` when this instance alone computes it all (role `both`)."""
        prompt, _ = self._engine_request(request)
        body = self._prompt_body(request, 1, prompt) | {"destination": None}
        await self._guard(self._post("/prefill", body))
        done: DecodeDone = await self._guard(self._decode(request, 1))
        return done.token_ids or []

    def abandon(self, request: Request, attempt: int) -> None:
        if self.lost:
            return
        body = {"request_id": str(request.id), "attempt": attempt}
        task = self._loop.create_task(self._abandon(body))
        self._abandoning.add(task)
        task.add_done_callback(self._abandoning.discard)

    async def drain(self) -> None:
        await self._guard(self._post("/drain", {}, timeout_s=None))

    async def convert(self, role: Role) -> None:
        await self._guard(self._post("/convert", {"role": role.value}, timeout_s=None))
        self.role = role

    async def look(self) -> None:
        """Something went wrong on the way here: is the worker still there? When this returns, one
        that is not is known to be lost, and nobody is sent there again."""
        if self.lost or self._on_silent is None or await self.alive(SILENCE_S):
            return
        if not self.lost:  # a life that has ended meanwhile says nothing of the next one
            self._on_silent(f"no answer within {SILENCE_S:g} s")

    async def alive(self, timeout_s: float) -> bool:
        """Whether the worker answers at all within `timeout_s`."""
        try:
            async with (
                self._timeout(timeout_s),
                self._session.get("/health", timeout=_BOUNDED_OUTSIDE),
            ):
                return True
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            return False

    async def stats(self) -> dict[str, Any]:
        """Raises InstanceLost, ClientError, TimeoutError."""
        stats: dict[str, Any] = await self._guard(self._get("/stats"))
        return stats

    async def _abandon(self, body: dict[str, Any]) -> None:
        try:
            await self._guard(self._post("/abandon", body))
        except ServingError:
            return  # a worker that is gone holds nothing

    async def _guard(self, work: Awaitable[Any]) -> Any:
        """Await `work`, but fail at once when the worker is known to be lost."""
        if self.lost:
            if asyncio.iscoroutine(work):
                work.close()
            raise InstanceLost(self.spec.name, self._lost.result())
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._lost), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            raise InstanceLost(self.spec.name, self._lost.result())
        try:
            return task.result()
        except ServingError:
            raise
        except Exception as error:
            # Its session may have been closed for its heir before the question was asked.
            if self.lost:
                raise InstanceLost(self.spec.name, self._lost.result()) from error
            raise

    async def _get(self, path: str) -> Any:
        async with (
            self._timeout(CONTROL_TIMEOUT_S),
            self._session.get(path, timeout=_BOUNDED_OUTSIDE) as response,
        ):
            return await response.json()

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        try:
            async with self._session.post(path, json=body, timeout=_timeout(timeout_s)) as response:
                reply = await response.json()
                if response.status != 200:
                    raise _failure(self.spec.name, reply["error"], reply["message"])
                return reply
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            await self.look()
            raise InstanceLost(self.spec.name, f"{type(error).__name__} at {path}") from error

    def _prompt_body(self, request: Request, attempt: int, prompt: list[int]) -> dict[str, Any]:
        return {
            "request_id": str(request.id),
            "attempt": attempt,
            "prompt": prompt,
            "system_tokens": request.input_tokens,
            "block_tokens": self._page_tokens,
            "tenant": request.tenant,
            "cached_tokens": 0,
            "held_tokens": 0,
        }

    async def _decode(self, request: Request, attempt: int) -> DecodeDone:
        _, n_tokens = self._engine_request(request)
        body = {
            "request_id": str(request.id),
            "attempt": attempt,
            "max_tokens": n_tokens,
            "ignore_eos": True,
        }
        runs: list[TokenRun] = []
        token_ids: list[int] = []
        admitted_s = 0.0
        finished = False
        clock = self._loop.time
        try:
            async with self._session.post("/decode", json=body, timeout=_timeout(None)) as response:
                if response.status != 200:
                    reply = await response.json()
                    raise _failure(self.spec.name, reply["error"], reply["message"])
                async for line in response.content:
                    now_s = clock()
                    event = json.loads(line)
                    if "token" in event:
                        runs.append((now_s, 0.0, 1))
                        token_ids.append(event["token"])
                        admitted_s = event.get("admitted_s", admitted_s)
                    elif event.get("done"):
                        finished = True
                        self.paced_jobs += len(token_ids)
                        self.overruns += event["overruns"]
                    else:
                        raise _failure(self.spec.name, event["error"], event["message"])
        except (aiohttp.ClientError, ConnectionError) as error:
            await self.look()
            raise InstanceLost(self.spec.name, f"{type(error).__name__} while decoding") from error
        if not finished or len(token_ids) != n_tokens:
            raise InstanceLost(
                self.spec.name, f"stream ended after {len(token_ids)} of {n_tokens} tokens"
            )
        return DecodeDone(admitted_s, runs, token_ids)


def _timeout(total_s: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s, sock_connect=CONTROL_TIMEOUT_S)
