"""Progress of long commands: a bar on a terminal, plain lines otherwise, with an honest estimate.

The estimate is the quartiles of the steps' times so far times the steps left: a range, given from
the third step on, and never to the second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

import rich.progress
from rich.console import Console


def estimate_s(durations_s: list[float], left: int) -> tuple[float, float] | None:
    """(low, high) seconds for `left` more steps from the quartiles of those done; None below three
    steps, where an estimate would be a guess.
    """
    if len(durations_s) < 3:
        return None
    low, _, high = statistics.quantiles(durations_s, n=4, method="inclusive")
    return low * left, high * left


def rounded(seconds: float) -> str:
    """Whole 5 s, minutes or hours, as coarse as an estimate is."""
    if seconds < 60:
        return f"{max(5, round(seconds / 5) * 5)} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def in_words(estimate: tuple[float, float] | None, left: int) -> str:
    if left == 0:
        return "done"
    if estimate is None:
        return f"{left} left"
    low, high = map(rounded, estimate)
    return f"about {low} left" if low == high else f"{low} to {high} left"


class Progress:
    """`total` steps of one command, on standard error so that output stays clean: a bar on a
    terminal, elsewhere a line a step, at most one every `every_s`.
    """

    def __init__(
        self,
        name: str,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = 10.0,
    ) -> None:
        self._name, self._total = name, total
        self._stream = stream or sys.stderr
        self._clock = clock
        self._every_s = every_s
        self._durations_s: list[float] = []
        self._step_s = clock()
        self._printed_s = float("-inf")
        self._bar: rich.progress.Progress | None = None

    def advance(self, what: str = "") -> None:
        """One more step is done; `what` names it."""
        now = self._clock()
        self._durations_s.append(now - self._step_s)
        self._step_s = now
        done = len(self._durations_s)
        left = max(0, self._total - done)
        text = f"{self._name} {done}/{self._total}"
        if what:
            text += f" {what}"
        text += f", {in_words(estimate_s(self._durations_s, left), left)}"
        if self._bar is not None:
            self._bar.update(rich.progress.TaskID(0), completed=done, description=text)
        elif now - self._printed_s >= self._every_s or left == 0:
            self._printed_s = now
            self._stream.write(text + "\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("{task.description}", markup=False),
                console=Console(file=self._stream),
            )
            self._bar.add_task(f"{self._name} 0/{self._total}", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
