"""What goes wrong in one campaign, as data: a seed draws a plan, a plan replays exactly.

Times are virtual seconds from the start. Every fault ends: what it broke is whole again at
`end_s`, so that progress after the last one can be demanded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from engine.disciplines import DISCIPLINES

#: Faults begin within this span, requests arrive within it.
SPAN_S = 4.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s`: when it begins; `for_s`: how long it lasts (0: a moment)."""

    at_s: float
    for_s: float = 0.0
    kind: ClassVar[str] = ""

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s

    def tell(self) -> str:
        """One line of the story."""
        lasts = f" for {self.for_s:.2f} s" if self.for_s else ""
        return f"at {self.at_s:.2f} s {self.kind}{self._detail()}{lasts}"

    def _detail(self) -> str:
        return ""

    def milder(self) -> list[Fault]:
        """Simpler versions of itself, for the search of a small failing plan."""
        return [replace(self, for_s=self.for_s / 2)] if self.for_s > 0.1 else []


@dataclass(frozen=True, slots=True)
class _OfInstance(Fault):
    instance: str = ""

    def _detail(self) -> str:
        return f" of {self.instance}"


@dataclass(frozen=True, slots=True)
class Crash(_OfInstance):
    """The worker and its data plane die; it is started again, empty, after `for_s`."""

    kind: ClassVar[str] = "crash"


@dataclass(frozen=True, slots=True)
class Slow(_OfInstance):
    """Computing takes `factor` times as long."""

    factor: float = 5.0
    kind: ClassVar[str] = "slowdown"


@dataclass(frozen=True, slots=True)
class Pause(_OfInstance):
    """The worker process is stopped (SIGSTOP); its data plane notices and falls silent."""

    kind: ClassVar[str] = "pause"


@dataclass(frozen=True, slots=True)
class Pressure(_OfInstance):
    """Somebody else holds `share` of the pages that are free."""

    share: float = 0.8
    kind: ClassVar[str] = "memory pressure"


@dataclass(frozen=True, slots=True)
class Outage(Fault):
    """Nothing crosses the link; connections stay up and stall."""

    kind: ClassVar[str] = "link outage"


@dataclass(frozen=True, slots=True)
class Flap(Fault):
    """The link goes down and up `times` times, connections breaking each time."""

    times: int = 3
    kind: ClassVar[str] = "link flap"


@dataclass(frozen=True, slots=True)
class Collapse(Fault):
    """The link's rate is divided by `factor`."""

    factor: float = 50.0
    kind: ClassVar[str] = "rate collapse"


@dataclass(frozen=True, slots=True)
class Loss(Fault):
    """A frame on the link is held up by a retransmission with this `probability`."""

    probability: float = 0.2
    kind: ClassVar[str] = "packet loss"


@dataclass(frozen=True, slots=True)
class Noise(Fault):
    """Per frame, everywhere: probabilities of a flipped bit, of doubling, of the connection
    breaking under it."""

    damage: float = 0.02
    double: float = 0.05
    cut: float = 0.02
    kind: ClassVar[str] = "wire noise"


@dataclass(frozen=True, slots=True)
class DirectoryNoise(Fault):
    """Events of cache pools are lost, doubled or late with these probabilities."""

    lost: float = 0.4
    doubled: float = 0.3
    late: float = 0.3
    kind: ClassVar[str] = "directory noise"


@dataclass(frozen=True, slots=True)
class Cancel(Fault):
    """The clients of `count` requests in flight leave."""

    count: int = 2
    kind: ClassVar[str] = "cancellation"


@dataclass(frozen=True, slots=True)
class Convert(_OfInstance):
    """The instance drains and changes its role, while transfers to and from it are under way."""

    kind: ClassVar[str] = "conversion"


@dataclass(frozen=True, slots=True)
class CrashInConversion(_OfInstance):
    """The instance is converted, and dies `after_s` after it took its new role, before anybody
    counts on it; or at half time, where it still drains or nobody converts it. It is started again
    at the end."""

    after_s: float = 0.1
    kind: ClassVar[str] = "crash in conversion"


@dataclass(frozen=True, slots=True)
class RouterRestart(Fault):
    """The router ends with all it had in hand, and starts again knowing nothing."""

    kind: ClassVar[str] = "router restart"


@dataclass(frozen=True, slots=True)
class Burst(Fault):
    """`count` further requests at once."""

    count: int = 8
    kind: ClassVar[str] = "burst"


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a campaign depends on. `pages` and `slots` are those of each worker."""

    seed: int
    policy: str
    n_prfaas: int
    n_prefill: int
    n_decode: int
    n_requests: int
    pages: int
    slots: int
    rate_bps: float
    discipline: str
    faults: tuple[Fault, ...]

    @property
    def healed_s(self) -> float:
        """When the last fault is over and the last request of the load has arrived."""
        return max((SPAN_S, *(fault.end_s for fault in self.faults)))


def draw(seed: int) -> Plan:
    """The plan of a seed. One in sixteen has no faults at all, to check the peace."""
    dice = random.Random(seed)
    n_prfaas, n_prefill = dice.choice([(1, 1), (2, 1), (2, 1), (1, 2)])
    n_decode = dice.choice([2, 2, 3])
    names = [f"prfaas-{i}" for i in range(n_prfaas)]
    names += [f"pd-{i}" for i in range(n_prefill + n_decode)]
    n_faults = 0 if dice.random() < 1 / 16 else dice.randint(1, 7)
    faults = [dice.choice(_DRAWN)(dice, names) for _ in range(n_faults)]
    return Plan(
        seed=seed,
        policy=dice.choice(["prfaas", "prfaas", "prfaas", "naive", "balanced", "homogeneous"]),
        n_prfaas=n_prfaas,
        n_prefill=n_prefill,
        n_decode=n_decode,
        n_requests=dice.randint(8, 16),
        pages=dice.choice([24, 40, 80]),
        slots=dice.choice([4, 6, 12]),
        rate_bps=dice.choice([1e5, 4e5, 4e6]),
        discipline=dice.choice(DISCIPLINES),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _at(dice: random.Random) -> float:
    return round(dice.uniform(0.05, SPAN_S), 3)


def _span(dice: random.Random, most_s: float) -> float:
    return round(dice.uniform(0.05, most_s), 3)


#: Each draws one fault of its kind. Spans straddle the deadlines of the protocol (1 to 2 s).
_DRAWN: tuple[Callable[[random.Random, list[str]], Fault], ...] = (
    lambda dice, names: Crash(_at(dice), _span(dice, 3.0), dice.choice(names)),
    lambda dice, names: Crash(_at(dice), _span(dice, 0.5), dice.choice(names)),
    lambda dice, names: Slow(
        _at(dice), _span(dice, 3.0), dice.choice(names), dice.choice([3.0, 20.0])
    ),
    lambda dice, names: Pause(_at(dice), _span(dice, 4.0), dice.choice(names)),
    lambda dice, names: Pressure(
        _at(dice), _span(dice, 3.0), dice.choice(names), dice.choice([0.5, 0.9, 1.0])
    ),
    lambda dice, names: Outage(_at(dice), _span(dice, 3.0)),
    lambda dice, names: Flap(_at(dice), _span(dice, 2.0), dice.randint(2, 5)),
    lambda dice, names: Collapse(_at(dice), _span(dice, 3.0), dice.choice([10.0, 100.0])),
    lambda dice, names: Loss(_at(dice), _span(dice, 3.0), dice.choice([0.05, 0.3])),
    lambda dice, names: Noise(_at(dice), _span(dice, 3.0), 0.03, 0.1, 0.03),
    lambda dice, names: Noise(_at(dice), _span(dice, 3.0), 0.15, 0.0, 0.0),
    lambda dice, names: DirectoryNoise(_at(dice), _span(dice, 4.0)),
    lambda dice, names: Cancel(_at(dice), 0.0, dice.randint(1, 4)),
    lambda dice, names: Convert(
        _at(dice), 0.0, dice.choice([name for name in names if name.startswith("pd")])
    ),
    lambda dice, names: CrashInConversion(
        _at(dice),
        round(dice.uniform(0.5, 4.0), 3),
        dice.choice([name for name in names if name.startswith("pd")]),
        round(dice.uniform(0.0, 0.2), 3),
    ),
    lambda dice, names: RouterRestart(_at(dice)),
    lambda dice, names: Burst(_at(dice), 0.0, dice.randint(4, 12)),
)
