"""The paper's three configurations and the length-blind balance that it leaves out.

Clusters are `prfaas` (remote, prefill only) and `pd` (local: prefill and all decode) unless named
otherwise. Within a cluster a request prefills where the predicted wait is least and decodes
where the fewest requests are active. All are pure and cost O(log n) in instances.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.accounts import PrefillPool
from harness.policies.base import Decision
from harness.policies.candidates import candidate, decide, hit_tokens, no_prefill
from harness.policies.parameters import parameter
from harness.view import View
from workloads.request import Request

_GOLDEN_64 = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Homogeneous:
    """Everything in the local cluster."""

    local: str = "pd"
    name: str = "homogeneous"

    def route(self, request: Request, view: View) -> Decision:
        found = candidate(request, view, self.local, self.local)
        if found is None:
            raise no_prefill(self.local)
        return decide(view, found, self.local, "only cluster")


@dataclass(frozen=True, slots=True)
class Naive:
    """All prefill remote, all decode local; no routing and no balancing."""

    remote: str = "prfaas"
    local: str = "pd"
    name: str = "naive"

    def route(self, request: Request, view: View) -> Decision:
        found = candidate(request, view, self.remote, self.local)
        if found is None:
            raise no_prefill(self.remote)
        return decide(view, found, self.local, "all prefill remote")


@dataclass(frozen=True, slots=True)
class Balanced:
    """Length-blind: to the cluster whose least loaded instance has the least predicted wait.

    The length of the request itself is never looked at, so both clusters see the same mix of
    lengths and both are used to the full: capacity is the sum of both prefill rates. While both
    have an idle instance the clusters share in proportion to their prefill rates at
    `reference_tokens`, spread evenly by request id (Weyl sequence).
    """

    reference_tokens: int = parameter(
        27_486, "length at which idle clusters' rates are compared: the workload's mean", least=1
    )
    remote: str = "prfaas"
    local: str = "pd"
    name: str = "balanced"

    def route(self, request: Request, view: View) -> Decision:
        remote = candidate(request, view, self.remote, self.local)
        local = candidate(request, view, self.local, self.local)
        if remote is None or local is None:
            found = remote or local
            if found is None:
                raise no_prefill(self.remote, self.local)
            return decide(view, found, self.local, "only usable cluster")
        if remote.wait_s == local.wait_s == 0.0:
            goes_remote = self._share_sends_remote(request.id, remote.pool, local.pool)
            reason = "share of capacity"
        else:
            goes_remote = remote.wait_s <= local.wait_s
            reason = "least wait"
        chosen = remote if goes_remote else local
        return decide(view, chosen, self.local, reason, (remote, local))

    def _share_sends_remote(self, request_id: int, remote: PrefillPool, local: PrefillPool) -> bool:
        remote_rate = len(remote.names) / remote.profile.prefill_s(self.reference_tokens)
        local_rate = len(local.names) / local.profile.prefill_s(self.reference_tokens)
        position = (request_id * _GOLDEN_64) & _MASK_64
        return position < remote_rate / (remote_rate + local_rate) * 2.0**64


@dataclass(frozen=True, slots=True)
class PrfaasStatic:
    """Long incremental prompts prefill remotely: l = total - cached at the local cluster > t.

    With no usable prefill instance on the side that the rule chose, the other side serves.
    """

    threshold_tokens: float
    remote: str = "prfaas"
    local: str = "pd"
    name: str = "prfaas-static"

    def route(self, request: Request, view: View) -> Decision:
        threshold = self.threshold_tokens
        incremental = request.input_tokens
        if request.block_ids:
            incremental -= hit_tokens(view, self.local, request)
        if incremental > threshold:
            side, other_side, reason = self.remote, self.local, "above threshold"
        else:
            side, other_side, reason = self.local, self.remote, "within threshold"
        chosen = candidate(request, view, side, self.local)
        other = None
        if chosen is None or view.explains:
            other = candidate(request, view, other_side, self.local)
        considered = (chosen, other) if side == self.remote else (other, chosen)
        if chosen is None:
            chosen, reason = other, "other side: none usable"
        if chosen is None:
            raise no_prefill(self.remote, self.local)
        return decide(view, chosen, self.local, reason, considered, threshold)
