"""What a policy is, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from harness.accounts import PrefillPool
from harness.view import View
from workloads.request import Request


class NoRoute(Exception):
    """No usable instance of a role that the request needs."""


class Considered(Protocol):
    """The part of a candidate (`harness.policies.candidates`) that a decision is explained by."""

    @property
    def pool(self) -> PrefillPool: ...

    @property
    def ttft_s(self) -> float: ...


# Not frozen: that would double what it costs to make one for every request.
@dataclass(slots=True)
class Decision:
    """Where one attempt at a request goes, and why. Keys index the pools of the view.

    `predicted_work_s` is the prefill time the router accounts to the instance, `predicted_bytes`
    those it accounts to the link; `considered` is what it was chosen from. With `copy_from`, the
    first `copy_tokens` of the prompt are fetched from that cluster before the prefill;
    `cached_tokens` counts them already.
    """

    prefill_cluster: str
    prefill_key: int
    decode_cluster: str
    decode_key: int
    predicted_work_s: float
    cached_tokens: int = 0
    held_tokens: int = 0
    copy_from: str = ""
    reason: str = ""
    considered: tuple[Considered | None, ...] = ()
    predicted_bytes: float = 0.0
    copy_tokens: int = 0
    copy_bytes: float = 0.0
    threshold_tokens: float | None = None

    @property
    def alternatives(self) -> tuple[tuple[str, float], ...]:
        """Clusters considered, and the TTFT (s) predicted for each."""
        return tuple((each.pool.cluster, each.ttft_s) for each in self.considered if each)


class Policy(Protocol):
    """`route` is pure and synchronous: no I/O, no clock but `view.now_s`, no change to the view."""

    @property
    def name(self) -> str: ...

    def route(self, request: Request, view: View) -> Decision:
        """Raises NoRoute when no usable instance is left."""
        ...
