"""Two network namespaces joined by a veth pair: the common part of the kernel's shapers."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from pathlib import Path

from harness.links.base import ShapedLink
from harness.links.counters import Counters
from harness.links.netlink import QdiscReader, call_in_namespace
from harness.links.shape import FRAME_BYTES, MTU_BYTES, LinkShape, Shape
from harness.links.spec import LinkSpec
from harness.links.state import NETNS_DIR, PREFIX, LinkState, NotOurs, command, remove

#: Nothing outside the two namespaces sees these addresses, so links never collide.
SIDE_ADDRESSES = ("10.77.0.1", "10.77.0.2")
SUBNET_BITS = 30
SUFFIXES = ("a", "b")
LEAST_SOCKET_MEMORY_BYTES = 6_291_456
MOST_BUNDLE_SEGMENTS = 43


class NamespaceLink(ShapedLink):
    """Workers of each side live in a namespace of their own; TCP is end to end.

    `expose` is the identity: the other side's packets to a listener cannot but cross the link.
    """

    def netns(self, side: str) -> str | None:
        return str(NETNS_DIR / self._namespace(self.sides.index(side)))

    def bind_host(self, side: str) -> str:
        return SIDE_ADDRESSES[self.sides.index(side)]

    async def expose(self, side: str, host: str, port: int) -> tuple[str, int]:
        if host != self.bind_host(side):
            raise ValueError(f"a listener of {side} must bind {self.bind_host(side)}, not {host}")
        return host, port

    def bundle_segments(self, index: int) -> int:
        """Segments that local TCP of side `index` may hand over as one packet: 1 ms at the lowest
        rate of the schedule, 1 to 43 (64 KiB). Packets then cost less and none holds the wire long.
        """
        shapes = [timed.shape for timed in self.spec.timeline()]
        rate_bps = min((shape.reverse if index else shape.forward).rate_bps for shape in shapes)
        return max(1, min(MOST_BUNDLE_SEGMENTS, int(rate_bps / 8 * 1e-3 / FRAME_BYTES)))

    def _namespace(self, index: int) -> str:
        return self.state.namespace_name(SUFFIXES[index])

    def _interface(self, index: int) -> str:
        """At most 15 characters; unique because it lives only in our own namespaces."""
        return f"{PREFIX}{self.state.token}{SUFFIXES[index]}"

    async def _destroy(self) -> None:
        await asyncio.to_thread(remove, self.state)

    def _create_namespaces(self) -> None:
        names = [self._namespace(index) for index in (0, 1)]
        for name in names:
            if (NETNS_DIR / name).exists():
                raise NotOurs(f"namespace {name} exists already; not touched")
        self.state.namespaces = dict.fromkeys(names, 0)
        self.state.save()
        for name in names:
            command("ip", "netns", "add", name)
            self.state.namespaces[name] = (NETNS_DIR / name).stat().st_ino
        self.state.save()
        for name in names:
            call_in_namespace(str(NETNS_DIR / name), self._tune_tcp)

    def _tune_tcp(self) -> None:
        """Buffers that one connection needs to fill the link; no memory of earlier connections."""
        shapes = [timed.shape for timed in self.spec.timeline()]
        pipe_bytes = max(
            side.rate_bps / 8 * shape.rtt_s + 2 * side.queue_bytes
            for shape in shapes
            for side in (shape.forward, shape.reverse)
        )
        most = max(LEAST_SOCKET_MEMORY_BYTES, int(4 * pipe_bytes))
        for name, value in (
            ("ipv4/tcp_rmem", f"4096 131072 {most}"),
            ("ipv4/tcp_wmem", f"4096 65536 {most}"),
            ("ipv4/tcp_no_metrics_save", "1"),
            ("ipv6/conf/all/disable_ipv6", "1"),
        ):
            path = Path("/proc/sys/net") / name
            if path.exists():
                path.write_text(value)

    def _configure_interfaces(self) -> None:
        for index in (0, 1):
            name, interface = self._namespace(index), self._interface(index)
            address = f"{SIDE_ADDRESSES[index]}/{SUBNET_BITS}"
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("ip", "-n", name, "address", "add", address, "dev", interface)
            command("ip", "-n", name, "link", "set", interface, "up", "mtu", str(MTU_BYTES))


class VethLink(NamespaceLink):
    """A veth pair with one qdisc on each end's egress."""

    def __init__(self, spec: LinkSpec, state: LinkState) -> None:
        super().__init__(spec, state)
        self._readers: list[QdiscReader] = []
        #: Whether both ends have their qdisc, so that a shape is a change.
        self._configured = False
        self._carried = [Counters(), Counters()]
        self._last = [Counters(), Counters()]

    async def _create(self) -> None:
        await asyncio.to_thread(self._create_namespaces)
        await asyncio.to_thread(self._create_interfaces)
        await asyncio.to_thread(self._configure_interfaces)
        for index in (0, 1):
            await asyncio.to_thread(self._shape, index, self._direction_shape(index))
        self._configured = True

    async def _destroy(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []
        self._configured = False
        await super()._destroy()

    def _create_interfaces(self) -> None:
        first, second = self._interface(0), self._interface(1)
        command(
            *("ip", "link", "add", first, "netns", self._namespace(0), "type", "veth"),
            *("peer", "name", second, "netns", self._namespace(1)),
        )
        for index in (0, 1):
            segments = self.bundle_segments(index)
            command(
                *("ip", "-n", self._namespace(index), "link", "set", self._interface(index)),
                *("gso_max_segs", str(segments)),
            )

    def _direction_shape(self, index: int) -> Shape:
        return (self.shape.forward, self.shape.reverse)[index]

    async def apply(self, shape: LinkShape) -> None:
        self.shape = shape
        for index in (0, 1):
            await asyncio.to_thread(self._shape, index, self._direction_shape(index))
        self.state.shape = shape.to_json()
        await asyncio.to_thread(self.state.save)

    def read_counters(self) -> tuple[Counters, Counters]:
        if not self._readers and self._exists():
            for index in (0, 1):
                path = str(NETNS_DIR / self._namespace(index))
                self._readers.append(QdiscReader(path, self._interface(index)))
        for index, reader in enumerate(self._readers):
            raw = reader.read()
            if raw is not None:
                self._take(index, raw.sent_bytes, raw.sent_packets, raw.dropped_packets)
                waiting = max(0, raw.backlog_bytes - self._delay_line_bytes(index))
                self._last[index] = _with_backlog(self._last[index], waiting)
        return self._last[0], self._last[1]

    def _exists(self) -> bool:
        return all((NETNS_DIR / self._namespace(index)).exists() for index in (0, 1))

    def _take(self, index: int, sent_bytes: int, sent_packets: int, dropped: int) -> None:
        """Add a qdisc's counts; when they went back (the qdisc was replaced), a new base begins."""
        last, carried = self._last[index], self._carried[index]
        if carried.sent_bytes + sent_bytes < last.sent_bytes:
            self._carried[index] = carried = last
        self._last[index] = Counters(
            carried.sent_bytes + sent_bytes,
            carried.sent_packets + sent_packets,
            carried.dropped_packets + dropped,
        )

    def _delay_line_bytes(self, index: int) -> int:
        """Bytes of the qdisc's backlog that are not queued but on their way."""
        return 0

    @abstractmethod
    def _shape(self, index: int, shape: Shape) -> None:
        """Configure the egress of side `index`. Raises LinkError."""

    def _tc(self, index: int, *words: str, allow_failure: bool = False) -> str:
        return command("tc", "-n", self._namespace(index), *words, allow_failure=allow_failure)


def _with_backlog(counters: Counters, backlog_bytes: int) -> Counters:
    return Counters(
        counters.sent_bytes, counters.sent_packets, counters.dropped_packets, backlog_bytes
    )
