"""What TCP itself knows of a link: samples of TCP_INFO, and a verdict on what limits it.

`struct tcp_info` grows with the kernel (232 bytes on 6.1, 280 on 6.18), so fields are read by
offset as far as the returned length goes.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from engine.transport.tls import Stream

#: Room for future kernels; the call returns how much it filled.
_MAX_BYTES = 512
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Counters of one connection, as the kernel keeps them (0 where it does not).

    rtt_s, min_rtt_s; cwnd in segments; retransmits (segments, total); bytes_acked and
    bytes_retransmitted (total); unsent_bytes: in the socket, not yet sent; busy_s: time with data
    outstanding, of which rwnd_limited_s and sndbuf_limited_s were spent waiting for the receiver's
    window and for this side's buffer.
    """

    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    cwnd: int = 0
    retransmits: int = 0
    bytes_acked: int = 0
    bytes_retransmitted: int = 0
    unsent_bytes: int = 0
    busy_s: float = 0.0
    rwnd_limited_s: float = 0.0
    sndbuf_limited_s: float = 0.0


def parse_tcp_info(data: bytes) -> TcpInfo:
    """Read the fields that lie within `data`; unknown minimum RTT (all ones) reads as 0."""

    def u32(offset: int) -> int:
        return _U32.unpack_from(data, offset)[0] if len(data) >= offset + 4 else 0

    def u64(offset: int) -> int:
        return _U64.unpack_from(data, offset)[0] if len(data) >= offset + 8 else 0

    min_rtt_us = u32(148)
    return TcpInfo(
        rtt_s=u32(68) * 1e-6,
        min_rtt_s=0.0 if min_rtt_us == 0xFFFFFFFF else min_rtt_us * 1e-6,
        cwnd=u32(80),
        retransmits=u32(100),
        bytes_acked=u64(120),
        bytes_retransmitted=u64(208),
        unsent_bytes=u32(144),
        busy_s=u64(168) * 1e-6,
        rwnd_limited_s=u64(176) * 1e-6,
        sndbuf_limited_s=u64(184) * 1e-6,
    )


def read_tcp_info(sock: Stream) -> TcpInfo:
    """Raises OSError for a closed socket."""
    return parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MAX_BYTES))


class Verdict(StrEnum):
    """What a link does at the moment."""

    FREE = "free"
    BUSY = "busy"
    SATURATED = "saturated"
    LOSSY = "lossy"
    RECEIVER_LIMITED = "receiver-limited"


@dataclass(frozen=True, slots=True)
class LinkSample:
    """One direction to one peer between two readings of its connections.

    goodput_bps: bits acknowledged per second (d bytes_acked / dt: the kernel's own delivery rate is
    not to be trusted on virtual links). rtt_s: mean over connections with data under way.
    loss: bytes sent again / bytes acknowledged. busy, rwnd_limited, sndbuf_limited: shares of the
    time, of the busiest connection. backlog_bytes: pushed by the worker and not yet acknowledged.
    """

    time_s: float
    seconds: float
    connections: int
    goodput_bps: float
    rtt_s: float
    min_rtt_s: float
    retransmits: int
    loss: float
    busy: float
    rwnd_limited: float
    sndbuf_limited: float
    unsent_bytes: int
    backlog_bytes: int


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Where one verdict ends and the next begins. All are of a smoothed sample.

    busy_share: of the time with data outstanding, above which a link is not free.
    rtt_ratio, rtt_margin_s: a queue stands in the link when rtt > min_rtt x ratio + margin. The
    margin keeps microseconds on a local link from counting as a queue.
    loss: share of bytes sent again above which a link is lossy. rwnd_share: of the busy time spent
    waiting for the receiver's window, above which the receiver is the limit.
    smoothing_s: time constant of the exponential average. leave: a verdict is left only when its
    figure has fallen to this share of the threshold that it had to pass. hold_s: and not before it
    has stood this long.
    """

    busy_share: float = 0.5
    rtt_ratio: float = 1.5
    rtt_margin_s: float = 0.0005
    loss: float = 0.005
    rwnd_share: float = 0.2
    smoothing_s: float = 0.2
    leave: float = 0.6
    hold_s: float = 0.2


@dataclass(frozen=True, slots=True)
class LinkState:
    """What is remembered between samples: the smoothed figures and the verdict with its age."""

    verdict: Verdict = Verdict.FREE
    since_s: float = 0.0
    time_s: float = 0.0
    goodput_bps: float = 0.0
    busy: float = 0.0
    rwnd_limited: float = 0.0
    loss: float = 0.0
    rtt_s: float = 0.0
    min_rtt_s: float = 0.0
    backlog_bytes: float = 0.0


def difference(
    before: Sequence[TcpInfo],
    after: Sequence[TcpInfo],
    time_s: float,
    seconds: float,
    backlog_bytes: int,
) -> LinkSample:
    """The sample between two readings of the same connections, in the same order."""
    pairs = list(zip(before, after, strict=True))
    acked = sum(b.bytes_acked - a.bytes_acked for a, b in pairs)
    again = sum(b.bytes_retransmitted - a.bytes_retransmitted for a, b in pairs)
    moving = [b for a, b in pairs if b.busy_s > a.busy_s] or [b for _, b in pairs]
    busy_s = max((b.busy_s - a.busy_s for a, b in pairs), default=0.0)
    rtts = [info.rtt_s for info in moving]
    minima = [info.min_rtt_s for _, info in pairs if info.min_rtt_s > 0]

    def share(name: str) -> float:
        spent_s = max((getattr(b, name) - getattr(a, name) for a, b in pairs), default=0.0)
        return min(1.0, spent_s / seconds) if seconds > 0 else 0.0

    return LinkSample(
        time_s=time_s,
        seconds=seconds,
        connections=len(pairs),
        goodput_bps=8 * acked / seconds if seconds > 0 else 0.0,
        rtt_s=sum(rtts) / len(rtts) if rtts else 0.0,
        min_rtt_s=min(minima, default=0.0),
        retransmits=sum(b.retransmits - a.retransmits for a, b in pairs),
        loss=again / (acked + again) if again > 0 else 0.0,
        busy=min(1.0, busy_s / seconds) if seconds > 0 else 0.0,
        rwnd_limited=share("rwnd_limited_s"),
        sndbuf_limited=share("sndbuf_limited_s"),
        unsent_bytes=sum(b.unsent_bytes for _, b in pairs),
        backlog_bytes=backlog_bytes,
    )


def advance(state: LinkState, sample: LinkSample, thresholds: Thresholds) -> LinkState:
    """The next state. Pure: the same samples give the same verdicts."""
    # First-order low pass with the sample's own duration; the first sample is taken as it is.
    weight = (
        1.0
        if state.time_s == 0.0
        else min(1.0, sample.seconds / (thresholds.smoothing_s + sample.seconds))
    )

    def smooth(old: float, new: float) -> float:
        return old + weight * (new - old)

    queued_rtt_s = sample.rtt_s if sample.busy > 0 else sample.min_rtt_s
    minima = [m for m in (state.min_rtt_s, sample.min_rtt_s) if m > 0]
    smoothed = LinkState(
        verdict=state.verdict,
        since_s=state.since_s,
        time_s=sample.time_s,
        goodput_bps=smooth(state.goodput_bps, sample.goodput_bps),
        busy=smooth(state.busy, sample.busy),
        rwnd_limited=smooth(state.rwnd_limited, sample.rwnd_limited),
        loss=smooth(state.loss, sample.loss),
        rtt_s=smooth(state.rtt_s or queued_rtt_s, queued_rtt_s),
        min_rtt_s=min(minima, default=0.0),
        backlog_bytes=smooth(state.backlog_bytes, sample.backlog_bytes),
    )
    wanted = _judge(smoothed, thresholds)
    if wanted is state.verdict or sample.time_s - state.since_s < thresholds.hold_s:
        return smoothed
    values = {f.name: getattr(smoothed, f.name) for f in fields(LinkState)}
    return LinkState(**{**values, "verdict": wanted, "since_s": sample.time_s})


def _judge(state: LinkState, thresholds: Thresholds) -> Verdict:
    """Loss before the receiver before the queue: a lossy link also has a long queue at times, and a
    slow reader keeps the window, not the link, full."""

    def above(value: float, threshold: float, verdict: Verdict) -> bool:
        return value > threshold * (thresholds.leave if state.verdict is verdict else 1.0)

    queue_s = state.rtt_s - state.min_rtt_s
    full_queue_s = state.min_rtt_s * (thresholds.rtt_ratio - 1.0) + thresholds.rtt_margin_s
    not_free = state.verdict is not Verdict.FREE
    if state.busy <= thresholds.busy_share * (thresholds.leave if not_free else 1.0):
        return Verdict.FREE
    if above(state.loss, thresholds.loss, Verdict.LOSSY):
        return Verdict.LOSSY
    if above(state.rwnd_limited, thresholds.rwnd_share * state.busy, Verdict.RECEIVER_LIMITED):
        return Verdict.RECEIVER_LIMITED
    if above(queue_s, full_queue_s, Verdict.SATURATED):
        return Verdict.SATURATED
    return Verdict.BUSY


class LinkMonitor:
    """Turns successive readings of one peer's connections into samples and a verdict.

    A connection is known by its lane and its count of bytes: one that was replaced starts anew, and
    gives no sample at its first reading.
    """

    def __init__(self, thresholds: Thresholds = Thresholds()) -> None:
        self.state = LinkState()
        self._thresholds = thresholds
        self._before: dict[int, TcpInfo] = {}
        self._read_s: float | None = None

    def read(
        self, now: float, lanes: Iterable[tuple[int, TcpInfo]], backlog_bytes: int
    ) -> LinkSample | None:
        """One reading of all live lanes as (lane, info)."""
        current = dict(lanes)
        known = [
            lane
            for lane, info in current.items()
            if lane in self._before and info.bytes_acked >= self._before[lane].bytes_acked
        ]
        before = [self._before[lane] for lane in known]
        read_s, self._read_s, self._before = self._read_s, now, current
        if read_s is None or not known or now <= read_s:
            return None
        after = [current[lane] for lane in known]
        sample = difference(before, after, now, now - read_s, backlog_bytes)
        self.state = advance(self.state, sample, self._thresholds)
        return sample
