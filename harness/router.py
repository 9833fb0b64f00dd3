"""The router: one request from decision to last token, with retries, in any mode.

It owns the accounting that policies see. Each request ends exactly once, succeeded or failed; an
attempt that ends early leaves no cache behind (`Instance.abandon`) and no assigned work in the
view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from harness.attempt import Attempt
from harness.policies.base import Decision, NoRoute, Policy
from harness.ports import (
    DecodeDone,
    Instance,
    Link,
    PrefillDone,
    ServingError,
    TransferFailed,
)
from harness.prefixes import PrefixKeeper
from harness.view import View
from results.records import RequestRecord, Status
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class RetryRules:
    """When a request is tried again, and when it has failed.

    `max_attempts` counts the first, and not those during which one of their two instances was
    lost: there can be no more of these than instances are lost while the request is served, since
    a lost one gets no work until it is back. `backoff_s` is waited before each later attempt.
    `patience_s` (loop seconds, in all) is how long a request waits for lost instances to come back
    when no other can take it; each return is another attempt.
    """

    max_attempts: int = 3
    backoff_s: float = 0.05
    patience_s: float = 0.0


DecisionSink = Callable[[RequestRecord, Decision, View], None]


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """Fetch the first `tokens` of a prompt, and the state there, which cluster `source` holds, into
    the cache of `sink`. `n_bytes` of the modelled system are thought to cross."""

    request: Request
    attempt: int
    source: str
    sink: Instance
    tokens: int
    n_bytes: float


#: Returns the bytes that crossed the link; raises TransferFailed, and then nothing was stored.
Copier = Callable[[PrefixCopy], Awaitable[int]]


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
        view.explains = on_decision is not None
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

        One coroutine from arrival to last token: each one more would have to be woken with it.
        """
        rules, view = self._retry, self.view
        failed, patience_s = 0, rules.patience_s
        try:
            while True:
                record.attempts += 1
                n_losses, n_returns = view.n_losses, view.n_returns
                try:
                    attempt, decision = self._begin(request, record)
                    try:
                        cached_tokens, held_tokens = decision.cached_tokens, decision.held_tokens
                        copied_bytes = 0
                        if decision.copy_from:
                            cached_tokens, copied_bytes = await self._copy(attempt, decision)
                        del decision  # nothing is kept in memory longer than it is needed
                        done = await attempt.start_prefill(
                            cached_tokens, held_tokens, origin_s + record.scheduled_s
                        )
                        if request.block_ids and self._prefixes is not None:
                            self._learn(record, attempt, cached_tokens, done)
                        _note_prefill(record, done, copied_bytes, origin_s)
                        decoding = attempt.start_decode(done)
                        del done
                        tokens = await decoding
                    except BaseException:
                        attempt.abandon()
                        raise
                    attempt.end()
                    _note_tokens(record, tokens, origin_s)
                except NoRoute as error:
                    if view.lost and patience_s > 0.0:
                        patience_s -= await self._someone_is_back(n_returns, patience_s)
                        continue
                    reason: Exception = error
                    failed += 1
                except ServingError as error:
                    reason = error
                    if not error.retryable:
                        failed = rules.max_attempts
                    elif not view.lost_since(
                        n_losses, record.prefill_instance, record.decode_instance
                    ):
                        failed += 1
                else:
                    record.status = Status.SUCCEEDED
                    break
                if failed >= rules.max_attempts:
                    record.status = Status.FAILED
                    record.failure = f"{type(reason).__name__}: {reason}"
                    break
                await asyncio.sleep(rules.backoff_s * 2 ** max(0, failed - 1))
        except asyncio.CancelledError:
            record.status = Status.FAILED
            record.failure = "cancelled"
            raise
        finally:
            record.ended_s = self._loop.time() - origin_s

    async def _someone_is_back(self, n_returns: int, most_s: float) -> float:
        """Wait, at most so long, until an instance has begun to take work since the count was
        `n_returns`. Returns the seconds waited."""
        began_s = self._loop.time()
        while (  # noqa: ASYNC110 - the view is plain data, without a loop
            self.view.n_returns == n_returns and self._loop.time() - began_s < most_s
        ):
            await asyncio.sleep(self._retry.backoff_s)
        return self._loop.time() - began_s

    def _begin(self, request: Request, record: RequestRecord) -> tuple[Attempt, Decision]:
        """Decide where the next attempt goes. Raises NoRoute."""
        view, now_s = self.view, self._loop.time
        view.now_s = now_s()
        decision = self.policy.route(request, view)
        if self._on_decision is not None:
            self._on_decision(record, decision, view)
        attempt = Attempt(
            request, record.attempts, decision, view, self._instances, self._links, now_s
        )
        record.prefill_cluster = decision.prefill_cluster
        record.prefill_instance = attempt.prefill.spec.name
        record.decode_instance = attempt.decode.spec.name
        record.cached_tokens = decision.cached_tokens
        return attempt, decision

    async def _copy(self, attempt: Attempt, decision: Decision) -> tuple[int, int]:
        """Fetch the prefix that the decision counts on. Returns (tokens that need no computing
        now, bytes that crossed). One that fails costs time: what it lacks is computed.
        """
        view, request, sink = self.view, attempt.request, attempt.prefill
        source, n_bytes = decision.copy_from, decision.copy_bytes
        path = view.path(source, decision.prefill_cluster)
        if self._copier is None or path is None or view.directory is None:
            raise AssertionError("a policy fetches prefixes only where View.copies says so")
        path.outstanding_bytes += n_bytes
        try:
            crossed = await self._copier(
                PrefixCopy(request, attempt.number, source, sink, decision.copy_tokens, n_bytes)
            )
        except TransferFailed:
            return view.directory.instance_tokens(sink.spec.name, request), 0
        finally:
            path.outstanding_bytes -= n_bytes
        if self._prefixes is not None:
            self._prefixes.copied(request, sink.spec, decision.copy_tokens)
        return decision.cached_tokens, crossed

    def _learn(
        self, record: RequestRecord, attempt: Attempt, expected_tokens: int, done: PrefillDone
    ) -> None:
        """What was reused really, and what is cached now."""
        reused = expected_tokens if done.cached_tokens < 0 else done.cached_tokens
        record.cached_tokens = reused
        if self._prefixes is not None:
            self._prefixes.prefilled(
                attempt.request, attempt.prefill.spec, attempt.decode.spec, expected_tokens, reused
            )


def _note_prefill(
    record: RequestRecord, done: PrefillDone, copied_bytes: int, origin_s: float
) -> None:
    record.prefill_started_s = done.started_s - origin_s
    record.prefill_finished_s = done.finished_s - origin_s
    record.delivered_s = done.delivered_s - origin_s
    record.wire_bytes = done.wire_bytes + copied_bytes


def _note_tokens(record: RequestRecord, done: DecodeDone, origin_s: float) -> None:
    runs = done.runs
    if origin_s:
        runs = [(start_s - origin_s, step_s, count) for start_s, step_s, count in runs]
    record.admitted_s = done.admitted_s - origin_s
    record.token_runs = runs
    record.token_ids = done.token_ids
    start_s, step_s, count = runs[-1]
    record.first_token_s = runs[0][0]
    record.last_token_s = start_s + step_s * (count - 1)
    received = 0
    for _, _, run_count in runs:
        received += run_count
    record.tokens_received = received
