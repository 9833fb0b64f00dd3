"""What each process of a soak held over time, and whether that is flat.

A process dies and is started again under its name many times, so growth is that within its lives:
one line for all of them, each with a level of its own, over samples from which a life's start is
left out. A short life does not count: what fills up once, buffers and tables with a bound, looks
there like growth without end. Memory is the heap alone; the arena of the caches is touched page by
page and shared. Of each minute the least counts: what a step needs for itself, and what the
allocator keeps of it for the next, comes and goes within seconds; a leak raises the least as well.
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
#: Growth from which memory is not flat, when it is beyond doubt.
GROWTH_BYTES_PER_HOUR = 12 << 20
DOUBT = 3.0
#: Descriptors that a life may have more of than at its first sample, beyond connections.
DESCRIPTOR_SLACK = 8
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Trend:
    """`growth` and its standard error in bytes an hour, from lives of LEAST_S and more; None where
    there is none. The heap is (the first, the last) least of a minute, descriptors are (at the
    first warm sample, at the last); `cpu_s` of all lives."""

    process: str
    lives: int
    warm_s: float
    heap_bytes: tuple[int, int]
    growth: float | None
    growth_error: float | None
    descriptors: tuple[int, int]
    cpu_s: float

    def line(self) -> str:
        if not self.warm_s:
            return f"{self.process}: {self.lives} lives, none grew warm, {self.cpu_s:.0f} s of CPU"
        first, last = self.heap_bytes
        grew = "too short to say"
        if self.growth is not None and self.growth_error is not None:
            grew = f"{self.growth / MIB:+.1f} +- {self.growth_error / MIB:.1f} MiB/h"
        return (
            f"{self.process}: {self.lives} lives, {self.warm_s:.0f} s warm, heap "
            f"{first / MIB:.0f} -> {last / MIB:.0f} MiB ({grew}), descriptors "
            f"{self.descriptors[0]} -> {self.descriptors[1]}, {self.cpu_s:.0f} s of CPU"
        )


@dataclass(slots=True)
class _Life:
    """What is kept of one: as little as can be, since the harness looks at itself too. `floors` is
    (seconds, heap bytes) of the sample with the least heap of each FLOOR_S of the warm part, which
    is from `warm_s` to `last_s`; descriptors are (at its first sample, at its last, most)."""

    began_s: float
    cpu_s: float = 0.0
    warm_s: float | None = None
    last_s: float = 0.0
    floors: list[tuple[float, int]] = field(default_factory=list)
    descriptors: tuple[int, int, int] = (0, 0, 0)
    _window: int = -1

    def note(self, at_s: float, held: Held) -> None:
        """A sample of the warm part."""
        now = held.descriptors
        first, _, most = self.descriptors
        if self.warm_s is None:
            self.warm_s = at_s
            first = now
        self.last_s = at_s
        self.descriptors = first, now, max(most, now)
        window = int((at_s - self.warm_s) // FLOOR_S)
        if window > self._window:
            self._window = window
            self.floors.append((at_s, held.heap_bytes))
        elif held.heap_bytes < self.floors[-1][1]:
            self.floors[-1] = at_s, held.heap_bytes

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
            if trend.growth is not None and trend.growth_error is not None:
                least = trend.growth - DOUBT * trend.growth_error
                if least > GROWTH_BYTES_PER_HOUR:
                    yield f"memory grows: {trend.line()}"
        for name, lives in self._lives.items():
            for life in lives.values():
                first, _, most = life.descriptors
                if most > first + connections + DESCRIPTOR_SLACK:
                    yield f"descriptors of {name} grew from {first} to {most}"

    def _trend(self, name: str, lives: list[_Life]) -> Trend:
        warm = [life for life in lives if life.span_s > 0.0]
        long = [life.floors for life in warm if life.span_s >= LEAST_S]
        growth, error = _slope(long) if long else (None, None)
        heap = [bytes_ for life in warm for _, bytes_ in life.floors] or [0]
        descriptors = [life.descriptors for life in warm] or [(0, 0, 0)]
        return Trend(
            name,
            len(lives),
            sum(life.span_s for life in warm),
            (heap[0], heap[-1]),
            None if growth is None else growth * 3600.0,
            None if error is None else error * 3600.0,
            (descriptors[0][0], descriptors[-1][1]),
            sum(life.cpu_s for life in lives),
        )


def _slope(lives: list[list[tuple[float, int]]]) -> tuple[float, float]:
    """Bytes a second within lives, and the standard error, by least squares."""
    xx = xy = yy = 0.0
    n = 0
    for points in lives:
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        for x, y in points:
            xx += (x - mean_x) ** 2
            xy += (x - mean_x) * (y - mean_y)
            yy += (y - mean_y) ** 2
        n += len(points)
    slope = xy / xx
    freedom = max(1, n - len(lives) - 1)
    return slope, math.sqrt(max(0.0, yy - slope * xy) / freedom / xx)
