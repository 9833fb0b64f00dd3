"""Chooses a backend for a specification and opens the link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from harness.errors import NotReady
from harness.links.base import ShapedLink
from harness.links.probe import Offers, probe
from harness.links.shape import LinkShape
from harness.links.spec import LinkSpec
from harness.links.state import LinkState, sweep_stale

#: The TUN emulator's ceiling on one core; above it the kernel's token bucket is the better link.
TUN_MOST_BPS = 4e9
DEFAULT_SIDES = ("prfaas", "pd")


def choose(spec: LinkSpec, offers: Offers) -> tuple[str, str]:
    """The backend for `spec` and why. Raises NotReady when one asked for by name is not offered."""
    if spec.backend != "auto":
        if not offers.available(spec.backend):
            reason = offers.by_backend[spec.backend].reason
            raise NotReady(f"link backend {spec.backend} is not available here: {reason}")
        return spec.backend, "asked for by name"
    if offers.available("netem"):
        return "netem", "the kernel has netem"
    shapes = [timed.shape for timed in spec.timeline()]
    directions = [side for shape in shapes for side in (shape.forward, shape.reverse)]
    rate_only = all(
        not (side.delay_s or side.jitter_s) and side.loss.lossless for side in directions
    )
    slow_enough = all(side.rate_bps <= TUN_MOST_BPS for side in directions)
    if offers.available("tun") and slow_enough and not rate_only:
        return "tun", "no netem here, and the specification asks for more than a rate"
    if offers.available("tbf"):
        why = "only a rate is asked for" if rate_only else f"above {TUN_MOST_BPS / 1e9:g} Gbit/s"
        return "tbf", f"no netem here; {why}"
    return "relay", offers.by_backend["tbf"].reason


def build(spec: LinkSpec, sides: tuple[str, str], persistent: bool, offers: Offers) -> ShapedLink:
    """The link object of the chosen backend, not yet open."""
    backend, _ = choose(spec, offers)
    state = LinkState.new(backend, sides, persistent)
    return _of_backend(spec, state, offers.rate_qdisc)


def _of_backend(spec: LinkSpec, state: LinkState, rate_qdisc: str = "tbf") -> ShapedLink:
    if state.backend == "netem":
        from harness.links.netem import NetemLink

        return NetemLink(spec, state)
    if state.backend == "tun":
        from harness.links.tun import TunLink

        return TunLink(spec, state)
    if state.backend == "tbf":
        from harness.links.tbf import TbfLink

        return TbfLink(spec, state, rate_qdisc)
    from harness.links.relay import RelayLink

    return RelayLink(spec, state)


async def open_link(
    spec: LinkSpec, sides: tuple[str, str] = DEFAULT_SIDES, persistent: bool = False
) -> ShapedLink:
    """Remove stale links, choose a backend by probing, and bring the link up.

    `sides` are the names of the prefill and the decode cluster. A `persistent` link outlives this
    process until `prfaas link down`; any other is removed by `close`, or as stale by the next run.
    """
    await asyncio.to_thread(sweep_stale)
    offers = await asyncio.to_thread(probe)
    link = build(spec, sides, persistent, offers)
    await link.open()
    return link


@contextlib.asynccontextmanager
async def shaped_link(
    spec: LinkSpec, sides: tuple[str, str] = DEFAULT_SIDES
) -> AsyncIterator[ShapedLink]:
    """`open_link` that always closes."""
    link = await open_link(spec, sides)
    try:
        yield link
    finally:
        await link.close()


def attach(state: LinkState) -> ShapedLink:
    """The link of a state file made by another process, for use; never `close` it."""
    spec = LinkSpec.model_validate(state.spec)
    link = _of_backend(spec, state)
    link.shape = LinkShape.from_json(state.shape)
    return link
