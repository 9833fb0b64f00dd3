"""Simulated capacity of the paper's four configurations against the planner's `work` reading.

Each seed is one simulated hour of overload a configuration, as in the capacity phase of
`prfaas run paper`. Exit code 1 when a mean is further than 1 % from the reading.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from harness.execution import execute
from harness.experiment import load_experiment

AGREES = 0.01
#: Nothing but the capacity phase; the latency phase, which every run has, as short as can be.
CAPACITY_ONLY = {
    "mode": "simulate",
    "measure.load_fractions": [],
    "measure.unloaded": False,
    "measure.slo_search": False,
    "measure.latency_warmup_s": 0,
    "measure.latency_window_s": 60,
}


@dataclass(frozen=True, slots=True)
class Agreement:
    """Requests/s of one configuration: `simulated` by seed, and what `work` says."""

    configuration: str
    simulated: tuple[float, ...]
    work: float

    @property
    def mean(self) -> float:
        return fmean(self.simulated)

    @property
    def difference(self) -> float:
        return self.mean / self.work - 1


def measure(seeds: Iterable[int]) -> list[Agreement]:
    found: dict[str, tuple[list[float], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            experiment = load_experiment("paper", {**CAPACITY_ONLY, "seed": seed})
            done = execute(experiment, Path(folder), "capacity")
            for each in done.summary.configurations:
                simulated, work = each.capacity.paper, each.capacity.predicted
                assert simulated is not None and work is not None
                found.setdefault(each.name, ([], work))[0].append(simulated)
    return [Agreement(name, tuple(simulated), work) for name, (simulated, work) in found.items()]


def report(agreements: list[Agreement]) -> str:
    lines = [f"{'configuration':<15}{'simulated':>11}{'least':>8}{'most':>8}{'work':>8}{'diff':>9}"]
    lines += [
        f"{each.configuration:<15}{each.mean:>11.3f}{min(each.simulated):>8.3f}"
        f"{max(each.simulated):>8.3f}{each.work:>8.3f}{each.difference:>+9.2%}"
        for each in agreements
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs, seeded 1, 2, ... (default: 5)")
    agreements = measure(range(1, parser.parse_args().seeds + 1))
    print(report(agreements))
    return int(any(abs(each.difference) > AGREES for each in agreements))


if __name__ == "__main__":
    raise SystemExit(main())
