"""The paper's three configurations and the length-blind balance that it leaves out.

Clusters are `prfaas` (remote, prefill only) and `pd` (local: prefill and all decode) unless named
otherwise. Within a cluster a request prefills where the predicted wait is least and decodes
where the fewest requests are active. All are pure and cost O(log n) in instances.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.policies.base import Decision, NoRoute
from harness.view import PrefillPool, View
from workloads.request import Request

_GOLDEN_64 = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def hit_tokens(view: View, cluster: str, request: Request) -> int:
    """Tokens of the prompt that `cluster` holds; the last one is always computed anew."""
    if view.directory is None:
        return 0
    return min(view.directory.hit_tokens(cluster, request), request.input_tokens - 1)


def usable_pool(view: View, cluster: str) -> tuple[PrefillPool, int] | None:
    """The prefill pool of `cluster` and its least loaded usable instance, if it has one."""
    pool = view.prefill.get(cluster)
    if pool is None:
        return None
    key = pool.least()
    return None if key < 0 else (pool, key)


def decide(
    request: Request,
    view: View,
    pool: PrefillPool,
    key: int,
    decode_cluster: str,
    reason: str,
    alternatives: tuple[tuple[str, float], ...] = (),
) -> Decision:
    """Prefill at `key` of `pool`, decode at the least active instance of `decode_cluster`."""
    decode_pool = view.decode.get(decode_cluster)
    decode_key = -1 if decode_pool is None else decode_pool.least()
    if decode_key < 0:
        raise NoRoute(f"no usable decode instance in {decode_cluster}")
    cached = hit_tokens(view, pool.cluster, request)
    crosses = pool.cluster != decode_cluster
    held = hit_tokens(view, decode_cluster, request) if crosses else cached
    return Decision(
        prefill_cluster=pool.cluster,
        prefill_key=key,
        decode_cluster=decode_cluster,
        decode_key=decode_key,
        predicted_work_s=pool.profile.prefill_s(request.input_tokens, cached),
        cached_tokens=cached,
        held_tokens=held,
        reason=reason,
        alternatives=alternatives,
    )


def predicted_ttft_s(request: Request, view: View, pool: PrefillPool, key: int) -> float:
    """Wait plus work if the request prefilled at `key` of `pool` now."""
    cached = hit_tokens(view, pool.cluster, request)
    work_s = pool.profile.prefill_s(request.input_tokens, cached)
    return pool.wait_s(key, view.now_s) + work_s


def _ttfts(
    request: Request, view: View, *found: tuple[PrefillPool, int] | None
) -> tuple[tuple[str, float], ...]:
    return tuple(
        (usable[0].cluster, predicted_ttft_s(request, view, *usable))
        for usable in found
        if usable is not None
    )


def no_prefill(*clusters: str) -> NoRoute:
    return NoRoute(f"no usable prefill instance in {' or '.join(clusters)}")


@dataclass(frozen=True, slots=True)
class Homogeneous:
    """Everything in the local cluster."""

    local: str = "pd"
    name: str = "homogeneous"

    def route(self, request: Request, view: View) -> Decision:
        found = usable_pool(view, self.local)
        if found is None:
            raise no_prefill(self.local)
        return decide(request, view, *found, self.local, "only cluster")


@dataclass(frozen=True, slots=True)
class Naive:
    """All prefill remote, all decode local; no routing and no balancing."""

    remote: str = "prfaas"
    local: str = "pd"
    name: str = "naive"

    def route(self, request: Request, view: View) -> Decision:
        found = usable_pool(view, self.remote)
        if found is None:
            raise no_prefill(self.remote)
        return decide(request, view, *found, self.local, "all prefill remote")


@dataclass(frozen=True, slots=True)
class Balanced:
    """Length-blind: to the cluster whose least loaded instance has the least predicted wait.

    The length of the request itself is never looked at, so both clusters see the same mix of
    lengths and both are used to the full: capacity is the sum of both prefill rates. While both
    have an idle instance the clusters share in proportion to their prefill rates at
    `reference_tokens` (the workload's mean, say), spread evenly by request id (Weyl sequence).
    """

    reference_tokens: int = 27_486
    remote: str = "prfaas"
    local: str = "pd"
    name: str = "balanced"

    def route(self, request: Request, view: View) -> Decision:
        remote = usable_pool(view, self.remote)
        local = usable_pool(view, self.local)
        if remote is None or local is None:
            found = remote or local
            if found is None:
                raise no_prefill(self.remote, self.local)
            return decide(request, view, *found, self.local, "only usable cluster")
        now_s = view.now_s
        remote_wait_s = remote[0].wait_s(remote[1], now_s)
        local_wait_s = local[0].wait_s(local[1], now_s)
        if remote_wait_s == local_wait_s == 0.0:
            goes_remote = self._share_sends_remote(request.id, remote[0], local[0])
            reason = "share of capacity"
        else:
            goes_remote = remote_wait_s <= local_wait_s
            reason = "least wait"
        return decide(
            request,
            view,
            *(remote if goes_remote else local),
            self.local,
            reason,
            _ttfts(request, view, remote, local),
        )

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
        incremental = request.input_tokens - hit_tokens(view, self.local, request)
        remote = usable_pool(view, self.remote)
        local = usable_pool(view, self.local)
        alternatives = _ttfts(request, view, remote, local)
        if incremental > self.threshold_tokens:
            chosen, other, reason = remote, local, "above threshold"
        else:
            chosen, other, reason = local, remote, "within threshold"
        if chosen is None:
            chosen, reason = other, "other side: none usable"
        if chosen is None:
            raise no_prefill(self.remote, self.local)
        return decide(request, view, *chosen, self.local, reason, alternatives)
