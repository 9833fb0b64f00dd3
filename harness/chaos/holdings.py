"""What each process of a soak held over time, and whether that is flat.

A process dies and is started again under its name many times, so growth is that within its lives:
one line for all of them, each with a level of its own, over samples from which a life's start is
left out. A short life does not count: what fills up once, buffers and tables with a bound, looks
there like growth without end. Memory is the heap alone; the arena of the caches is touched page by
page and shared. Of each minute the least counts: what a step needs for itself, and what the
allocator keeps of it for the next, comes and goes within seconds; a leak raises the least as well.

A heap also grows by what its allocator keeps in fragments, up to a plateau that may be further than
a life is long. So what is in use of it (`engine.in_use`) is judged as well, and more tightly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.chaos.processes import Held

#: Left out of each life: imports, thread pools, the records of the cache's pages, the allocator's
#: own arenas, which fill once.
WARM_S = 180.0
#: A life that was warm for less is no evidence about memory.
LEAST_S = 240.0
#: The least heap in so long is what a process held on to.
FLOOR_S = 60.0
#: Growth from which memory is not flat, when it is beyond doubt: of a heap, and of what is in use.
GROWTH_BYTES_PER_HOUR = 12 << 20
IN_USE_BYTES_PER_HOUR = 8 << 20
DOUBT = 3.0
#: Descriptors that a life may have more of than at its first sample, beyond connections.
DESCRIPTOR_SLACK = 8
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Growth:
    """From the `first` to the `last` least of a minute, bytes; `per_hour` and its standard `error`
    in bytes an hour, from lives of LEAST_S and more, None where they say too little for both."""

    first: int
    last: int
    per_hour: float | None = None
    error: float | None = None

    def beyond(self, bytes_per_hour: float) -> bool:
        """Whether it is more than that, and no chance."""
        if self.per_hour is None or self.error is None:
            return False
        return self.per_hour - DOUBT * self.error > bytes_per_hour

    def __str__(self) -> str:
        grew = "too short to say"
        if self.per_hour is not None and self.error is not None:
            grew = f"{self.per_hour / MIB:+.1f} +- {self.error / MIB:.1f} MiB/h"
        return f"{self.first / MIB:.1f} -> {self.last / MIB:.1f} MiB ({grew})"


@dataclass(frozen=True, slots=True)
class Trend:
    """`in_use` is None for a process that does not say; descriptors are (at the first warm sample,
    at the last); `cpu_s` of all lives."""

    process: str
    lives: int
    warm_s: float
    heap: Growth
    in_use: Growth | None
    descriptors: tuple[int, int]
    cpu_s: float

    def line(self) -> str:
        if not self.warm_s:
            return f"{self.process}: {self.lives} lives, none grew warm, {self.cpu_s:.0f} s of CPU"
        in_use = "" if self.in_use is None else f"in use {self.in_use}, "
        return (
            f"{self.process}: {self.lives} lives, {self.warm_s:.0f} s warm, heap {self.heap}, "
            f"{in_use}descriptors {self.descriptors[0]} -> {self.descriptors[1]}, "
            f"{self.cpu_s:.0f} s of CPU"
        )


class _Floors:
    """(seconds, bytes) of the sample with the least bytes of each FLOOR_S."""

    __slots__ = ("_window", "points")

    def __init__(self) -> None:
        self.points: list[tuple[float, int]] = []
        self._window = -1

    def note(self, at_s: float, age_s: float, n_bytes: int) -> None:
        window = int(age_s // FLOOR_S)
        if window > self._window:
            self._window = window
            self.points.append((at_s, n_bytes))
        elif n_bytes < self.points[-1][1]:
            self.points[-1] = at_s, n_bytes


@dataclass(slots=True)
class _Life:
    """What is kept of one: as little as can be, since the harness looks at itself too. Memory is of
    the warm part, which is from `warm_s` to `last_s`; descriptors are (at its first sample, at its
    last, most)."""

    began_s: float
    cpu_s: float = 0.0
    warm_s: float | None = None
    last_s: float = 0.0
    heap: _Floors = field(default_factory=_Floors)
    in_use: _Floors = field(default_factory=_Floors)
    descriptors: tuple[int, int, int] = (0, 0, 0)

    def note(self, at_s: float, held: Held) -> None:
        """A sample of the warm part."""
        now = held.descriptors
        first, _, most = self.descriptors
        if self.warm_s is None:
            self.warm_s = at_s
            first = now
        self.last_s = at_s
        self.descriptors = first, now, max(most, now)
        self.heap.note(at_s, at_s - self.warm_s, held.heap_bytes)
        if held.in_use_bytes is not None:
            self.in_use.note(at_s, at_s - self.warm_s, held.in_use_bytes)

    @property
    def span_s(self) -> float:
        """Of its warm part."""
        return 0.0 if self.warm_s is None else self.last_s - self.warm_s


class Holdings:
    """Samples by process name and life (its pid)."""

    def __init__(self, warm_s: float = WARM_S) -> None:
        self._warm_s = warm_s
        self._lives: dict[str, dict[int, _Life]] = {}

    def note(self, at_s: float, process: str, pid: int, held: Held) -> None:
        life = self._lives.setdefault(process, {}).setdefault(pid, _Life(at_s))
        life.cpu_s = held.cpu_s
        if at_s - life.began_s >= self._warm_s:
            life.note(at_s, held)

    def trends(self) -> list[Trend]:
        return [self._trend(name, list(lives.values())) for name, lives in self._lives.items()]

    def violations(self, connections: int) -> Iterator[str]:
        """`connections`: that a process may keep open for the next request."""
        for trend in self.trends():
            in_use = trend.in_use
            if trend.heap.beyond(GROWTH_BYTES_PER_HOUR) or (
                in_use is not None and in_use.beyond(IN_USE_BYTES_PER_HOUR)
            ):
                yield f"memory grows: {trend.line()}"
        for name, lives in self._lives.items():
            for life in lives.values():
                first, _, most = life.descriptors
                if most > first + connections + DESCRIPTOR_SLACK:
                    yield f"descriptors of {name} grew from {first} to {most}"

    def _trend(self, name: str, lives: list[_Life]) -> Trend:
        warm = [life for life in lives if life.span_s > 0.0]
        long = [life for life in warm if life.span_s >= LEAST_S]
        in_use = [life.in_use.points for life in warm]
        descriptors = [life.descriptors for life in warm] or [(0, 0, 0)]
        return Trend(
            name,
            len(lives),
            sum(life.span_s for life in warm),
            _growth([life.heap.points for life in warm], [life.heap.points for life in long]),
            _growth(in_use, [life.in_use.points for life in long]) if any(in_use) else None,
            (descriptors[0][0], descriptors[-1][1]),
            sum(life.cpu_s for life in lives),
        )


def _growth(warm: list[list[tuple[float, int]]], long: list[list[tuple[float, int]]]) -> Growth:
    """Between the ends of lives that were warm, at the pace of the long ones."""
    levels = [n_bytes for points in warm for _, n_bytes in points] or [0]
    slope, error = _slope([points for points in long if len(points) > 1])
    if error is None:
        return Growth(levels[0], levels[-1])
    return Growth(levels[0], levels[-1], slope * 3600.0, error * 3600.0)


def _slope(lives: list[list[tuple[float, int]]]) -> tuple[float, float | None]:
    """Bytes a second within lives, and the standard error, by least squares; None where a line
    meets all points because they are so few."""
    xx = xy = yy = 0.0
    freedom = -1
    for points in lives:
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        for x, y in points:
            xx += (x - mean_x) ** 2
            xy += (x - mean_x) * (y - mean_y)
            yy += (y - mean_y) ** 2
        freedom += len(points) - 1
    if freedom < 1:
        return 0.0, None
    slope = xy / xx
    return slope, math.sqrt(max(0.0, yy - slope * xy) / freedom / xx)
