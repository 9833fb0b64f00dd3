"""A link emulated in a process of its own between two TUN devices: rate, delay, jitter and loss.

TCP is end to end, so TCP_INFO of the workers' connections tells the truth. One core carries about
4 Gbit/s.
"""

from __future__ import annotations

import asyncio

from harness.links.counters import Counters
from harness.links.emulator_client import EmulatorHandle
from harness.links.netns import NamespaceLink
from harness.links.shape import LinkShape
from harness.links.spec import LinkSpec
from harness.links.state import NETNS_DIR, LinkState, command

#: The device's own queue only bridges the emulator's wake-ups; the link's queue is the emulator's.
DEVICE_QUEUE_PACKETS = 4096


class TunLink(NamespaceLink):
    backend = "tun"

    def __init__(self, spec: LinkSpec, state: LinkState) -> None:
        super().__init__(spec, state)
        self._emulator = EmulatorHandle(state)

    def read_counters(self) -> tuple[Counters, Counters]:
        return self._emulator.read_counters()

    def _carrier_failure(self) -> str | None:
        return self._emulator.failure()

    async def apply(self, shape: LinkShape) -> None:
        await self._emulator.request(op="shape", shape=shape.to_json())
        self.shape = shape
        self.state.shape = shape.to_json()
        await asyncio.to_thread(self.state.save)

    async def _create(self) -> None:
        self.state.description = (
            "network namespaces + TUN emulator process: " + self.shape.describe()
        )
        await asyncio.to_thread(self._create_namespaces)
        devices = [
            (str(NETNS_DIR / self._namespace(index)), self._interface(index)) for index in (0, 1)
        ]
        await self._emulator.start("tun", self.shape, {"devices": devices})
        await asyncio.to_thread(self._create_interfaces)
        await asyncio.to_thread(self._configure_interfaces)

    async def _destroy(self) -> None:
        await asyncio.to_thread(self._emulator.close)
        await super()._destroy()

    def _create_interfaces(self) -> None:
        for index in (0, 1):
            command(
                *("ip", "-n", self._namespace(index), "link", "set", self._interface(index)),
                *("gso_max_segs", str(self.bundle_segments(index))),
                *("txqueuelen", str(DEVICE_QUEUE_PACKETS)),
            )
