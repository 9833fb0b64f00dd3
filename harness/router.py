"""The router: one request from decision to last token, with retries, in any mode.

It owns the accounting that policies see. Each request ends exactly once, succeeded or failed; an
attempt that ends early leaves no cache behind (`Instance.abandon`) and no assigned work in the
view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.policies.base import Decision, NoRoute, Policy
from harness.ports import DecodeJob, Instance, Link, PrefillJob, ServingError
from harness.view import View
from results.records import RequestRecord, Status
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class RetryRules:
    """`max_attempts` counts the first; `backoff_s` is waited before each later one."""

    max_attempts: int = 3
    backoff_s: float = 0.05


DecisionSink = Callable[[RequestRecord, Decision, View], None]


class Router:
    """Routes by `policy` over `instances` (by name) and `links` (by (source, sink) cluster)."""

    def __init__(
        self,
        policy: Policy,
        view: View,
        instances: Mapping[str, Instance],
        links: Mapping[tuple[str, str], Link],
        retry: RetryRules = RetryRules(),
        on_decision: DecisionSink | None = None,
    ) -> None:
        self.policy = policy
        self.view = view
        self._instances = instances
        self._links = links
        self._retry = retry
        self._on_decision = on_decision
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
        link = self._links[decision.prefill_cluster, decision.decode_cluster] if crosses else None

        record.prefill_cluster = decision.prefill_cluster
        record.prefill_instance = prefill.spec.name
        record.decode_instance = decode.spec.name
        record.cached_tokens = decision.cached_tokens

        attempt = record.attempts
        handed_over = False
        decode_pool.assign(decode_key)
        try:
            prefill_pool.assign(prefill_key, now_s, decision.predicted_work_s)
            error_s = -decision.predicted_work_s  # an attempt that fails is work not done
            try:
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
            record.prefill_started_s = done.started_s - origin_s
            record.prefill_finished_s = done.finished_s - origin_s
            record.delivered_s = done.delivered_s - origin_s
            record.wire_bytes = done.wire_bytes
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
