"""The seams of the control plane: what stands behind a router, in every mode.

The router, the policies and the load generator know only these types. They take all time from the
running loop, so they cannot tell a modelled instance on a virtual clock from a worker process.

Units: tokens are those of the modelled system, seconds those of the running loop, bytes those
that really cross the link of this mode (`harness.scale` says how they relate in `emulate`).
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from results.records import TokenRun
from workloads.request import Request


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class ServingError(Exception):
    """Why an attempt at a request ended early; `retryable`: whether another may help."""

    retryable = False


class InstanceLost(ServingError):
    """The instance died, was restarted, or stopped answering. The attempt left nothing behind."""

    retryable = True

    def __init__(self, instance: str, why: str) -> None:
        super().__init__(f"{instance}: {why}")
        self.instance = instance


class TransferFailed(ServingError):
    """The KV cache did not arrive whole at the decode side; no part of it was exposed."""

    retryable = True


class RequestRejected(ServingError):
    """The instance can never serve this request (longer than its memory, say)."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """Where an instance stands and what it is. `name` is unique in a topology, e.g. `pd-3`."""

    name: str
    cluster: str
    role: Role
    profile: str


@dataclass(slots=True)
class PrefillJob:
    """Prefill `request` and deliver its cache to `destination`.

    `cached_tokens` of the prompt are held by the prefill cluster and are not computed;
    `held_tokens` are held by the destination's cluster and do not cross again. The fixed recurrent
    state always crosses. `link` is None inside a cluster, where bytes do not cross the shaped link.
    `arrived_s` is when the request was to arrive, which queue disciplines age it by.
    """

    request: Request
    attempt: int
    cached_tokens: int
    held_tokens: int
    destination: Instance
    link: Link | None
    arrived_s: float


@dataclass(slots=True)
class PrefillDone:
    """Returned when the whole cache is committed at the destination (`delivered_s`).

    `cached_tokens` were really reused, which may be fewer than the job said; -1: as it said.
    """

    started_s: float
    finished_s: float
    delivered_s: float
    wire_bytes: int
    first_token: int = -1
    cached_tokens: int = -1


@dataclass(slots=True)
class DecodeJob:
    """Decode `request` from the cache that `prefill` delivered to this instance."""

    request: Request
    attempt: int
    prefill: PrefillDone


@dataclass(slots=True)
class DecodeDone:
    """All tokens of the request. The first was sampled by prefill and reaches the client at
    `admitted_s`, when decode takes the request into its batch; each later one ends a step.

    `runs` are the exact times of all tokens, the first included, as (time_s, step_s, count).
    """

    admitted_s: float
    runs: list[TokenRun] = field(default_factory=list)
    token_ids: list[int] | None = None


class Instance(Protocol):
    """One serving instance (8 GPUs in the paper), modelled, paced/remote or external."""

    spec: InstanceSpec
    role: Role

    def prefill(self, job: PrefillJob) -> Awaitable[PrefillDone]:
        """Queue, compute and push. Raises a ServingError; then nothing stays behind anywhere."""
        ...

    def decode(self, job: DecodeJob) -> Awaitable[DecodeDone]:
        """Admit and decode to `request.output_tokens`; frees the cache however it ends."""
        ...

    def abandon(self, request: Request, attempt: int) -> None:
        """Drop a delivered or arriving cache that nobody will decode. Idempotent."""
        ...

    def drain(self) -> Awaitable[None]:
        """Take no new work and return when the work in hand is done."""
        ...

    def convert(self, role: Role) -> Awaitable[None]:
        """Drain and change role. Returns when the instance takes work in its new role."""
        ...


@dataclass(slots=True)
class LinkSignals:
    """What the control plane has *measured* of one direction of a link.

    backlog_bytes: waiting for the link, at the senders or in its queue. verdict: free, busy,
    saturated, lossy or receiver-limited. The last five are of the TCP connections across it, as
    `results.rows.LinkRow` has them; None where nobody reads TCP_INFO.
    """

    sampled_s: float = 0.0
    rate_bps: float = 0.0
    utilisation: float = 0.0
    throughput_bps: float = 0.0
    backlog_bytes: float = 0.0
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    loss: float = 0.0
    verdict: str = "free"
    connections: int | None = None
    goodput_bps: float | None = None
    retransmits: int | None = None
    rwnd_limited: float | None = None
    sndbuf_limited: float | None = None


class Link(Protocol):
    """One direction between two clusters (`source` to `sink`)."""

    source: str
    sink: str
    signals: LinkSignals

    def sent_bytes(self) -> int:
        """Bytes that have left on this direction since it came up, as the link itself counted."""
        ...
