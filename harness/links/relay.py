"""A userspace relay: rate and delay for TCP connections that pass through it. Needs no privilege.

The relay ends TCP on both sides, so no segment is ever lost, TCP_INFO shows the local hop only, and
a connection is accepted before the far side has been reached. Bytes are exact: a chunk takes the
link's rate for its payload and the headers that full-size segments would have had.
"""

from __future__ import annotations

import asyncio

from harness.links.base import ShapedLink
from harness.links.counters import Counters
from harness.links.emulator_client import EmulatorHandle
from harness.links.relay_engine import HOST
from harness.links.shape import LinkShape
from harness.links.spec import LinkSpec
from harness.links.state import LinkState, remove


class RelayLink(ShapedLink):
    """Connections to a listener of the other side are dialled at a forwarded port of the relay."""

    backend = "relay"
    end_to_end = False

    def __init__(self, spec: LinkSpec, state: LinkState) -> None:
        super().__init__(spec, state)
        self._emulator = EmulatorHandle(state)
        self._forwards: dict[tuple[str, str, int], tuple[str, int]] = {}

    def bind_host(self, side: str) -> str:
        return HOST

    async def expose(self, side: str, host: str, port: int) -> tuple[str, int]:
        key = (side, host, port)
        if key not in self._forwards:
            answer = await self._emulator.request(
                op="expose", side=self.sides.index(side), host=host, port=port
            )
            self._forwards[key] = (HOST, answer["port"])
            self.state.forwards[f"{side}={host}:{port}"] = f"{HOST}:{answer['port']}"
            await asyncio.to_thread(self.state.save)
        return self._forwards[key]

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
        self.state.description = describe(self.shape)
        await self._emulator.start("relay", self.shape, {})

    async def _destroy(self) -> None:
        await asyncio.to_thread(self._emulator.close)
        await asyncio.to_thread(remove, self.state)


def describe(shape: LinkShape) -> str:
    text = (
        f"userspace relay: rate {shape.forward.rate_bps / 1e9:g} Gbit/s, "
        f"rtt {shape.rtt_s * 1e3:g} ms; TCP ends at the relay"
    )
    losses = (shape.forward.loss, shape.reverse.loss)
    return text + ("" if all(loss.lossless for loss in losses) else "; NOT applied: loss")
