"""Makes a real engine as slow as the modelled device: it computes, then waits for the modelled end.

Jobs chain on an absolute timeline: one that was queued when its predecessor's modelled end came
starts at exactly that end, so neither wake-up latency nor rounding adds up. Computing past the
modelled end is an overrun: counted and reported, never hidden. Seconds here are real ones
(modelled duration / time_scale); prompt lengths are those of the modelled system.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

#: A job may end this much later than modelled, as a share of its duration and in seconds (one
#: timer tick), before it counts as an overrun.
OVERRUN_SHARE = 0.02
OVERRUN_S = 0.001


class InputError(ValueError):
    """A pacing file that cannot be used. The message names what was found and what would do."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear through points (x ascending); beyond the ends the end segments go on."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, x: float) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        i = min(max(bisect_left(points, (x, float("-inf"))), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return max(0.0, y0 + (x - x0) * (y1 - y0) / (x1 - x0))


@dataclass(frozen=True, slots=True)
class Quadratic:
    """c0 + c1 x + c2 x^2."""

    c0: float
    c1: float
    c2: float

    def __call__(self, x: float) -> float:
        return self.c0 + x * (self.c1 + x * self.c2)


@dataclass(frozen=True, slots=True)
class Pacing:
    """What a worker needs of a device profile, already in real seconds.

    `prefill` gives T(l) of an uncached prompt of l system tokens. `decode` gives the seconds of one
    engine decode step by batch, to which each request adds `context_s_per_token` per token of its
    context (engine tokens). `phases`: see `Scheduler.schedule`; `max_batch` bounds the batch.
    """

    prefill: Curve | Quadratic
    decode: Curve
    max_batch: int
    context_s_per_token: float = 0.0
    phases: int = 1

    def prefill_s(self, tokens: float, cached: float = 0.0) -> float:
        """T(l) - T(c) + T(0): the work that the cached prefix saves, but not the fixed part."""
        if not cached:
            return self.prefill(tokens)
        return self.prefill(tokens) - self.prefill(cached) + self.prefill(0.0)

    def decode_step_s(self, batch: int, context_tokens: int = 0) -> float:
        """One step of `batch` requests that hold `context_tokens` in all."""
        return self.decode(batch) + self.context_s_per_token * context_tokens

    @classmethod
    def from_json(cls, value: object, where: str = "pacing") -> Pacing:
        """Strict reader of the worker's pacing file. Raises InputError.

        {"prefill": {"quadratic_s": [c0, c1, c2]} or {"points": [[tokens, seconds], ...]},
         "decode": {"step_s": seconds or [[batch, seconds], ...], "max_batch": n,
                    "context_s_per_token": 0.0, "phases": 1}}
        """
        top = _object(value, where, {"prefill", "decode"}, set())
        prefill = _object(top["prefill"], f"{where}.prefill", set(), {"quadratic_s", "points"})
        decode = _object(
            top["decode"],
            f"{where}.decode",
            {"step_s", "max_batch"},
            {"context_s_per_token", "phases"},
        )
        curve: Curve | Quadratic
        if "quadratic_s" in prefill:
            numbers = prefill["quadratic_s"]
            if not isinstance(numbers, Sequence) or len(numbers) != 3:
                raise InputError(
                    f"{where}.prefill.quadratic_s: {numbers!r}; three numbers would do"
                )
            curve = Quadratic(*(_number(n, f"{where}.prefill.quadratic_s") for n in numbers))
        elif "points" in prefill:
            curve = _curve(prefill["points"], f"{where}.prefill.points")
        else:
            raise InputError(f"{where}.prefill: needs quadratic_s or points")
        step = decode["step_s"]
        if not isinstance(step, list):
            step = [[1, step]]
        return cls(
            prefill=curve,
            decode=_curve(step, f"{where}.decode.step_s"),
            max_batch=_whole(decode["max_batch"], f"{where}.decode.max_batch"),
            context_s_per_token=_number(
                decode.get("context_s_per_token", 0.0), f"{where}.decode.context_s_per_token"
            ),
            phases=_whole(decode.get("phases", 1), f"{where}.decode.phases"),
        )

    @classmethod
    def read(cls, path: Path) -> Pacing:
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"pacing file {path}: {error}") from error
        return cls.from_json(value, str(path))


@dataclass(slots=True)
class Overruns:
    """Jobs paced so far, how many ended late, and the worst actual / modelled duration."""

    jobs: int = 0
    count: int = 0
    worst: float = 0.0


class Timeline:
    """The chain of modelled jobs of one worker. Times are those of one monotonic clock."""

    __slots__ = ("_end_s", "overruns")

    def __init__(self) -> None:
        self._end_s = float("-inf")
        self.overruns = Overruns()

    def begin(self, now_s: float, queued: bool) -> float:
        """When the next job starts: where the last one ended if it was `queued` then, else now."""
        return self._end_s if queued and self._end_s > float("-inf") else max(now_s, self._end_s)

    def end(self, start_s: float, duration_s: float) -> float:
        """The modelled end of the job that starts at `start_s`."""
        self._end_s = start_s + duration_s
        return self._end_s

    def judge(self, end_s: float, modelled_s: float, computed_s: float) -> float:
        """How many times `modelled_s` a job took that was to end at `end_s` and was computed at
        `computed_s`, if that was an overrun; else 0.
        """
        self.overruns.jobs += 1
        late_s = computed_s - end_s
        if late_s <= max(OVERRUN_S, OVERRUN_SHARE * modelled_s):
            return 0.0
        ratio = 1 + late_s / modelled_s if modelled_s > 0 else float("inf")
        self.overruns.count += 1
        self.overruns.worst = max(self.overruns.worst, ratio)
        return ratio


def layer_due_s(start_s: float, duration_s: float, layer: int, layers: int) -> float:
    """When layer `layer` (from 0) of `layers` is computed on the modelled device."""
    return start_s + (layer + 1) / layers * duration_s


async def sleep_until(when_s: float) -> None:
    """Sleep until CLOCK_MONOTONIC reads `when_s`: never wakes early, and idle by about 1 ms late.

    uvloop's timers round to whole milliseconds, and its clock stands still within a turn.
    """
    left_s = when_s - time.monotonic()
    while left_s > 0:
        await asyncio.sleep(math.ceil(left_s * 1e3) * 1e-3)
        left_s = when_s - time.monotonic()


def _object(value: object, where: str, required: set[str], optional: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object, found {type(value).__name__}")
    for key in value:
        if key not in required | optional:
            raise InputError(
                f"{where}: unknown key {key!r}; known: {', '.join(sorted(required | optional))}"
            )
    for key in sorted(required - set(value)):
        raise InputError(f"{where}: {key} is missing")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}: {value!r} is not a number")
    return float(value)


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{where}: {value!r}; a whole number >= 1 would do")
    return value


def _curve(value: object, where: str) -> Curve:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: {value!r}; a list of [x, seconds] pairs would do")
    points = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise InputError(f"{where}: {pair!r} is not an [x, seconds] pair")
        points.append((_number(pair[0], where), _number(pair[1], where)))
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise InputError(f"{where}: the first numbers of the pairs must ascend")
    return Curve(tuple(points))
