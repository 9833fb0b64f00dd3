"""A transfer over a fluid link that is not a prefill's: bytes that exist already, all at once."""

from __future__ import annotations

import asyncio

from harness.links.flow import Flow
from harness.links.fluid import FluidLink
from harness.ports import TransferFailed


class _Copy:
    """Owner of the flow (harness.links.flow.FlowOwner)."""

    key = None

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def flow_delivered(self, flow: Flow) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def flow_failed(self, flow: Flow, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(TransferFailed(why))


async def fluid_copy(link: FluidLink, n_bytes: float) -> None:
    """Move `n_bytes` over `link`, fairly beside its other flows. Raises TransferFailed."""
    copy = _Copy()
    flow = link.open(n_bytes, copy)
    now_s = asyncio.get_running_loop().time()
    link.produce(flow, now_s, now_s, 0.0, n_bytes)
    try:
        await copy.done
    finally:
        link.abort(flow)
