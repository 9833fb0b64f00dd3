"""The paper's routing rule, moved by the schedulers: a threshold that is not a constant."""

from __future__ import annotations

from dataclasses import dataclass

from harness.policies.base import Decision
from harness.policies.candidates import candidate, decide, hit_tokens, no_prefill
from harness.policies.parameters import parameter
from harness.policies.priced import DEFAULT_PRICES, Prices
from harness.view import View
from workloads.request import Request


@dataclass(slots=True)
class Controls:
    """What the schedulers set and the policy reads. The threshold in force is
    `threshold_tokens` x `congestion`; `scarce`: the egress is short of bandwidth.
    """

    threshold_tokens: float
    congestion: float = 1.0
    scarce: bool = False

    @property
    def in_force_tokens(self) -> float:
        return self.threshold_tokens * self.congestion


@dataclass(frozen=True, slots=True)
class Prfaas:
    """l > t prefills remotely, where l is what no cache holds and t what the schedulers set.

    While the egress is scarce, or prefixes cannot be fetched, each cluster's cache is judged alone:
    l = total - cached at the local cluster. While it is abundant l = total - the longest prefix
    that any cluster holds, and a longer prefix is fetched across where that is sooner than
    computing it. Between t / `band` and
    t x `band`, where either side will do, the side that costs less goes (`priced`): the threshold
    says where a prompt belongs, the queues say what it costs to insist.
    """

    controls: Controls
    prices: Prices = DEFAULT_PRICES
    copies: bool = parameter(True, "fetch a longer prefix from the other cluster when sooner")
    affine: bool = parameter(True, "look at instances that hold more of the prompt")
    band: float = parameter(
        3.0, "queues decide for lengths between t / band and t x band; 1: never", least=1.0
    )
    remote: str = "prfaas"
    local: str = "pd"
    name: str = "prfaas"

    def route(self, request: Request, view: View) -> Decision:
        controls = self.controls
        threshold = controls.in_force_tokens
        copies = self.copies and view.copies and not controls.scarce
        cached = hit_tokens(view, self.local, request)
        if copies:
            cached = max(cached, hit_tokens(view, self.remote, request))
        incremental = request.input_tokens - cached
        remote = candidate(
            request, view, self.remote, self.local, affine=self.affine, copies=copies
        )
        local = candidate(request, view, self.local, self.local, affine=self.affine, copies=copies)
        goes_remote = incremental > threshold
        reason = "above threshold" if goes_remote else "within threshold"
        if remote is None or local is None:
            chosen = remote or local
            if chosen is None:
                raise no_prefill(self.remote, self.local)
            reason = "only usable cluster"
        else:
            if threshold < incremental * self.band and incremental < threshold * self.band:
                prices = self.prices
                remote_cost_s = prices.remote_cost_s(remote, view.now_s)
                cheaper_remote = remote_cost_s <= prices.local_cost_s(local)
                if cheaper_remote != goes_remote:
                    goes_remote = cheaper_remote
                    reason = "near threshold: cheaper " + ("remote" if goes_remote else "local")
            chosen = remote if goes_remote else local
        return decide(view, chosen, self.local, reason, (remote, local), threshold)
