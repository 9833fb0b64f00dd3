"""What one instance of a device does with one model: prefill time, cache bytes, decode steps.

Predictions, the simulator and paced workers all read the same profile. Its methods are called for
every simulated request, so they are plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from harness.errors import BadInput
from harness.profiles.curves import Curve, FloatArray


class ProfileError(BadInput):
    """A profile that cannot be read or does not hold what was asked of it."""


class Origin(StrEnum):
    """Where a number comes from."""

    PUBLISHED = "published"
    FITTED = "fitted"
    DERIVED = "derived"
    ASSUMED = "assumed"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Provenance:
    """`note` names the source or the reasoning. A measured number has a device, commit and date."""

    origin: Origin
    note: str
    device: str = ""
    commit: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Seconds a step = base_s + per_sequence_s x batch + per_context_token_s x context tokens.

    Decode reads the weights once a step, the recurrent state once a sequence and the attention
    cache once a token of context, which makes a step affine in these. Coefficients are >= 0.
    """

    base_s: float
    per_sequence_s: float = 0.0
    per_context_token_s: float = 0.0

    def at(self, batch: int, context_tokens: float) -> float:
        return self.base_s + self.per_sequence_s * batch + self.per_context_token_s * context_tokens

    def times(self, factor: float) -> DecodeStep:
        return DecodeStep(
            self.base_s * factor,
            self.per_sequence_s * factor,
            self.per_context_token_s * factor,
        )


#: Relative error of the piecewise linear table that `to_pacing` hands to a worker.
PACING_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Profile:
    """One instance (8 GPUs in the paper). `kv_memory_bytes` None is unbounded; `max_batch` 0 and
    `decode` None mean that decode is not profiled.

    `published` are figures of the source that predictions do not use: rows (tokens, value) by
    name, kept to compare with.
    """

    name: str
    device: str
    model: str
    curve: Curve
    fixed_bytes: float
    per_token_bytes: float
    n_layers: int
    decode: DecodeStep | None = None
    max_batch: int = 0
    kv_memory_bytes: float | None = None
    price_per_hour: float | None = None
    prefill_points: tuple[tuple[float, float], ...] = ()
    published: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    provenance: Mapping[str, Provenance] = field(default_factory=dict)
    _setup_s: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_setup_s", self.curve.at(0.0))

    def prefill_s(self, input_tokens: float, cached_tokens: float = 0) -> float:
        """Seconds to prefill a prompt of which `cached_tokens` are already held.

        T(l) - T(c) + T(0): the new tokens attend to the cached ones too, so they cost what the
        last l - c tokens of a whole prefill cost, plus the fixed cost of any prefill.
        """
        if cached_tokens:
            at = self.curve.at
            return at(input_tokens) - at(cached_tokens) + self._setup_s
        return self.curve.at(input_tokens)

    def prefill_array_s(self, input_tokens: FloatArray) -> FloatArray:
        """`prefill_s` of each element, nothing cached."""
        return self.curve.over(input_tokens)

    def kv_bytes(self, tokens: float, held_tokens: float = 0) -> float:
        """Bytes that must cross for a prompt of `tokens` of which the receiver holds `held_tokens`.

        The fixed state always crosses: it is valid only at the exact length it was taken at.
        """
        return self.fixed_bytes + self.per_token_bytes * (tokens - held_tokens)

    def phi_gbps(self, tokens: float) -> float:
        """Phi_kv = S_kv / T_prefill (Eq 1), Gbit/s."""
        return self.kv_bytes(tokens) * 8e-9 / self.prefill_s(tokens)

    def decode_step_s(self, batch: int, context_tokens: float) -> float:
        """Seconds of one step of `batch` sequences with `context_tokens` of context *in all*."""
        if self.decode is None:
            raise ProfileError(f"profile {self.name}: decode is not profiled ([decode] is missing)")
        return self.decode.at(batch, context_tokens)

    def scaled(self, time_scale: float = 1.0, byte_scale: float = 1.0) -> Profile:
        """Durations divided by `time_scale`, sizes by `byte_scale`; lengths stay those of the
        modelled system."""
        return replace(
            self,
            curve=self.curve.times(1 / time_scale),
            decode=None if self.decode is None else self.decode.times(1 / time_scale),
            fixed_bytes=self.fixed_bytes / byte_scale,
            per_token_bytes=self.per_token_bytes / byte_scale,
            kv_memory_bytes=None
            if self.kv_memory_bytes is None
            else self.kv_memory_bytes / byte_scale,
            prefill_points=tuple((tokens, s / time_scale) for tokens, s in self.prefill_points),
        )

    def to_pacing(self, max_tokens: int = 1 << 20) -> dict[str, Any]:
        """What a paced worker needs, as plain JSON.

        `prefill_tokens` and `prefill_s` are a table to interpolate linearly (relative error under
        PACING_TOLERANCE), with T(0) first; an incremental prefill costs T(l) - T(c) + T(0).
        Decode seconds are those of `DecodeStep`, null when not profiled.
        """
        tokens = _linear_knots(self.curve, float(max_tokens))
        step = self.decode
        return {
            "profile": self.name,
            "prefill_tokens": [float(value) for value in tokens],
            "prefill_s": [self.curve.at(float(value)) for value in tokens],
            "decode_base_s": None if step is None else step.base_s,
            "decode_per_sequence_s": None if step is None else step.per_sequence_s,
            "decode_per_context_token_s": None if step is None else step.per_context_token_s,
            "max_batch": self.max_batch,
            "kv_memory_bytes": self.kv_memory_bytes,
        }


def _linear_knots(curve: Curve, max_tokens: float) -> FloatArray:
    """Knots from 0 to `max_tokens` between which `curve` is straight to PACING_TOLERANCE."""
    knots = [0.0]
    stack = [(0.0, max_tokens)]
    while stack:
        low, high = stack.pop()
        probe = low + (high - low) * np.array([0.25, 0.5, 0.75])
        ends = curve.at(low), curve.at(high)
        straight = ends[0] + (ends[1] - ends[0]) * (probe - low) / (high - low)
        wrong = np.abs(curve.over(probe) / np.maximum(straight, 1e-300) - 1).max()
        if wrong > PACING_TOLERANCE and high - low > 1:
            middle = (low + high) / 2
            stack += [(middle, high), (low, middle)]
        else:
            knots.append(high)
    return np.asarray(knots)
