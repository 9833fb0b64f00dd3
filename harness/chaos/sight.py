"""What the control plane of a campaign sees: predicted work, measured links, its own choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from harness.chaos.wire import Wire
from harness.policies.base import Decision, Policy
from harness.ports import LinkSignals
from harness.view import View
from workloads.request import Request


class Work:
    """What the control plane predicts of a worker of `harness.chaos.worker`."""

    n_layers = 4

    def prefill_s(self, input_tokens: float, cached_tokens: float = 0) -> float:
        return 0.01 + 0.003 * (input_tokens - cached_tokens)

    def kv_bytes(self, tokens: float, held_tokens: float = 0) -> float:
        return 256 + 32 * (tokens - held_tokens)


class Counted:
    """A policy that counts how often each request was routed (an attempt is a routing), and shows
    each choice of instances to `on_choice`."""

    def __init__(
        self, policy: Policy, calls: dict[int, int], on_choice: Callable[[Request, str], None]
    ) -> None:
        self._policy = policy
        self._calls = calls
        self._on_choice = on_choice
        self.name = policy.name

    def route(self, request: Request, view: View) -> Decision:
        self._calls[request.id] = self._calls.get(request.id, 0) + 1
        decision = self._policy.route(request, view)
        self._on_choice(request, view.prefill[decision.prefill_cluster].names[decision.prefill_key])
        self._on_choice(request, view.decode[decision.decode_cluster].names[decision.decode_key])
        return decision


class WatchedLink:
    """What the control plane measures of a wire (harness.ports.Link)."""

    def __init__(self, source: str, sink: str, wire: Wire) -> None:
        self.source, self.sink = source, sink
        self.signals = LinkSignals()
        self._wire = wire
        self.sample()

    def sample(self) -> None:
        wire, signals = self._wire, self.signals
        signals.sampled_s = asyncio.get_running_loop().time() + 1e-9
        signals.rate_bps = wire.rate_bps / wire.slowdown if wire.up else 0.0
        signals.min_rtt_s = signals.rtt_s = 2 * wire.delay_s
        signals.verdict = "free" if wire.up else "saturated"

    def sent_bytes(self) -> int:
        return self._wire.carried
