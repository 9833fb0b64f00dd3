"""Earliest predicted finish, with and without shadow prices on what a request takes from others."""

from __future__ import annotations

from dataclasses import dataclass

from harness.policies.base import Decision
from harness.policies.candidates import Candidate, candidate, decide, no_prefill
from harness.policies.parameters import parameter
from harness.view import View
from workloads.request import Request


@dataclass(frozen=True, slots=True)
class Eft:
    """Earliest predicted finish: wait, work and transfer, nothing else.

    It ignores what a request costs those behind it, so when both pools are busy it sends prompts
    where they are done soonest and not where the pool is comparatively good at them.
    """

    copies: bool = parameter(True, "fetch a longer prefix from the other cluster when sooner")
    affine: bool = parameter(True, "look at instances that hold more of the prompt")
    remote: str = "prfaas"
    local: str = "pd"
    name: str = "eft"

    def route(self, request: Request, view: View) -> Decision:
        remote = candidate(
            request, view, self.remote, self.local, affine=self.affine, copies=self.copies
        )
        local = candidate(
            request, view, self.local, self.local, affine=self.affine, copies=self.copies
        )
        if remote is None or local is None:
            found = remote or local
            if found is None:
                raise no_prefill(self.remote, self.local)
            return decide(view, found, self.local, "only usable cluster")
        chosen = remote if remote.ttft_s <= local.ttft_s else local
        return decide(view, chosen, self.local, "earliest finish", (remote, local))


@dataclass(frozen=True, slots=True)
class Prices:
    """What a second of prefill, or of the link, is worth to the requests behind this one.

    Remote prefill time is priced by how many instances there are busy and by the mean work left
    there, because a busy neighbour already makes the next long prompt's turn later; local prefill
    time by the wait at its least loaded instance, because an idle local instance is worth nothing
    to anybody else. Link time is priced by how far the link is behind the prefill. All prices
    vanish in an idle system, which leaves earliest finish; under heavy traffic they dominate, and
    a prompt goes where T_remote x price is below T_local x price: a threshold, because T_local /
    T_remote grows with length.

    The defaults were chosen by simulation of the paper's workload (docs/schedulers.md).
    """

    remote_busy_price: float = parameter(
        0.9, "price of remote prefill time while all remote instances are busy", least=0.0
    )
    remote_price_per_s: float = parameter(
        0.15, "and more of it, per second of mean work left there", least=0.0
    )
    local_price_per_s: float = parameter(
        0.65, "price of local prefill time, per second of least wait there", least=0.0
    )
    link_price_per_s: float = parameter(
        0.5, "price of link time, per second that the link is behind the prefill", least=0.0
    )

    def remote_cost_s(self, found: Candidate, now_s: float) -> float:
        left_s, busy = found.pool.load(now_s)
        price = self.remote_busy_price * busy + self.remote_price_per_s * left_s
        link_price = self.link_price_per_s * found.link_wait_s
        return found.ttft_s + price * found.work_s + link_price * found.link_s

    def local_cost_s(self, found: Candidate) -> float:
        return found.ttft_s + self.local_price_per_s * found.wait_s * found.work_s


DEFAULT_PRICES = Prices()


@dataclass(frozen=True, slots=True)
class Priced:
    """Earliest predicted finish plus what the request costs others (`Prices`)."""

    prices: Prices = DEFAULT_PRICES
    copies: bool = parameter(True, "fetch a longer prefix from the other cluster when sooner")
    affine: bool = parameter(True, "look at instances that hold more of the prompt")
    remote: str = "prfaas"
    local: str = "pd"
    name: str = "priced"

    def route(self, request: Request, view: View) -> Decision:
        remote = candidate(
            request, view, self.remote, self.local, affine=self.affine, copies=self.copies
        )
        local = candidate(
            request, view, self.local, self.local, affine=self.affine, copies=self.copies
        )
        if remote is None or local is None:
            found = remote or local
            if found is None:
                raise no_prefill(self.remote, self.local)
            return decide(view, found, self.local, "only usable cluster")
        prices = self.prices
        if prices.remote_cost_s(remote, view.now_s) <= prices.local_cost_s(local):
            return decide(view, remote, self.local, "cheaper remote", (remote, local))
        return decide(view, local, self.local, "cheaper local", (remote, local))
