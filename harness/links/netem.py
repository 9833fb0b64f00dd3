"""Rate, delay, jitter and loss by the kernel's netem, one on each end's egress of a veth pair."""

from __future__ import annotations

import json
import math
from typing import Any

from harness.links.netns import VethLink
from harness.links.shape import FRAME_BYTES, LossModel, Shape
from harness.links.state import LinkError


class NetemLink(VethLink):
    """Packets are true unless the specification asks for bundles: netem drops, delays and counts
    whole what local TCP hands it as one packet."""

    backend = "netem"

    def bundle_segments(self, index: int) -> int:
        return self.spec.bundle_segments

    def _delay_line_bytes(self, index: int) -> int:
        """netem keeps delayed packets in the same queue: throughput x delay."""
        shape = self._direction_shape(index)
        direction = (self.forward, self.reverse)[index]
        return int(direction.signals.throughput_bps / 8 * shape.delay_s)

    def _shape(self, index: int, shape: Shape) -> None:
        if not self._configured:
            self.state.description = "network namespaces + veth + netem: " + self.shape.describe()
        where = ["dev", self._interface(index), "root"]
        verb = "change" if self._configured else "add"
        self._tc(index, "qdisc", verb, *where, "netem", *netem_words(shape))
        listed = json.loads(self._tc(index, "-j", "qdisc", "show", *where))
        complaint = disagreement(listed[0].get("options", {}) if listed else {}, shape)
        if complaint:
            raise LinkError(f"netem on {self._interface(index)} reads back {complaint}")


def netem_words(shape: Shape) -> list[str]:
    """tc's words for `shape`; each parameter is given, as `change` keeps what is left out."""
    words = ["limit", str(limit_packets(shape)), "delay", f"{round(shape.delay_s * 1e6)}us"]
    if shape.jitter_s:
        words.append(f"{round(shape.jitter_s * 1e6)}us")
    words += _loss_words(LossModel(loss_good=1.0) if shape.down else shape.loss)
    return [*words, "rate", f"{round(shape.rate_bps)}bit"]


def limit_packets(shape: Shape) -> int:
    """netem's limit counts packets, on the delay line and in the queue together.

    Bundles may hold a single segment, so the limit is that of single ones: it never drops early.
    """
    on_the_way = shape.rate_bps / 8 * (shape.delay_s + shape.jitter_s)
    return max(2, math.ceil((on_the_way + shape.queue_bytes) / FRAME_BYTES))


def disagreement(options: dict[str, Any], shape: Shape) -> str:
    """What `tc -j qdisc show` says that `shape` did not ask for, or ""."""
    found_rate = options.get("rate", {}).get("rate", 0) * 8
    if abs(found_rate - shape.rate_bps) > 0.01 * shape.rate_bps:
        return f"rate {found_rate} bit/s instead of {shape.rate_bps:g}"
    found_delay = options.get("delay", {}).get("delay", 0.0)
    if abs(found_delay - shape.delay_s) > 20e-6:
        return f"delay {found_delay} s instead of {shape.delay_s:g}"
    limit = limit_packets(shape)
    if options.get("limit", limit) != limit:
        return f"limit {options['limit']} instead of {limit}"
    return ""


def _loss_words(loss: LossModel) -> list[str]:
    if not loss.good_to_bad:
        return ["loss", "random", f"{loss.loss_good * 100:g}%"]
    values = (loss.good_to_bad, loss.bad_to_good, loss.loss_bad, loss.loss_good)
    return ["loss", "gemodel", *(f"{value * 100:g}%" for value in values)]
