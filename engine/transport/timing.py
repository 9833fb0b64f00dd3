"""Deadlines and limits of the protocol: every one named, with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. Detection of a stopped worker takes at most worker_silence_s + give_up_s < 3 s.

    ping_s: how often a live session is pinged and its leases renewed.
    peer_silence_s: nothing heard for so long: connections are torn down and dialled again.
    give_up_s: nothing heard for so long: transfers fail (and, at the receiver, leases end).
    worker_silence_s: a plane whose own worker is silent for so long no longer answers pings.
    lane_stall_s: a data connection without progress for so long is replaced.
    grant_s: bound on waiting for blocks at the receiver. admit_s: bound on the worker's answer to
    a commit. handshake_s: bound on one TCP + TLS + hello. redial_s: pause between dials.
    """

    ping_s: float = 0.2
    peer_silence_s: float = 1.0
    give_up_s: float = 1.8
    worker_silence_s: float = 1.0
    lane_stall_s: float = 1.5
    grant_s: float = 10.0
    admit_s: float = 10.0
    handshake_s: float = 1.5
    redial_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """credit_bytes: unacknowledged bytes a transfer may have under way (at least the
    bandwidth-delay product times transfers it should fill alone). max_resends: of one corrupt
    chunk. max_transfers: transfers one peer may have open. remembered: ended transfers kept to
    answer duplicates."""

    credit_bytes: int = 64 << 20
    max_resends: int = 3
    max_transfers: int = 256
    remembered: int = 4096
