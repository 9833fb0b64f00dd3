"""The router: one request from decision to last token, with retries, in any mode.

It owns the accounting that policies see. Each request ends exactly once, succeeded or failed; an
attempt that ends early leaves no cache behind (`Instance.abandon`) and no assigned work in the
view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from harness.policies.base import Decision, NoRoute, Policy
from harness.ports import DecodeJob, Instance, Link, PrefillDone, PrefillJob, ServingError
from harness.prefixes import PrefixKeeper
from harness.view import View
from results.records import RequestRecord, Status
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class RetryRules:
    """`max_attempts` counts the first; `backoff_s` is waited before each later one."""

    max_attempts: int = 3
    backoff_s: float = 0.05


DecisionSink = Callable[[RequestRecord, Decision, View], None]
#: Moves so many (modelled) bytes of cached prefix from a cluster to another; raises TransferFailed.
Copier = Callable[[str, str, float], Awaitable[None]]


class Router:
    """Routes by `policy` over `instances` (by name) and `links` (by (source, sink) cluster).

    `prefixes` hears what was cached where; `copier` fetches a prefix that a decision asks for.
    """

    def __init__(
        self,
        policy: Policy,
        view: View,
        instances: Mapping[str, Instance],
        links: Mapping[tuple[str, str], Link],
        retry: RetryRules = RetryRules(),
        on_decision: DecisionSink | None = None,
        prefixes: PrefixKeeper | None = None,
        copier: Copier | None = None,
    ) -> None:
        self.policy = policy
        self.view = view
        self._instances = instances
        self._links = links
        self._retry = retry
        self._on_decision = on_decision
        self._prefixes = prefixes
        self._copier = copier
        self._loop = asyncio.get_running_loop()

    async def serve(self, request: Request, record: RequestRecord, origin_s: float) -> None:
        """Serve one request and fill in `record`, whose times count from `origin_s`. Never raises
        a ServingError: a failure is the record's status. Cancellation fails the record and
        propagates.
        """
        rules = self._retry
        try:
            while True:
                record.attempts += 1
                try:
                    await self._attempt(request, record, origin_s)
                except (ServingError, NoRoute) as error:
                    retryable = isinstance(error, NoRoute) or error.retryable
                    if not retryable or record.attempts >= rules.max_attempts:
                        record.status = Status.FAILED
                        record.failure = f"{type(error).__name__}: {error}"
                        break
                    await asyncio.sleep(rules.backoff_s * 2 ** (record.attempts - 1))
                else:
                    record.status = Status.SUCCEEDED
                    break
        except asyncio.CancelledError:
            record.status = Status.FAILED
            record.failure = "cancelled"
            raise
        finally:
            record.ended_s = self._loop.time() - origin_s

    async def _attempt(self, request: Request, record: RequestRecord, origin_s: float) -> None:
        loop_time = self._loop.time
        view = self.view
        view.now_s = now_s = loop_time()
        decision = self.policy.route(request, view)
        if self._on_decision is not None:
            self._on_decision(record, decision, view)
        prefill_pool = view.prefill[decision.prefill_cluster]
        decode_pool = view.decode[decision.decode_cluster]
        prefill_key, decode_key = decision.prefill_key, decision.decode_key
        prefill = self._instances[prefill_pool.names[prefill_key]]
        decode = self._instances[decode_pool.names[decode_key]]
        crosses = decision.prefill_cluster != decision.decode_cluster
        link = path = None
        if crosses:
            link = self._links[decision.prefill_cluster, decision.decode_cluster]
            path = view.path(decision.prefill_cluster, decision.decode_cluster)

        record.prefill_cluster = decision.prefill_cluster
        record.prefill_instance = prefill.spec.name
        record.decode_instance = decode.spec.name
        record.cached_tokens = decision.cached_tokens

        attempt = record.attempts
        handed_over = False
        decode_pool.assign(decode_key)
        try:
            prefill_pool.assign(prefill_key, now_s, decision.predicted_work_s)
            if path is not None:
                path.outstanding_bytes += decision.predicted_bytes
            error_s = -decision.predicted_work_s  # an attempt that fails is work not done
            copied_bytes = 0
            try:
                if decision.copy_from:
                    copied_bytes = await self._copy(request, decision)
                done = await prefill.prefill(
                    PrefillJob(
                        request,
                        attempt,
                        decision.cached_tokens,
                        decision.held_tokens,
                        decode,
                        link,
                    )
                )
                error_s = done.finished_s - done.started_s - decision.predicted_work_s
            finally:
                prefill_pool.settle(prefill_key, loop_time(), error_s)
                if path is not None:
                    path.outstanding_bytes -= decision.predicted_bytes
            if request.block_ids and self._prefixes is not None:
                self._learn(request, record, decision, done, prefill, decode)
            record.prefill_started_s = done.started_s - origin_s
            record.prefill_finished_s = done.finished_s - origin_s
            record.delivered_s = done.delivered_s - origin_s
            record.wire_bytes = done.wire_bytes + copied_bytes
            tokens = await decode.decode(DecodeJob(request, attempt, done))
            handed_over = True
        finally:
            decode_pool.settle(decode_key)
            if not handed_over:
                prefill.abandon(request, attempt)
                decode.abandon(request, attempt)
        runs = tokens.runs
        if origin_s:
            runs = [(start_s - origin_s, step_s, count) for start_s, step_s, count in runs]
        record.admitted_s = tokens.admitted_s - origin_s
        record.token_runs = runs
        record.token_ids = tokens.token_ids
        first_s = runs[0][0]
        start_s, step_s, count = runs[-1]
        record.first_token_s = first_s
        record.last_token_s = start_s + step_s * (count - 1)
        received = 0
        for _, _, run_count in runs:
            received += run_count
        record.tokens_received = received

    async def _copy(self, request: Request, decision: Decision) -> int:
        """Fetch the prefix that the decision counts on. Returns the bytes that crossed."""
        view, source, sink = self.view, decision.copy_from, decision.prefill_cluster
        n_bytes = decision.copy_bytes
        path = view.path(source, sink)
        if self._copier is None or path is None:
            raise AssertionError("a policy fetches prefixes only where View.copies says so")
        path.outstanding_bytes += n_bytes
        try:
            await self._copier(source, sink, n_bytes)
        finally:
            path.outstanding_bytes -= n_bytes
        if self._prefixes is not None:
            self._prefixes.copied(request, sink, decision.copy_tokens)
        return round(n_bytes)

    def _learn(
        self,
        request: Request,
        record: RequestRecord,
        decision: Decision,
        done: PrefillDone,
        prefill: Instance,
        decode: Instance,
    ) -> None:
        """What was reused really, and what is cached now."""
        reused = decision.cached_tokens if done.cached_tokens < 0 else done.cached_tokens
        record.cached_tokens = reused
        if self._prefixes is not None:
            self._prefixes.prefilled(
                request, prefill.spec, decode.spec, decision.cached_tokens, reused
            )
