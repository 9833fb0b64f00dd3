"""The link specification that a user writes, and its resolution into shapes over time."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from harness.errors import BadInput
from harness.links.shape import LinkShape, LossModel, Shape, TimedShape
from workloads.section import Section

Backend = Literal["auto", "netem", "tun", "tbf", "relay"]
Preset = Literal["vpc-100g", "metro", "continental", "intercontinental"]

#: The least default queue: several TCP segmentation bursts and a few milliseconds at the rate.
LEAST_QUEUE_BYTES = 131_072
LEAST_QUEUE_MS = 5.0
MOST_SINE_STEPS = 100_000

PRESETS: dict[str, dict[str, Any]] = {
    "vpc-100g": {"rate_gbps": 100.0, "rtt_ms": 0.5},
    "metro": {"rate_gbps": 100.0, "rtt_ms": 2.0},
    "continental": {"rate_gbps": 100.0, "rtt_ms": 40.0},
    "intercontinental": {"rate_gbps": 100.0, "rtt_ms": 120.0, "jitter_ms": 1.0},
}


class IndependentLoss(Section):
    """Each packet is lost with the same probability, whatever befell the others."""

    model: Literal["independent"] = "independent"
    probability: float = Field(ge=0.0, lt=1.0, description="loss probability of a packet")

    def resolved(self) -> LossModel:
        return LossModel(loss_good=self.probability)


class GilbertElliottLoss(Section):
    """Bursty loss: a good and a bad state; the mean burst lasts 1 / bad_to_good packets."""

    model: Literal["gilbert-elliott"]
    good_to_bad: float = Field(gt=0.0, le=1.0, description="probability per packet of turning bad")
    bad_to_good: float = Field(gt=0.0, le=1.0, description="probability per packet of turning good")
    loss_bad: float = Field(
        default=1.0, ge=0.0, le=1.0, description="loss probability in the bad state"
    )
    loss_good: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="loss probability in the good state"
    )

    def resolved(self) -> LossModel:
        return LossModel(self.loss_good, self.loss_bad, self.good_to_bad, self.bad_to_good)


Loss = Annotated[IndependentLoss | GilbertElliottLoss, Field(discriminator="model")]


class ReverseSpec(Section):
    """What differs on the way from decode back to prefill; unset fields are the same."""

    rate_gbps: float | None = Field(
        default=None, gt=0.0, description="rate of the way back, Gbit/s"
    )
    delay_ms: float | None = Field(
        default=None,
        ge=0.0,
        description="one-way delay of the way back; the way there gets the rest of rtt_ms",
    )
    jitter_ms: float | None = Field(default=None, ge=0.0, description="jitter of the way back, ms")
    loss: Loss | None = Field(default=None, description="loss of the way back")
    queue_ms: float | None = Field(
        default=None, gt=0.0, description="queue of the way back, ms at its rate"
    )
    queue_bytes: int | None = Field(default=None, gt=0, description="queue of the way back, bytes")


class Step(Section):
    """A change at `at_s`; fields left out keep the value they had. Applies to both directions."""

    at_s: float = Field(ge=0.0, description="seconds after the link came up")
    rate_gbps: float | None = Field(
        default=None,
        gt=0.0,
        description="rate of the way there; the way back keeps its ratio to it",
    )
    rtt_ms: float | None = Field(
        default=None, ge=0.0, description="round-trip time without queueing, ms"
    )
    loss: Loss | None = Field(default=None, description="loss, both directions")
    down: bool | None = Field(default=None, description="true: an outage begins; false: it ends")


class Sine(Section):
    """A rate that swings as a sine from `from_s` to `until_s`, written out as steps; the last one
    holds until a later step of the schedule."""

    from_s: float = Field(default=0.0, ge=0.0, description="when the swing begins")
    rate_gbps: float | None = Field(
        default=None, gt=0.0, description="mean of the swing; the link's rate_gbps unless set"
    )
    period_s: float = Field(gt=0.0, description="length of a full swing, seconds")
    amplitude: float = Field(gt=0.0, lt=1.0, description="swing as a share of the mean")
    until_s: float = Field(gt=0.0, description="the last step is at or before this time")
    step_s: float | None = Field(
        default=None, gt=0.0, description="time between steps; period/24 unless set"
    )

    def steps(self, rate_gbps: float) -> list[Step]:
        """Steps a `step_s` apart from `from_s` on, each with the sine's value at its middle.
        `rate_gbps` is the mean where the sine has none of its own."""
        step_s = self.step_s or self.period_s / 24
        count = int((self.until_s - self.from_s) / step_s) + 1
        return [
            Step(
                at_s=self.from_s + index * step_s,
                rate_gbps=(self.rate_gbps or rate_gbps)
                * (
                    1
                    + self.amplitude
                    * math.sin(2 * math.pi * (index + 0.5) * step_s / self.period_s)
                ),
            )
            for index in range(count)
        ]


class LinkSpec(Section):
    """A link between the prefill cluster and the decode cluster.

    `preset` fills the fields that are not given. Rates count Ethernet frames, so that TCP carries
    0.956 of them at a 1500-byte MTU.
    """

    preset: Preset | None = Field(
        default=None, description="named starting point: " + ", ".join(PRESETS)
    )
    rate_gbps: float = Field(
        default=100.0, gt=0.0, le=1000.0, description="rate of the way there, Gbit/s"
    )
    rtt_ms: float = Field(
        default=0.0, ge=0.0, le=10_000.0, description="round-trip time without queueing"
    )
    jitter_ms: float = Field(
        default=0.0, ge=0.0, description="uniform +- jitter of each direction's delay"
    )
    loss: Loss | None = Field(
        default=None, description="packet loss, each direction; none unless set"
    )
    queue_ms: float | None = Field(
        default=None,
        gt=0.0,
        description="drop-tail queue, ms at the rate; max(rtt, 5 ms) unless set",
    )
    queue_bytes: int | None = Field(
        default=None, gt=0, description="the same in bytes; give one of the two"
    )
    reverse: ReverseSpec = Field(default=ReverseSpec(), description="how the way back differs")
    schedule: tuple[Step, ...] = Field(default=(), description="changes in time, in order of at_s")
    sine: Sine | None = Field(default=None, description="a swinging rate, alone or amid a schedule")
    bundle_segments: int = Field(
        default=1,
        ge=1,
        le=43,
        description="netem: segments that local TCP may hand over as one packet. More cost less of "
        "the processor, but netem would lose them whole (so only without loss), and bounds its "
        "queue by packets, which then hold as many times more",
    )
    backend: Backend = Field(
        default="auto", description="auto takes the best that this host offers"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("preset") in PRESETS:
            return {**PRESETS[given["preset"]], **given}
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.queue_ms is not None and self.queue_bytes is not None:
            raise ValueError("queue_ms and queue_bytes are both given; give one")
        if self.reverse.queue_ms is not None and self.reverse.queue_bytes is not None:
            raise ValueError("reverse.queue_ms and reverse.queue_bytes are both given; give one")
        sine = self.sine
        if sine is not None:
            if sine.until_s < sine.from_s:
                raise ValueError(f"sine.until_s {sine.until_s:g} is before from_s {sine.from_s:g}")
            count = (sine.until_s - sine.from_s) / (sine.step_s or sine.period_s / 24)
            if count > MOST_SINE_STEPS:
                raise ValueError(
                    f"sine is written out as {count:.3g} steps, at most {MOST_SINE_STEPS:,} would "
                    "do; make step_s or period_s longer, or until_s earlier"
                )
            for step in self.schedule:
                if step.rate_gbps is not None and sine.from_s <= step.at_s <= sine.until_s:
                    raise ValueError(
                        f"the schedule sets rate_gbps at {step.at_s:g} s, amid the sine; move one"
                    )
        lossy = self.loss or self.reverse.loss or any(step.loss for step in self.schedule)
        if self.bundle_segments > 1 and lossy:
            raise ValueError(
                "bundle_segments above 1 would lose whole bundles; leave it or the loss"
            )
        times = [step.at_s for step in self.schedule]
        if times != sorted(times):
            raise ValueError("schedule is not in order of at_s")
        if (self.reverse.delay_ms or 0.0) > self.rtt_ms:
            raise ValueError(
                f"reverse.delay_ms {self.reverse.delay_ms} exceeds rtt_ms {self.rtt_ms}"
            )
        return self

    def initial(self) -> LinkShape:
        """The shape at the start, before any step."""
        return self._shape(self.rate_gbps, self.rtt_ms, self.loss, down=False)

    def timeline(self) -> list[TimedShape]:
        """The shape over time: the first entry is at 0, later ones in order, each complete."""
        rate_gbps, rtt_ms, loss, down = self.rate_gbps, self.rtt_ms, self.loss, False
        shapes = [TimedShape(0.0, self.initial())]
        for step in self.steps():
            rate_gbps = rate_gbps if step.rate_gbps is None else step.rate_gbps
            rtt_ms = rtt_ms if step.rtt_ms is None else step.rtt_ms
            loss = loss if step.loss is None else step.loss
            down = down if step.down is None else step.down
            timed = TimedShape(step.at_s, self._shape(rate_gbps, rtt_ms, loss, down))
            if step.at_s == shapes[-1].at_s:
                shapes[-1] = timed
            else:
                shapes.append(timed)
        return shapes

    def steps(self) -> list[Step]:
        """The schedule and the sine's steps, in order."""
        sine = self.sine.steps(self.rate_gbps) if self.sine else []
        return sorted([*self.schedule, *sine], key=lambda step: step.at_s)

    def scaled(self, rate_scale: float, time_scale: float) -> LinkSpec:
        """The link of an emulation: rates divided by `rate_scale`, durations by `time_scale`.

        Durations are RTT, jitter, queue_ms and the schedule's times; queue_bytes is over both.
        """

        def rate(value: float | None) -> float | None:
            return None if value is None else value / rate_scale

        def time(value: float | None) -> float | None:
            return None if value is None else value / time_scale

        def size(value: int | None) -> int | None:
            return None if value is None else max(1, round(value / (rate_scale * time_scale)))

        reverse, sine = self.reverse, self.sine
        return LinkSpec(
            rate_gbps=self.rate_gbps / rate_scale,
            rtt_ms=self.rtt_ms / time_scale,
            jitter_ms=self.jitter_ms / time_scale,
            loss=self.loss,
            queue_ms=time(self.queue_ms),
            queue_bytes=size(self.queue_bytes),
            reverse=ReverseSpec(
                rate_gbps=rate(reverse.rate_gbps),
                delay_ms=time(reverse.delay_ms),
                jitter_ms=time(reverse.jitter_ms),
                loss=reverse.loss,
                queue_ms=time(reverse.queue_ms),
                queue_bytes=size(reverse.queue_bytes),
            ),
            schedule=tuple(
                Step(
                    at_s=step.at_s / time_scale,
                    rate_gbps=rate(step.rate_gbps),
                    rtt_ms=time(step.rtt_ms),
                    loss=step.loss,
                    down=step.down,
                )
                for step in self.schedule
            ),
            sine=sine
            and Sine(
                from_s=sine.from_s / time_scale,
                rate_gbps=rate(sine.rate_gbps),
                period_s=sine.period_s / time_scale,
                amplitude=sine.amplitude,
                until_s=sine.until_s / time_scale,
                step_s=time(sine.step_s),
            ),
            bundle_segments=self.bundle_segments,
            backend=self.backend,
        )

    def _shape(self, rate_gbps: float, rtt_ms: float, loss: Loss | None, down: bool) -> LinkShape:
        back = self.reverse
        back_rate_gbps = rate_gbps * (back.rate_gbps or self.rate_gbps) / self.rate_gbps
        back_delay_ms = rtt_ms / 2 if back.delay_ms is None else min(back.delay_ms, rtt_ms)
        back_queue = (back.queue_ms, back.queue_bytes)
        if back_queue == (None, None):
            back_queue = (self.queue_ms, self.queue_bytes)
        back_loss = back.loss or loss
        return LinkShape(
            forward=Shape(
                rate_bps=rate_gbps * 1e9,
                delay_s=(rtt_ms - back_delay_ms) / 1e3,
                jitter_s=self.jitter_ms / 1e3,
                queue_bytes=_queue_bytes(rate_gbps, rtt_ms, self.queue_ms, self.queue_bytes),
                loss=loss.resolved() if loss else LossModel(),
                down=down,
            ),
            reverse=Shape(
                rate_bps=back_rate_gbps * 1e9,
                delay_s=back_delay_ms / 1e3,
                jitter_s=(self.jitter_ms if back.jitter_ms is None else back.jitter_ms) / 1e3,
                queue_bytes=_queue_bytes(back_rate_gbps, rtt_ms, *back_queue),
                loss=back_loss.resolved() if back_loss else LossModel(),
                down=down,
            ),
        )


def _queue_bytes(
    rate_gbps: float, rtt_ms: float, queue_ms: float | None, queue_bytes: int | None
) -> int:
    if queue_bytes is not None:
        return queue_bytes
    if queue_ms is not None:
        return max(1, round(rate_gbps * 1e9 / 8 * queue_ms / 1e3))
    return max(LEAST_QUEUE_BYTES, round(rate_gbps * 1e9 / 8 * max(rtt_ms, LEAST_QUEUE_MS) / 1e3))


def parse_link(table: dict[str, Any], where: str = "link") -> LinkSpec:
    """A LinkSpec from a TOML table. Raises BadInput that names `where` and the first bad field."""
    try:
        return LinkSpec.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        # Union members show up as path parts with the tag's name, which are no field of the user's.
        parts = [
            str(part) for part in first["loc"] if part not in ("independent", "gilbert-elliott")
        ]
        found = (
            f" (found {first['input']!r})" if parts and not isinstance(first["input"], dict) else ""
        )
        what = first["msg"].removeprefix("Value error, ")
        raise BadInput(f"{'.'.join([where, *parts])}: {what}{found}") from None
