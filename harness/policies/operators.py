"""Two rules that operators of disaggregated serving use today, for comparison."""

from __future__ import annotations

from dataclasses import dataclass

from harness.policies.base import Decision
from harness.policies.candidates import candidate, decide, hit_tokens, no_prefill
from harness.policies.parameters import parameter
from harness.view import View
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The side with the fewest queued requests an instance, among those whose cache can be moved
    within a time budget.

    The transfer time is bytes over the link's rate behind the bytes already promised to it. Length
    matters only through the budget.
    """

    transfer_budget_s: float = parameter(
        2.0, "longest predicted transfer that still counts as near", least=0.0
    )
    remote: str = "prfaas"
    local: str = "pd"
    name: str = "least-loaded"

    def route(self, request: Request, view: View) -> Decision:
        remote = candidate(request, view, self.remote, self.local)
        local = candidate(request, view, self.local, self.local)
        if remote is None or local is None:
            found = remote or local
            if found is None:
                raise no_prefill(self.remote, self.local)
            return decide(view, found, self.local, "only usable cluster")
        path = view.path(self.remote, self.local)
        transfer_s = 0.0 if path is None else path.copy_s(remote.wire_bytes)
        if transfer_s > self.transfer_budget_s:
            chosen, reason = local, "transfer over budget"
        else:
            remote_load = remote.pool.queued[remote.key]
            local_load = local.pool.queued[local.key]
            if remote_load == local_load:
                chosen = remote if remote.wait_s <= local.wait_s else local
            else:
                chosen = remote if remote_load < local_load else local
            reason = "least loaded"
        return decide(view, chosen, self.local, reason, (remote, local))


@dataclass(frozen=True, slots=True)
class UncachedThreshold:
    """A prompt with more than `uncached_tokens` not in the cache of the instance that will decode
    it is prefilled remotely (as llm-d's prefill/decode disaggregation decides by a fixed number of
    uncached tokens); shorter ones stay. Nothing else is looked at.
    """

    uncached_tokens: int = parameter(
        512, "prompts with more uncached tokens than this are prefilled remotely", least=0
    )
    remote: str = "prfaas"
    local: str = "pd"
    name: str = "uncached-threshold"

    def route(self, request: Request, view: View) -> Decision:
        remote = candidate(request, view, self.remote, self.local)
        local = candidate(request, view, self.local, self.local)
        uncached = request.input_tokens - hit_tokens(view, self.local, request)
        chosen, other = (remote, local) if uncached > self.uncached_tokens else (local, remote)
        chosen = chosen or other
        if chosen is None:
            raise no_prefill(self.remote, self.local)
        reason = "uncached above limit" if uncached > self.uncached_tokens else "mostly cached"
        return decide(
            view,
            chosen,
            self.local,
            reason,
            (remote, local),
            float(self.uncached_tokens),
        )
