"""Rows of the other tables: plain tuples, since one is made per event.

Field order is that of the schema after `configuration` and `phase`; seconds become microseconds
when written (`results.schemas` has the definitions).
"""

from __future__ import annotations

from typing import NamedTuple


class LinkRow(NamedTuple):
    """One sample of one direction of a link; `link` is "source->sink". The last five are what
    TCP_INFO of the connections across it said; None where nobody read it."""

    time_s: float
    link: str
    sent_bytes: int
    rate_bps: float
    throughput_bps: float
    utilisation: float
    backlog_bytes: float = 0.0
    rtt_s: float | None = None
    min_rtt_s: float | None = None
    loss: float = 0.0
    verdict: str = ""
    connections: int | None = None
    goodput_bps: float | None = None
    retransmits: int | None = None
    rwnd_limited: float | None = None
    sndbuf_limited: float | None = None


class FlowRow(NamedTuple):
    """A change of one flow's rate. `id` and `attempt` are None for a prefix that is copied."""

    time_s: float
    link: str
    id: int | None
    attempt: int | None
    rate_bps: float


class InstanceRow(NamedTuple):
    """One sample of one instance."""

    time_s: float
    instance: str
    cluster: str
    role: str
    state: str = "up"
    queued: int = 0
    running: int = 0
    busy_s: float | None = None
    cache_tokens: int | None = None


class DecisionRow(NamedTuple):
    """One routing decision and what it saw. `alternatives`: (cluster, predicted TTFT in s)."""

    id: int
    attempt: int
    time_s: float
    input_tokens: int
    cached_tokens: int
    held_tokens: int
    threshold_tokens: float | None
    prefill_cluster: str
    prefill_instance: str
    decode_instance: str
    predicted_work_s: float
    predicted_wait_s: float | None = None
    decode_active: int | None = None
    link_utilisation: float | None = None
    link_backlog_bytes: float | None = None
    reason: str = ""
    alternatives: tuple[tuple[str, float], ...] = ()


class AuditRow(NamedTuple):
    """One cache that crossed or was refused, as one of its ends tells it. `unix_s`: wall clock."""

    unix_s: float
    reporter: str
    direction: str
    outcome: str
    cache: str
    id: int
    attempt: int
    tenant: str
    sender: str
    sender_cluster: str
    receiver: str
    receiver_cluster: str
    peer_identity: str
    tokens: int
    held_tokens: int
    bytes: int
    wire_bytes: int | None
    digest: str | None
