"""In which order an instance takes waiting prompts.

A discipline ranks a prompt once, by a number that does not depend on when it is asked: waiting
prompts age at the same speed, so their order never changes while they wait. Least first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Discipline(Protocol):
    """`preempts`: a better-ranked arrival takes over at the next chunk boundary."""

    @property
    def name(self) -> str: ...

    @property
    def preempts(self) -> bool: ...

    def rank(self, enqueued_s: float, work_s: float) -> float:
        """Rank of a prompt that came at `enqueued_s` and still needs `work_s` of prefill."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """In order of arrival; never preempts."""

    name: str = "fifo"
    preempts: bool = False

    def rank(self, enqueued_s: float, work_s: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """Least remaining work first. Each second of waiting counts as `ageing` seconds less work, so a
    prompt of w seconds can be overtaken for at most about w / ageing seconds."""

    ageing: float = 0.1
    preempts: bool = True
    name: str = "shortest-first"

    def rank(self, enqueued_s: float, work_s: float) -> float:
        return work_s + self.ageing * enqueued_s


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """Least slack first: time until the TTFT objective minus the work that is left."""

    ttft_s: float = 10.0
    preempts: bool = True
    name: str = "least-slack"

    def rank(self, enqueued_s: float, work_s: float) -> float:
        return enqueued_s + self.ttft_s - work_s


def make_discipline(name: str, ageing: float, ttft_s: float) -> Discipline:
    """By name; `ageing` is shortest-first's, `ttft_s` (the objective) least-slack's."""
    match name:
        case "fifo":
            return Fifo()
        case "shortest-first":
            return ShortestFirst(ageing)
        case "least-slack":
            return LeastSlack(ttft_s)
        case _:
            raise ValueError(f"no queue discipline {name!r}")
