"""What the monitors of several connections saw of one link over an interval, as one row.

Every data plane watches its own peers (`monitor`). A link between two clusters is shared by all of
them, so what the control plane is told, and links.parquet keeps, is put together here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.transport.monitor import Verdict


@dataclass(frozen=True, slots=True)
class Observed:
    """One interval of one direction.

    verdict: the one under which most bytes were acknowledged (with none, most time was busy).
    connections: that carried the link's traffic. goodput_bps: bits acknowledged per second of the
    interval. rtt_s: greatest over peers of their last; min_rtt_s: least. retransmits: segments.
    loss: bytes sent again / bytes acknowledged or sent again. rwnd_limited, sndbuf_limited: shares
    of the interval spent waiting for a receiver's window and for a sender's buffer, weighted by
    bytes. backlog_bytes: pushed by the workers and not yet acknowledged, last of each peer.
    """

    verdict: str = Verdict.FREE
    connections: int = 0
    goodput_bps: float = 0.0
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    retransmits: int = 0
    loss: float = 0.0
    rwnd_limited: float = 0.0
    sndbuf_limited: float = 0.0
    backlog_bytes: int = 0


def observe(rows: Iterable[Mapping[str, Any]], seconds: float) -> Observed:
    """Rows of `DataPlane.link_samples` of any number of planes and peers, to what they say of the
    link over `seconds`. Without rows nothing crossed: free."""
    last: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    acked: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    again = limited = buffered = 0.0
    retransmits = 0
    minima = []
    for row in rows:
        # A sender's peer: several planes may dial the same one.
        last[row.get("plane", ""), row["host"], row["port"]] = row
        verdict = str(row["verdict"])
        part = row["goodput_bps"] * row["seconds"] / 8
        acked[verdict] = acked.get(verdict, 0.0) + part
        busy_s[verdict] = busy_s.get(verdict, 0.0) + row["busy"] * row["seconds"]
        # loss = again / (acked + again), so again follows from both; all lost: as good as acked 0.
        again += part * row["loss"] / (1 - row["loss"]) if row["loss"] < 1.0 else 0.0
        limited += part * row["rwnd_limited"]
        buffered += part * row["sndbuf_limited"]
        retransmits += row["retransmits"]
        if row["min_rtt_s"] > 0.0:
            minima.append(row["min_rtt_s"])
    if not last:
        return Observed()
    total = sum(acked.values())
    weights = acked if total else busy_s
    return Observed(
        verdict=max(weights, key=lambda verdict: weights[verdict]),
        connections=sum(row["connections"] for row in last.values()),
        goodput_bps=8 * total / seconds if seconds > 0 else 0.0,
        rtt_s=max(row["rtt_s"] for row in last.values()),
        min_rtt_s=min(minima, default=0.0),
        retransmits=retransmits,
        loss=again / (total + again) if again else (1.0 if retransmits and not total else 0.0),
        rwnd_limited=limited / total if total else 0.0,
        sndbuf_limited=buffered / total if total else 0.0,
        backlog_bytes=sum(row["backlog_bytes"] for row in last.values()),
    )
