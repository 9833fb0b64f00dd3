"""The configuration of workloads and arrivals: one schema for experiment files, CLI and docs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from workloads.lengths import (
    LEAST_SIGMA,
    MOST_SIGMA,
    Fixed,
    LengthDistribution,
    TruncatedLogNormal,
)
from workloads.section import Section

NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class LogNormalLengths(Section):
    """Lengths in tokens: exp(N(mu, sigma^2)) conditioned to [min_tokens, max_tokens]."""

    mu: float = Field(default=9.90, description="mean of ln(tokens) before truncation")
    sigma: float = Field(
        default=1.00, ge=LEAST_SIGMA, le=MOST_SIGMA, description="standard deviation of ln(tokens)"
    )
    min_tokens: PositiveInt = Field(default=128, description="shortest length, tokens")
    max_tokens: PositiveInt = Field(default=131_072, description="longest length, tokens")

    @model_validator(mode="after")
    def _check(self) -> LogNormalLengths:
        self.distribution()
        return self

    def distribution(self) -> TruncatedLogNormal:
        return TruncatedLogNormal(self.mu, self.sigma, self.min_tokens, self.max_tokens)


Lengths = PositiveInt | LogNormalLengths


def distribution_of(lengths: Lengths) -> LengthDistribution:
    """The distribution that a length field describes: one number is a fixed length."""
    return Fixed(lengths) if isinstance(lengths, int) else lengths.distribution()


class _Workload(Section):
    tenants: dict[str, PositiveFloat] = Field(
        default={},
        description="weight of each tenant; empty: requests carry the trace's tenant or none",
    )
    slo_class: str = Field(default="", description="SLO class that each request carries")


class _Synthetic(_Workload):
    output_tokens: Lengths = Field(
        default=1024, description="output length: a number or a log-normal"
    )
    stratified: bool = Field(
        default=False,
        description="each 64 consecutive input lengths cover 64 equal quantile ranges once, in "
        "random order: less variance between short runs, less clustering than independent draws",
    )


#: Prefix blocks of one prompt: each has an id, which every hop looks at.
MOST_BLOCKS = 16_384


def _check_blocks(longest_tokens: int, block_tokens: int) -> None:
    if longest_tokens > MOST_BLOCKS * block_tokens:
        raise ValueError(
            f"block_tokens: found {block_tokens}, which makes more than {MOST_BLOCKS:,} blocks of "
            f"a prompt of {longest_tokens:,} tokens; longer blocks or shorter prompts would do"
        )


class LogNormalWorkload(_Synthetic, LogNormalLengths):
    """Unique prompts of log-normal length (the paper's workload by default)."""

    kind: Literal["lognormal"] = "lognormal"


class FixedWorkload(_Synthetic):
    """Unique prompts of one length."""

    kind: Literal["fixed"] = "fixed"
    input_tokens: PositiveInt = Field(default=27_486, description="prompt length, tokens")


class TraceWorkload(_Workload):
    """The rows of a trace file, in order, until they run out."""

    kind: Literal["trace"] = "trace"
    path: str = Field(description="trace file; .gz and .zst are read as they are")
    format: str = Field(
        default="auto", description="auto, or a name that `prfaas trace --help` lists"
    )
    start_s: NonNegativeFloat = Field(
        default=0.0, description="skip rows before this trace time, s"
    )
    end_s: PositiveFloat | None = Field(default=None, description="stop at this trace time, s")
    max_input_tokens: PositiveInt | None = Field(
        default=None, description="leave out rows with longer prompts"
    )


class SessionsWorkload(_Synthetic):
    """Multi-turn sessions: each prompt is the conversation so far and a new message.

    The arrival process sets when sessions start, at request_rate / mean turns; a turn follows its
    predecessor's arrival by `response_s` plus a random think time. From an empty start the request
    rate climbs over about two mean session lives; `warm_s` leaves that out.
    """

    kind: Literal["sessions"] = "sessions"
    system_tokens: int = Field(
        default=1024, ge=0, description="prompt start that all sessions share, tokens"
    )
    first_message: Lengths = Field(
        default=LogNormalLengths(mu=8.8, sigma=1.0, min_tokens=16, max_tokens=65_536),
        description="length of a session's first message",
    )
    later_message: Lengths = Field(
        default=LogNormalLengths(mu=6.5, sigma=1.0, min_tokens=8, max_tokens=16_384),
        description="length of each later message",
    )
    mean_turns: float = Field(
        default=5.0, ge=1, description="mean of the geometric number of turns"
    )
    max_turns: PositiveInt = Field(default=50, description="a session ends after this many turns")
    max_input_tokens: PositiveInt = Field(
        default=131_072, description="a session ends before a prompt would exceed this"
    )
    response_s: NonNegativeFloat = Field(
        default=25.6,
        description="allowance for the answer between a turn's arrival and thinking, s",
    )
    warm_s: NonNegativeFloat = Field(
        default=0.0,
        le=100_000,
        description="sessions have been starting for so long when time 0 comes, s",
    )
    think_s: NonNegativeFloat = Field(
        default=30.0, description="mean of the exponential think time, s"
    )
    block_tokens: PositiveInt = Field(default=512, description="tokens of a prefix block")

    @model_validator(mode="after")
    def _check(self) -> SessionsWorkload:
        if self.system_tokens >= self.max_input_tokens:
            raise ValueError(
                f"system_tokens: found {self.system_tokens}, needs fewer than max_input_tokens "
                f"({self.max_input_tokens})"
            )
        _check_blocks(self.max_input_tokens, self.block_tokens)
        return self


class DocumentsWorkload(_Synthetic):
    """Questions about shared documents: a document, then a question that nobody else asks."""

    kind: Literal["documents"] = "documents"
    document: Lengths = Field(default=LogNormalLengths(), description="length of a document")
    question: Lengths = Field(
        default=LogNormalLengths(mu=5.0, sigma=0.7, min_tokens=8, max_tokens=4096),
        description="length of a question",
    )
    reuse: Share = Field(
        default=0.5, description="share of requests about a document that was asked about before"
    )
    live_documents: PositiveInt = Field(
        default=256,
        le=1_000_000,
        description="only the last so many new documents are asked about again",
    )
    skew: NonNegativeFloat = Field(
        default=0.8,
        description="popularity of the k-th newest live document is k^-skew; 0: all alike",
    )
    block_tokens: PositiveInt = Field(default=512, description="tokens of a prefix block")

    @model_validator(mode="after")
    def _check(self) -> DocumentsWorkload:
        longest = sum(
            each if isinstance(each, int) else each.max_tokens
            for each in (self.document, self.question)
        )
        _check_blocks(longest, self.block_tokens)
        return self


class DriftWorkload(_Synthetic):
    """Log-normal lengths whose mean moves from `mean_from` to `mean_to` and back in each period."""

    kind: Literal["drift"] = "drift"
    mean_from: PositiveFloat = Field(
        default=10_000, description="mean length at the start of a period"
    )
    mean_to: PositiveFloat = Field(default=60_000, description="mean length half a period later")
    period_s: PositiveFloat = Field(default=86_400.0, description="period of the cosine drift, s")
    sigma: float = Field(
        default=1.00, ge=0.05, le=MOST_SIGMA, description="standard deviation of ln(tokens)"
    )
    min_tokens: PositiveInt = Field(default=128, description="shortest length, tokens")
    max_tokens: PositiveInt = Field(default=131_072, description="longest length, tokens")

    @model_validator(mode="after")
    def _check(self) -> DriftWorkload:
        for mean in (self.mean_from, self.mean_to):
            if not self.min_tokens < mean < 0.9 * self.max_tokens:
                raise ValueError(
                    f"mean_from, mean_to: found {mean:g}, needs a mean above min_tokens "
                    f"({self.min_tokens}) and below 0.9 max_tokens ({0.9 * self.max_tokens:g})"
                )
        return self


WorkloadSpec = Annotated[
    LogNormalWorkload
    | FixedWorkload
    | TraceWorkload
    | SessionsWorkload
    | DocumentsWorkload
    | DriftWorkload,
    Field(discriminator="kind"),
]


class SteadyShape(Section):
    """The request rate does not change."""

    kind: Literal["steady"] = "steady"


class OnOffShape(Section):
    """Bursts and silences; the request rate is the mean over a cycle."""

    kind: Literal["on-off"] = "on-off"
    on_s: PositiveFloat = Field(default=30.0, description="length of a burst, s")
    off_s: PositiveFloat = Field(default=30.0, description="length of a silence, s")


class LinearShape(Section):
    """A straight ramp between two multiples of the request rate, then the second."""

    kind: Literal["linear"] = "linear"
    from_factor: NonNegativeFloat = Field(
        default=0.0, description="start, as a multiple of the request rate"
    )
    to_factor: PositiveFloat = Field(
        default=1.0, description="end, as a multiple of the request rate"
    )
    over_s: PositiveFloat = Field(default=60.0, description="length of the ramp, s")


class ExponentialShape(Section):
    """A ramp by a constant factor a second between two multiples of the request rate."""

    kind: Literal["exponential"] = "exponential"
    from_factor: PositiveFloat = Field(
        default=0.1, description="start, as a multiple of the request rate"
    )
    to_factor: PositiveFloat = Field(
        default=1.0, description="end, as a multiple of the request rate"
    )
    over_s: PositiveFloat = Field(default=60.0, description="length of the ramp, s")


class Step(Section):
    """One step of a rate in steps."""

    duration_s: PositiveFloat = Field(description="length of the step, s")
    factor: NonNegativeFloat = Field(description="multiple of the request rate")


class StepsShape(Section):
    """Multiples of the request rate in turn, repeated."""

    kind: Literal["steps"] = "steps"
    steps: tuple[Step, ...] = Field(min_length=1, description="steps in order")

    @model_validator(mode="after")
    def _check(self) -> StepsShape:
        if not any(step.factor > 0 for step in self.steps):
            raise ValueError("steps: every factor is 0, needs one above 0")
        return self


RateShape = Annotated[
    SteadyShape | OnOffShape | LinearShape | ExponentialShape | StepsShape,
    Field(discriminator="kind"),
]


class ArrivalSpec(Section):
    """When requests arrive."""

    process: Literal["poisson", "constant", "gamma", "trace"] = Field(
        default="poisson", description="gaps between arrivals; trace: the trace's own stamps"
    )
    # Bursts are of about 1 / burstiness requests at one moment.
    burstiness: PositiveFloat = Field(
        default=1.0,
        ge=1e-4,
        description="shape of the gamma gaps: CV is 1 / sqrt(burstiness), 1 is Poisson",
    )
    shape: RateShape = Field(default=SteadyShape(), description="how the rate changes over time")
    exact_rate: bool = Field(
        default=False,
        description="stretch the schedule so that exactly rate x duration requests fit",
    )
    slow_down: PositiveFloat = Field(
        default=1.0, description="trace stamps are multiplied by this: 2 halves the rate"
    )
    offset_s: NonNegativeFloat = Field(default=0.0, description="trace stamps are moved by this, s")
    dequantise_s: NonNegativeFloat = Field(
        default=0.0,
        description="trace stamps are multiples of this many seconds: spread each group of equal "
        "stamps uniformly over the following interval (0: leave them together)",
    )

    @model_validator(mode="after")
    def _check(self) -> ArrivalSpec:
        if self.burstiness != 1.0 and self.process != "gamma":
            raise ValueError(
                f"burstiness: found {self.burstiness:g} with process {self.process!r}, "
                "which has none; use process 'gamma'"
            )
        retimed = self.slow_down != 1.0 or self.offset_s or self.dequantise_s
        if retimed and self.process != "trace":
            raise ValueError(
                f"slow_down, offset_s, dequantise_s: change trace stamps, but process is "
                f"{self.process!r}; use process 'trace'"
            )
        return self
