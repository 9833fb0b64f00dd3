"""Rate only, by the kernel's token bucket (tbf, or htb where there is no tbf) on veth."""

from __future__ import annotations

import json

from harness.links.netns import VethLink
from harness.links.shape import FRAME_BYTES, LinkShape, Shape
from harness.links.spec import LinkSpec
from harness.links.state import LinkError, LinkState


class TbfLink(VethLink):
    """A token bucket and a byte-limited queue in each direction. It has no delay and no loss: the
    description says what of the specification is not applied."""

    backend = "tbf"

    def __init__(self, spec: LinkSpec, state: LinkState, qdisc: str = "tbf") -> None:
        super().__init__(spec, state)
        self._qdisc = qdisc

    @property
    def base_rtt_s(self) -> float:
        return 0.0

    def _shape(self, index: int, shape: Shape) -> None:
        interface = self._interface(index)
        if self._configured:
            # What the replaced qdisc counted would be lost with it.
            self.read_counters()
        else:
            self.state.description = describe(self._qdisc, self.shape)
        if shape.down:
            self._tc(index, *f"qdisc replace dev {interface} root pfifo limit 0".split())
            return
        rate, burst = (
            f"{round(shape.rate_bps)}bit",
            f"{burst_bytes(shape, self.bundle_segments(index))}b",
        )
        queue = f"{shape.queue_bytes}b"
        if self._qdisc == "htb":
            self._tc(index, *f"qdisc delete dev {interface} root".split(), allow_failure=True)
            self._tc(index, *f"qdisc add dev {interface} root handle 1: htb default 1".split())
            self._tc(
                index,
                *f"class add dev {interface} parent 1: classid 1:1 htb rate {rate}".split(),
                *f"ceil {rate} burst {burst} cburst {burst}".split(),
            )
            self._tc(index, *f"qdisc add dev {interface} parent 1:1 bfifo limit {queue}".split())
            return
        self._tc(
            index,
            *f"qdisc replace dev {interface} root tbf".split(),
            *f"rate {rate} burst {burst} limit {queue}".split(),
        )
        listed = json.loads(self._tc(index, "-j", *f"qdisc show dev {interface} root".split()))
        achieved = listed[0].get("options", {}).get("rate", 0) * 8 if listed else 0
        if abs(achieved - shape.rate_bps) > 0.01 * shape.rate_bps:
            raise LinkError(
                f"tbf on {interface} reads back {achieved} bit/s, not {shape.rate_bps:g}"
            )


def burst_bytes(shape: Shape, bundle_segments: int) -> int:
    """Room for the largest packet that may already be queued, which a smaller bucket would never
    release, and for 1 ms of the rate."""
    return max((bundle_segments + 1) * FRAME_BYTES, int(shape.rate_bps / 8 * 1e-3))


def describe(qdisc: str, shape: LinkShape) -> str:
    forward = shape.forward
    text = f"network namespaces + veth + {qdisc}: rate {forward.rate_bps / 1e9:g} Gbit/s only"
    missing = []
    if shape.rtt_s:
        missing.append(f"rtt {shape.rtt_s * 1e3:g} ms")
    if forward.jitter_s:
        missing.append(f"jitter {forward.jitter_s * 1e3:g} ms")
    if not forward.loss.lossless:
        missing.append(f"loss {forward.loss.mean:.3%}")
    return text + (f"; NOT applied: {', '.join(missing)}" if missing else "")
