"""The interface of a shaped link, whichever backend carries it."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field

from engine.transport.observed import Observed
from harness.links.counters import Counters
from harness.links.shape import LinkShape, Shape, TimedShape
from harness.links.spec import LinkSpec
from harness.links.state import LinkError, LinkState
from harness.ports import LinkSignals

SAMPLE_S = 0.05
WINDOW_S = 0.5
#: What the senders' TCP said counts for so long.
HEARD_S = 2.0
#: Without TCP_INFO, utilisation from which a link counts as saturated, and as busy.
SATURATED_USE, BUSY_USE = 0.95, 0.5


def verdict_by_use(utilisation: float) -> str:
    """The monitor's verdict as far as it follows from what a link carries."""
    if utilisation >= SATURATED_USE:
        return "saturated"
    return "busy" if utilisation >= BUSY_USE else "free"


@dataclass(slots=True)
class LinkDirection:
    """One direction of a shaped link: what `harness.ports.Link` asks for.

    end_to_end: the senders' TCP crosses this link, so that their round trips and losses are its.
    """

    source: str
    sink: str
    end_to_end: bool = True
    signals: LinkSignals = field(default_factory=LinkSignals)
    counters: Counters = field(default_factory=Counters)
    _window: deque[tuple[float, Counters]] = field(default_factory=deque)
    _heard: tuple[float, Observed] | None = None

    def sent_bytes(self) -> int:
        return self.counters.sent_bytes

    def observe(self, now_s: float, counters: Counters, shape: Shape, rtt_s: float) -> None:
        """Take in a sample; throughput and loss are over the last `WINDOW_S` of samples."""
        self.counters = counters
        self._window.append((now_s, counters))
        while len(self._window) > 2 and self._window[1][0] <= now_s - WINDOW_S:
            self._window.popleft()
        then_s, then = self._window[0]
        signals = self.signals
        signals.sampled_s = now_s
        signals.rate_bps = 0.0 if shape.down else shape.rate_bps
        if now_s > then_s:
            sent_bytes = counters.sent_bytes - then.sent_bytes
            sent = counters.sent_packets - then.sent_packets
            dropped = counters.dropped_packets - then.dropped_packets
            signals.throughput_bps = sent_bytes * 8 / (now_s - then_s)
            signals.loss = dropped / (sent + dropped) if sent + dropped else 0.0
        signals.utilisation = min(1.0, signals.throughput_bps / shape.rate_bps)
        signals.backlog_bytes = counters.backlog_bytes
        signals.min_rtt_s = rtt_s
        signals.rtt_s = rtt_s + counters.backlog_bytes * 8 / shape.rate_bps
        signals.verdict = verdict_by_use(signals.utilisation)
        if self._heard is not None and now_s - self._heard[0] <= HEARD_S:
            self._mix_in(self._heard[1])

    def hear(self, now_s: float, seen: Observed) -> None:
        """What the monitors of the senders' connections saw since the last call."""
        self._heard = now_s, seen
        signals = self.signals
        signals.connections = seen.connections
        signals.goodput_bps = seen.goodput_bps
        signals.retransmits = (signals.retransmits or 0) + seen.retransmits
        signals.rwnd_limited = seen.rwnd_limited
        signals.sndbuf_limited = seen.sndbuf_limited
        self._mix_in(seen)

    def _mix_in(self, seen: Observed) -> None:
        """What waits at the senders waits for this link; their TCP's word is taken where it
        crosses the link."""
        signals = self.signals
        signals.backlog_bytes = max(signals.backlog_bytes, float(seen.backlog_bytes))
        if not self.end_to_end:
            return
        signals.verdict = seen.verdict
        if seen.connections:
            signals.loss = max(signals.loss, seen.loss)
            signals.rtt_s = seen.rtt_s or signals.rtt_s
            signals.min_rtt_s = seen.min_rtt_s or signals.min_rtt_s


class ShapedLink(ABC):
    """A link between `sides[0]` (the prefill cluster) and `sides[1]` (the decode cluster).

    Life: `open`, any number of `expose`, `start_schedule` once when the run begins, `close` always.
    `close` removes everything the link made, and may be called again.
    """

    backend: str
    #: Whether TCP goes from end to end, or ends at the link.
    end_to_end = True

    def __init__(self, spec: LinkSpec, state: LinkState) -> None:
        self.spec = spec
        self.state = state
        self.shape: LinkShape = spec.timeline()[0].shape
        first, second = state.sides
        self.forward = LinkDirection(first, second, self.end_to_end)
        self.reverse = LinkDirection(second, first, self.end_to_end)
        #: Why the link no longer is what was asked for; None while it is. A run that ends with a
        #: failure here measured another link.
        self.failure: str | None = None
        #: The greatest time by which a step of the schedule took effect after its `at_s`, so far.
        self.schedule_lateness_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def description(self) -> str:
        """One line: backend, what it shapes and what it cannot."""
        return self.state.description

    @property
    def sides(self) -> tuple[str, str]:
        return self.state.sides

    @property
    def base_rtt_s(self) -> float:
        """Round-trip time without queueing, as far as this backend applies it."""
        return self.shape.rtt_s

    def direction(self, source: str, sink: str) -> LinkDirection:
        """The direction from `source` to `sink`, as policies and the recorder see it."""
        for direction in (self.forward, self.reverse):
            if (direction.source, direction.sink) == (source, sink):
                return direction
        raise KeyError(
            f"no direction {source} -> {sink}; this link joins {' and '.join(self.sides)}"
        )

    def netns(self, side: str) -> str | None:
        """Path of the namespace that every worker of `side` must enter; None: the host's."""
        return None

    def launch_prefix(self, side: str) -> list[str]:
        """Words to put before a worker's command so that it runs in its side's namespace."""
        path = self.netns(side)
        return [] if path is None else ["nsenter", f"--net={path}", "--"]

    @abstractmethod
    def bind_host(self, side: str) -> str:
        """Address at which a worker of `side` listens for KV traffic, from either side."""

    @abstractmethod
    async def expose(self, side: str, host: str, port: int) -> tuple[str, int]:
        """Address at which the *other* side dials the listener `host:port` of `side`, so that the
        bytes cross the shaper. Workers of the same side dial `host:port` and cross nothing."""

    @abstractmethod
    def read_counters(self) -> tuple[Counters, Counters]:
        """Counters (forward, reverse), read now."""

    @abstractmethod
    async def apply(self, shape: LinkShape) -> None:
        """Make the link behave as `shape` from now on. Raises LinkError."""

    def _carrier_failure(self) -> str | None:
        """Why what carries the link is gone; None while it is there."""
        return None

    @abstractmethod
    async def _create(self) -> None: ...

    @abstractmethod
    async def _destroy(self) -> None: ...

    async def open(self) -> None:
        """Bring the link up and begin to sample it. Cleans up after itself when it fails."""
        self.state.spec = self.spec.model_dump(mode="json", exclude_none=True)
        self.state.shape = self.shape.to_json()
        await asyncio.to_thread(self.state.save)
        try:
            await self._create()
            await asyncio.to_thread(self.state.save)
        except BaseException:
            await self.close()
            raise
        self._tasks.append(asyncio.create_task(self._sample_forever()))

    def start_schedule(self) -> None:
        """Follow the specification's schedule; its `at_s` count from this call."""
        later = self.spec.timeline()[1:]
        if later:
            zero_s = asyncio.get_running_loop().time()
            self._tasks.append(asyncio.create_task(self._follow(zero_s, later)))

    def sample(self) -> None:
        """Refresh counters and signals of both directions now."""
        now_s = asyncio.get_running_loop().time()
        forward, reverse = self.read_counters()
        self.forward.observe(now_s, forward, self.shape.forward, self.base_rtt_s)
        self.reverse.observe(now_s, reverse, self.shape.reverse, self.base_rtt_s)

    async def detach(self) -> None:
        """Leave a persistent link up and stop watching it; `remove` of its state ends it."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()

    async def close(self) -> None:
        """Remove everything the link made. Runs to its end even when the caller is cancelled."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            # The totals that stay in `forward` and `reverse` are those at the end.
            with contextlib.suppress(OSError):
                self.sample()

        async def finish() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._destroy()

        removal = asyncio.ensure_future(finish())
        cancelled = False
        while not removal.done():
            try:
                await asyncio.shield(removal)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    async def _sample_forever(self) -> None:
        while True:
            try:
                self.sample()
            except OSError as error:
                self.failure = f"the link's counters cannot be read: {error}"
            self.failure = self.failure or self._carrier_failure()
            await asyncio.sleep(SAMPLE_S)

    async def _follow(self, zero_s: float, timeline: list[TimedShape]) -> None:
        loop = asyncio.get_running_loop()
        for timed in timeline:
            await asyncio.sleep(max(0.0, zero_s + timed.at_s - loop.time()))
            try:
                await self.apply(timed.shape)
            except LinkError as error:
                self.failure = f"the schedule stopped at {timed.at_s:g} s: {error}"
                return
            late_s = loop.time() - zero_s - timed.at_s
            self.schedule_lateness_s = max(self.schedule_lateness_s, late_s)
