"""What one direction of a link does to packets at one moment, fully resolved.

Plain dataclasses without Pydantic, because emulator processes load them too and start fast.
Rates count Ethernet frames as `tc` does (14-byte header, no preamble or checksum); with a 1500-byte
MTU a TCP payload gets `GOODPUT_SHARE` of the rate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

MTU_BYTES = 1500
ETHERNET_HEADER_BYTES = 14
#: IPv4 + TCP with timestamps.
IP_TCP_HEADER_BYTES = 20 + 32
SEGMENT_PAYLOAD_BYTES = MTU_BYTES - IP_TCP_HEADER_BYTES
FRAME_BYTES = MTU_BYTES + ETHERNET_HEADER_BYTES
GOODPUT_SHARE = SEGMENT_PAYLOAD_BYTES / FRAME_BYTES


@dataclass(frozen=True, slots=True)
class LossModel:
    """Two-state Gilbert-Elliott loss; `good_to_bad` = 0 makes it independent with `loss_good`.

    The four values are probabilities per packet. Mean loss in the stationary state is
    (r * loss_good + p * loss_bad) / (p + r) with p = good_to_bad and r = bad_to_good.
    """

    loss_good: float = 0.0
    loss_bad: float = 0.0
    good_to_bad: float = 0.0
    bad_to_good: float = 1.0

    @property
    def mean(self) -> float:
        p, r = self.good_to_bad, self.bad_to_good
        return (r * self.loss_good + p * self.loss_bad) / (p + r) if p else self.loss_good

    @property
    def lossless(self) -> bool:
        return self.mean == 0.0


class LossProcess:
    """Draws losses of one direction, one per packet, from its own generator."""

    __slots__ = ("_bad", "_random", "model")

    def __init__(self, model: LossModel, seed: int) -> None:
        self.model = model
        self._random = random.Random(seed)
        self._bad = False

    def lost(self, packets: int) -> list[int]:
        """Indices, of `packets` in a row, of those that are lost."""
        model = self.model
        if model.lossless:
            return []
        draw = self._random.random
        if not model.good_to_bad:
            return [index for index in range(packets) if draw() < model.loss_good]
        lost = []
        for index in range(packets):
            if draw() < (model.bad_to_good if self._bad else model.good_to_bad):
                self._bad = not self._bad
            if draw() < (model.loss_bad if self._bad else model.loss_good):
                lost.append(index)
        return lost


@dataclass(frozen=True, slots=True)
class Shape:
    """One direction: `rate_bps` of frames, `delay_s` one way, `jitter_s` (uniform, +-, order kept),
    a drop-tail queue of `queue_bytes` beside the delay line. While `down` nothing passes."""

    rate_bps: float
    delay_s: float = 0.0
    jitter_s: float = 0.0
    queue_bytes: int = 262_144
    loss: LossModel = LossModel()
    down: bool = False

    def describe(self) -> str:
        text = f"rate {self.rate_bps / 1e9:g} Gbit/s"
        if self.jitter_s:
            text += f", jitter {self.jitter_s * 1e3:g} ms"
        if not self.loss.lossless:
            text += f", loss {self.loss.mean:.3%}"
        return text

    def to_json(self) -> dict[str, Any]:
        return {
            "rate_bps": self.rate_bps,
            "delay_s": self.delay_s,
            "jitter_s": self.jitter_s,
            "queue_bytes": self.queue_bytes,
            "loss": [
                self.loss.loss_good,
                self.loss.loss_bad,
                self.loss.good_to_bad,
                self.loss.bad_to_good,
            ],
            "down": self.down,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Shape:
        return cls(**{**value, "loss": LossModel(*value["loss"])})


@dataclass(frozen=True, slots=True)
class LinkShape:
    """Both directions: `forward` from the prefill cluster to the decode cluster, `reverse` back."""

    forward: Shape
    reverse: Shape

    @property
    def rtt_s(self) -> float:
        return self.forward.delay_s + self.reverse.delay_s

    def describe(self) -> str:
        """The shape in a line; the way back only where it differs."""
        text = self.forward.describe()
        if self.reverse.describe() != self.forward.describe():
            text += f" (back: {self.reverse.describe()})"
        return f"{text}, rtt {self.rtt_s * 1e3:g} ms"

    def to_json(self) -> dict[str, Any]:
        return {"forward": self.forward.to_json(), "reverse": self.reverse.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> LinkShape:
        return cls(Shape.from_json(value["forward"]), Shape.from_json(value["reverse"]))


@dataclass(frozen=True, slots=True)
class TimedShape:
    """The shape that holds from `at_s` (seconds after the link came up) until the next one."""

    at_s: float
    shape: LinkShape
