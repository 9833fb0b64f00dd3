"""Continuous batching in macro-steps: no event per token, exact token times all the same.

Between changes of the batch every decode step takes the same time, so all its ends are known. An
instance keeps the *segments* of equal steps that it went through, as runs (first end, step, count)
of step ends; a request's tokens are a slice of them. Steps are numbered through the instance's
life: boundary k lies between step k-1 and step k. A request admitted at boundary k gets its first
token there and one at each later boundary, so with n tokens it leaves at boundary k + n - 1.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Protocol

from results.records import TokenRun

#: A time this small a part of a step after a boundary still is that boundary (rounding).
_SAME_BOUNDARY = 1e-7
#: So many segments are closed between two looks at which of them can be dropped.
_KEEP = 512


class StepModel(Protocol):
    """The part of a device profile that decode steps need: seconds of a step by batch and by the
    context of the whole batch (see `harness.profiles`)."""

    @property
    def max_batch(self) -> int: ...

    def decode_step_s(self, batch: int, context_tokens: float) -> float: ...


class StepTimes:
    """Step duration by batch and total context, the context in buckets of `bucket_tokens`.

    Instances of one profile share it: what each would know for itself has left a processor's caches
    by its next event.

    A bucket counts as its middle. When context does not matter to the profile, `bucket_tokens` is 0
    and there is a step for each size of the batch.
    """

    __slots__ = ("_known", "_profile", "bucket_tokens", "by_batch")

    def __init__(self, profile: StepModel, bucket_tokens: int) -> None:
        self._profile = profile
        self._known: dict[tuple[int, int], float] = {}
        flat = profile.decode_step_s(1, 0) == profile.decode_step_s(1, 1 << 30)
        self.bucket_tokens = 0 if flat else bucket_tokens
        sizes = range(profile.max_batch + 1) if flat else ()
        #: Empty when context matters.
        self.by_batch = [profile.decode_step_s(size, 0) for size in sizes]

    def step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of a step of `batch` sequences with `context_tokens` in all."""
        bucket_tokens = self.bucket_tokens
        if not bucket_tokens:
            return self.by_batch[batch]
        bucket = context_tokens // bucket_tokens
        try:
            return self._known[batch, bucket]
        except KeyError:
            middle = (bucket + 0.5) * bucket_tokens
            self._known[batch, bucket] = step_s = self._profile.decode_step_s(batch, middle)
            return step_s

    def steps_in_bucket(self, batch: int, context_tokens: int) -> int:
        """Steps until a batch, one token more a sequence each, changes bucket."""
        left = self.bucket_tokens - context_tokens % self.bucket_tokens
        return -(-left // batch)


class StepClock:
    """Which step boundary is when, past and (if nothing changes) to come."""

    __slots__ = ("_ends", "_limit", "_opens", "anchor", "anchor_s", "step_s")

    def __init__(self, now_s: float) -> None:
        #: The open segment: it began at boundary `anchor`, at `anchor_s`, with steps of `step_s`.
        self.anchor = 0
        self.anchor_s = now_s
        self.step_s = 0.0
        #: Closed segments: the step ends of each, and the boundary that opened it.
        self._ends: list[TokenRun] = []
        self._opens: list[int] = []
        self._limit = _KEEP

    def at(self, boundary: int) -> float:
        """When `boundary`, which is not before the open segment's start, is."""
        return self.anchor_s + (boundary - self.anchor) * self.step_s

    def next_boundary(self, now_s: float) -> int:
        """The first boundary at or after `now_s`."""
        if now_s <= self.anchor_s:
            return self.anchor
        steps = (now_s - self.anchor_s) / self.step_s
        return self.anchor + math.ceil(steps - _SAME_BOUNDARY)

    def idle_until(self, now_s: float) -> None:
        """Nothing ran since the open segment began, so its start can still move to `now_s`."""
        self.anchor_s = now_s

    def change_step(self, boundary: int, step_s: float) -> None:
        """Steps from `boundary` on last `step_s`, in a segment of their own."""
        self.close(boundary)
        self.step_s = step_s

    def close(self, boundary: int) -> None:
        """Begin a new segment at `boundary`."""
        count = boundary - self.anchor
        if count > 0:
            self._append(self.anchor, (self.anchor_s + self.step_s, self.step_s, count))
            self.anchor_s = self.at(boundary)
            self.anchor = boundary

    def stretch(self, boundary: int, extra_s: float) -> None:
        """The running step, which ends at `boundary`, ends `extra_s` later, and so do all after."""
        if self.anchor < boundary:
            self.close(boundary - 1)
            self._append(self.anchor, (self.at(boundary) + extra_s, self.step_s + extra_s, 1))
            self.anchor_s = self.at(boundary)
            self.anchor = boundary
        else:
            start_s, step_s, count = self._ends.pop()
            opened = self._opens.pop()
            if count > 1:
                self._append(opened, (start_s, step_s, count - 1))
            last_s = start_s + (count - 1) * step_s
            self._append(boundary - 1, (last_s + extra_s, step_s + extra_s, 1))
        self.anchor_s += extra_s

    def _append(self, opened: int, ends: TokenRun) -> None:
        self._opens.append(opened)
        self._ends.append(ends)

    def __len__(self) -> int:
        """Closed segments that are kept."""
        return len(self._opens)

    @property
    def crowded(self) -> bool:
        """It is time for `forget_before`."""
        return len(self._opens) > self._limit

    def forget_before(self, boundary: int) -> None:
        """Nobody will ask for runs that begin before `boundary`."""
        drop = max(0, bisect_right(self._opens, boundary) - 1)
        del self._opens[:drop]
        del self._ends[:drop]
        self._limit = len(self._opens) + _KEEP

    def runs(self, first: int, last: int) -> list[TokenRun]:
        """Times of the boundaries first..last, both included, as runs. `first` is not forgotten."""
        anchor, step_s = self.anchor, self.step_s
        if first >= anchor:
            return [(self.at(first), step_s, last - first + 1)]
        i = bisect_right(self._opens, first) - 1
        start_s, run_step_s, count = self._ends[i]
        skip = first - self._opens[i]
        runs = [(start_s + (skip - 1) * run_step_s, run_step_s, count - skip + 1)]
        runs += self._ends[i + 1 :]
        surplus = anchor - last
        if surplus < 0:
            runs.append((self.anchor_s + step_s, step_s, -surplus))
        while surplus > 0:
            start_s, run_step_s, count = runs.pop()
            if count > surplus:
                runs.append((start_s, run_step_s, count - surplus))
            surplus -= count
        return runs
