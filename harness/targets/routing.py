"""The project's own policies over external prefill/decode pairs, so that a real deployment runs the
four-way comparison.

The deployment's servers stand in two clusters, `prfaas` (remote prefill) and `pd` (local prefill
and all decode), as in every other mode. A policy sees the client's own accounts of them: requests
assigned, and prefill rates as observed. What an external server does not tell (its link, its
prefix cache) no policy sees here.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.accounts import DecodePool, PrefillPool
from harness.policies.base import Decision, Policy
from harness.policies.static import Balanced, Homogeneous, Naive, PrfaasStatic
from harness.topology import PD, PRFAAS
from harness.view import View
from workloads.request import Request

#: The four configurations of the comparison, by the policies that make them.
COMPARED = ("homogeneous", "naive", "balanced", "prfaas")

#: Before any prefill has been observed, tokens a second; only ratios between clusters matter then.
_GUESSED_RATE = 10_000.0
#: Weight of the latest prefill in the observed rate.
_WEIGHT = 0.1


@dataclass(slots=True)
class ObservedPrefill:
    """The work model of a cluster: prompt tokens a second, as its prefills have been observed."""

    tokens_per_s: float = _GUESSED_RATE
    observed: int = 0

    @property
    def n_layers(self) -> int:
        return 1

    def prefill_s(self, input_tokens: int, cached_tokens: int = 0) -> float:
        return max(1, input_tokens - cached_tokens) / self.tokens_per_s

    def kv_bytes(self, tokens: int, held_tokens: int = 0) -> float:
        """Unknown to a client; policies compare times here, and links are not in the view."""
        return 0.0

    def note(self, input_tokens: int, took_s: float) -> None:
        if took_s > 0:
            weight = _WEIGHT if self.observed else 1.0
            self.tokens_per_s += weight * (input_tokens / took_s - self.tokens_per_s)
            self.observed += 1


def policy_of(name: str, threshold_tokens: float) -> Policy:
    """One of COMPARED. `prfaas` is the paper's threshold rule, without schedulers."""
    policies: dict[str, Policy] = {
        "homogeneous": Homogeneous(),
        "naive": Naive(),
        "balanced": Balanced(),
        "prfaas": PrfaasStatic(threshold_tokens),
    }
    return policies[name]


class PairRouter:
    """Chooses a prefill and a decode server for each request, and keeps the accounts."""

    def __init__(
        self, policy: str, threshold_tokens: float, remote: int, local: int, decode: int
    ) -> None:
        self._policy = policy_of(policy, threshold_tokens)
        self._models = {PRFAAS: ObservedPrefill(), PD: ObservedPrefill()}
        pools = {name: PrefillPool(name, model) for name, model in self._models.items()}
        for cluster, count in ((PRFAAS, remote), (PD, local)):
            for index in range(count):
                pools[cluster].add(f"{cluster}-{index}")
        decoders = DecodePool(PD)
        for index in range(decode):
            decoders.add(f"decode-{index}")
        present = {name: pool for name, pool in pools.items() if pool.names}
        self._view = View(now_s=0.0, prefill=present, decode={PD: decoders}, links={})

    def choose(self, request: Request, now_s: float) -> Decision:
        """Raises NoRoute where the policy needs servers that there are none of."""
        self._view.now_s = now_s
        decision = self._policy.route(request, self._view)
        prefill = self._view.prefill[decision.prefill_cluster]
        prefill.assign(decision.prefill_key, now_s, decision.predicted_work_s)
        self._view.decode[PD].assign(decision.decode_key, _tokens(request))
        return decision

    def prefilled(
        self, decision: Decision, request: Request, now_s: float, took_s: float | None
    ) -> None:
        """The prefill of `decision` ended after `took_s`, None where it failed."""
        self._view.prefill[decision.prefill_cluster].settle(
            decision.prefill_key, now_s, decision.predicted_work_s, took_s or 0.0
        )
        if took_s is not None:
            self._models[decision.prefill_cluster].note(request.input_tokens, took_s)

    def ended(self, decision: Decision, request: Request) -> None:
        self._view.decode[PD].settle(decision.decode_key, _tokens(request))


def _tokens(request: Request) -> int:
    return request.input_tokens + request.output_tokens
