"""Where a request could prefill, and what that is predicted to cost.

Predictions use the router's own accounts: the wait at the instance, the work after what is cached
there, a prefix copied first, and the bytes that are ahead of it on the link.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.accounts import PrefillPool
from harness.policies.base import Decision, NoRoute
from harness.view import View
from workloads.request import Request

#: Instances with a longer prefix than the least loaded one that are looked at.
HOLDERS_LOOKED_AT = 8


@dataclass(slots=True)
class Candidate:
    """Prefill at `key` of `pool`. `ttft_s` is the predicted time to first token; `link_s` the time
    its own bytes take on the link and `link_wait_s` how much later than the prefill itself the
    bytes ahead of them leave it (both 0 inside a cluster).
    """

    pool: PrefillPool
    key: int
    wait_s: float
    work_s: float
    ttft_s: float
    cached_tokens: int = 0
    held_tokens: int = 0
    copy_from: str = ""
    copy_tokens: int = 0
    copy_bytes: float = 0.0
    wire_bytes: float = 0.0
    link_s: float = 0.0
    link_wait_s: float = 0.0


def candidate(
    request: Request,
    view: View,
    cluster: str,
    local: str,
    *,
    affine: bool = False,
    copies: bool = False,
) -> Candidate | None:
    """The best instance of `cluster` for a request that decodes in `local`; None: none usable.

    `affine` also looks at instances that hold more of the prompt than the least loaded one;
    `copies` at fetching a longer prefix from another cluster where that takes less time.
    """
    pool = view.prefill.get(cluster)
    if pool is None:
        return None
    input_tokens, now_s = request.input_tokens, view.now_s
    key, wait_s = pool.least_wait(now_s)
    if key < 0:
        return None
    directory = view.directory
    if directory is None or not request.block_ids:
        work_s = pool.profile.prefill_s(input_tokens)
        found = Candidate(pool, key, wait_s, work_s, wait_s + work_s)
    else:
        cached = directory.instance_tokens(pool.names[key], request)
        work_s = pool.profile.prefill_s(input_tokens, cached)
        if affine:
            for name, tokens in directory.holders(cluster, request, HOLDERS_LOOKED_AT):
                other = pool.key_of.get(name, -1)
                if tokens <= cached or other < 0 or not pool.usable(other):
                    continue
                other_wait_s = pool.wait_s(other, now_s)
                other_work_s = pool.profile.prefill_s(input_tokens, tokens)
                if other_wait_s + other_work_s < wait_s + work_s:
                    key, cached = other, tokens
                    wait_s, work_s = other_wait_s, other_work_s
        found = Candidate(pool, key, wait_s, work_s, wait_s + work_s, cached)
        found.held_tokens = cached
        if cluster != local:
            decode = view.decode.get(local)
            decode_key = -1 if decode is None else decode.least()
            if decode is not None and decode_key >= 0:
                found.held_tokens = directory.instance_held_tokens(
                    decode.names[decode_key], request
                )
        if copies:
            _consider_copies(found, request, view)
    if cluster != local:
        _cross(found, request, view, local)
    return found


def _consider_copies(found: Candidate, request: Request, view: View) -> None:
    """Fetch a longer prefix from another cluster first, if that ends sooner."""
    directory, pool = view.directory, found.pool
    assert directory is not None
    if not view.copies:
        return
    held_tokens = -1
    for source in view.prefill:
        tokens = directory.hit_tokens(source, request) if source != pool.cluster else 0
        path = view.path(source, pool.cluster) if tokens > found.cached_tokens else None
        if path is None:
            continue
        if held_tokens < 0:
            held_tokens = directory.instance_held_tokens(pool.names[found.key], request)
        n_bytes = pool.profile.kv_bytes(tokens, min(tokens, held_tokens))
        work_s = pool.profile.prefill_s(request.input_tokens, tokens) + path.copy_s(n_bytes)
        if work_s < found.work_s:
            found.ttft_s += work_s - found.work_s
            found.work_s = work_s
            found.cached_tokens = found.copy_tokens = tokens
            found.copy_bytes = n_bytes
            found.copy_from = source


def _cross(found: Candidate, request: Request, view: View, local: str) -> None:
    """The cache crosses to `local`: its end comes after the prefill, or after the bytes ahead."""
    profile = found.pool.profile
    n_bytes = profile.kv_bytes(request.input_tokens, found.held_tokens)
    found.wire_bytes = n_bytes
    path = view.path(found.pool.cluster, local)
    if path is None:
        return
    ahead_s, link_s = path.crossing_s(n_bytes)
    prefill_end_s = found.ttft_s
    behind_s = ahead_s - prefill_end_s
    found.link_s = link_s
    found.link_wait_s = behind_s if behind_s > 0.0 else 0.0
    last_layer_s = link_s / profile.n_layers
    link_end_s = ahead_s + link_s
    end_s = prefill_end_s + last_layer_s
    found.ttft_s = (link_end_s if link_end_s > end_s else end_s) + path.delay_s


def decide(
    view: View,
    chosen: Candidate,
    local: str,
    reason: str,
    considered: tuple[Candidate | None, ...] = (),
    threshold_tokens: float | None = None,
) -> Decision:
    """Prefill as `chosen`, decode at the least active instance of `local`. Raises NoRoute."""
    decode_pool = view.decode.get(local)
    decode_key = -1 if decode_pool is None else decode_pool.least()
    if decode_key < 0:
        raise NoRoute(f"no usable decode instance in {local}")
    if chosen.copy_from:
        reason = f"{reason}, with a prefix from {chosen.copy_from}"
    return Decision(
        chosen.pool.cluster,
        chosen.key,
        local,
        decode_key,
        chosen.work_s,
        chosen.cached_tokens,
        chosen.held_tokens,
        chosen.copy_from,
        reason,
        considered,
        chosen.wire_bytes,
        chosen.copy_tokens,
        chosen.copy_bytes,
        threshold_tokens,
    )


def no_prefill(*clusters: str) -> NoRoute:
    return NoRoute(f"no usable prefill instance in {' or '.join(clusters)}")


def hit_tokens(view: View, cluster: str, request: Request) -> int:
    """The longest prefix that a prefill in `cluster` could start from, at least one token short."""
    directory = view.directory
    if directory is None or not request.block_ids:
        return 0
    return min(directory.hit_tokens(cluster, request), request.input_tokens - 1)
