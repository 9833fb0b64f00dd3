"""In which order an instance takes waiting prompts: one rule for the engine and for its models.

A discipline ranks a prompt by a number that does not depend on when it is asked: waiting prompts
age at the same speed, so their order never changes while they wait. Least first; equal ranks first
come, first served. Work that is done of a prompt may make its rank better and never makes it worse:
of two with the same slack the one in hand would fall behind with each chunk, and they took turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Discipline(Protocol):
    """`preempts`: who is ranked better takes over where a chunk of the prompt in hand ends."""

    @property
    def name(self) -> str: ...

    @property
    def preempts(self) -> bool: ...

    def rank(self, arrived_s: float, work_s: float) -> float:
        """Rank of a prompt that arrived at `arrived_s` and still needs `work_s` of prefill."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """In order of arrival at the instance; never preempts."""

    name: str = "fifo"
    preempts: bool = False

    def rank(self, arrived_s: float, work_s: float) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """Least remaining work first. Each second since its arrival counts as `ageing` seconds less
    work, so nothing that arrives more than w / ageing seconds after a prompt of w passes it."""

    ageing: float = 0.1
    preempts: bool = True
    name: str = "shortest-first"

    def rank(self, arrived_s: float, work_s: float) -> float:
        return work_s + self.ageing * arrived_s


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """Least slack first: time until the TTFT objective minus the work that is left."""

    ttft_s: float = 10.0
    preempts: bool = True
    name: str = "least-slack"

    def rank(self, arrived_s: float, work_s: float) -> float:
        return arrived_s + self.ttft_s - work_s


FIFO = Fifo()
DISCIPLINES = ("fifo", "shortest-first", "least-slack")


def make_discipline(name: str, ageing: float, ttft_s: float) -> Discipline:
    """By name; `ageing` is shortest-first's, `ttft_s` (the objective) least-slack's."""
    match name:
        case "fifo":
            return FIFO
        case "shortest-first":
            return ShortestFirst(ageing)
        case "least-slack":
            return LeastSlack(ttft_s)
        case _:
            raise ValueError(f"no queue discipline {name!r}; {', '.join(DISCIPLINES)} would do")


def even_chunk(left: float, most: float) -> float:
    """The next chunk of `left` tokens that are cut into as few as chunks of `most` can be, all of
    one size: a chunk of a few tokens would cost a step and not be worth a change of prompts."""
    return left / math.ceil(left / most)
