"""One attempt at a request: where it goes, and what it has in the view's accounts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from harness.accounts import Path
from harness.policies.base import Decision
from harness.ports import (
    DecodeDone,
    DecodeJob,
    Instance,
    Link,
    PrefillDone,
    PrefillJob,
)
from harness.view import View
from workloads.request import Request


class Attempt:
    """In the accounts from its making until `end` or `abandon`, of which one must be called.

    The decision is kept until the prefill has ended: the less is in memory of a request that
    decodes, the more of them fit in a processor's caches.
    """

    __slots__ = (
        "_decision",
        "_decode_key",
        "_decode_pool",
        "_now_s",
        "_path",
        "_prefill_pool",
        "decode",
        "link",
        "number",
        "prefill",
        "request",
    )

    def __init__(
        self,
        request: Request,
        number: int,
        decision: Decision,
        view: View,
        instances: Mapping[str, Instance],
        links: Mapping[tuple[str, str], Link],
        now_s: Callable[[], float],
    ) -> None:
        """`now_s` is the loop's clock."""
        prefill_cluster, decode_cluster = decision.prefill_cluster, decision.decode_cluster
        prefill_pool, decode_pool = view.prefill[prefill_cluster], view.decode[decode_cluster]
        prefill_key, decode_key = decision.prefill_key, decision.decode_key
        self.request = request
        self.number = number
        self._decision: Decision | None = decision
        self.prefill = instances[prefill_pool.names[prefill_key]]
        self.decode = instances[decode_pool.names[decode_key]]
        self.link: Link | None = None
        self._path: Path | None = None
        if prefill_cluster != decode_cluster:
            self.link = links[prefill_cluster, decode_cluster]
            self._path = view.path(prefill_cluster, decode_cluster)
            if self._path is not None:
                self._path.outstanding_bytes += decision.predicted_bytes
        self._prefill_pool = prefill_pool
        self._decode_pool = decode_pool
        self._decode_key = decode_key
        self._now_s = now_s
        prefill_pool.assign(prefill_key, view.now_s, decision.predicted_work_s)
        decode_pool.assign(decode_key, request.input_tokens + request.output_tokens)

    def start_prefill(
        self, cached_tokens: int, held_tokens: int, arrived_s: float
    ) -> Awaitable[PrefillDone]:
        """Of the prompt, `cached_tokens` are there now and `held_tokens` at the decode side; it was
        to arrive at `arrived_s`."""
        return self.prefill.prefill(
            PrefillJob(
                self.request,
                self.number,
                cached_tokens,
                held_tokens,
                self.decode,
                self.link,
                arrived_s,
            )
        )

    def start_decode(self, done: PrefillDone) -> Awaitable[DecodeDone]:
        """The prefill has ended, after the time that it really took; what it delivered is to be
        decoded."""
        self._settle_prefill(done.finished_s - done.started_s)
        return self.decode.decode(DecodeJob(self.request, self.number, done))

    def end(self) -> None:
        """Nothing of it is left to decode."""
        request = self.request
        self._decode_pool.settle(self._decode_key, request.input_tokens + request.output_tokens)

    def abandon(self) -> None:
        """It ends without success: its cache is dropped wherever it is."""
        self._settle_prefill(0.0)
        self.end()
        self.prefill.abandon(self.request, self.number)
        self.decode.abandon(self.request, self.number)

    def _settle_prefill(self, took_s: float) -> None:
        """Out of the accounts of prefill and link. Idempotent."""
        decision = self._decision
        if decision is not None:
            self._decision = None
            self._prefill_pool.settle(
                decision.prefill_key, self._now_s(), decision.predicted_work_s, took_s
            )
            if self._path is not None:
                self._path.outstanding_bytes -= decision.predicted_bytes
