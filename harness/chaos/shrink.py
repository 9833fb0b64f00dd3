"""Makes a failing plan small: fewer faults, milder ones, fewer requests, the same breach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from harness.chaos.campaign import Outcome, run_plan
from harness.chaos.faults import Plan

#: Campaigns that a search may run.
MAX_RUNS = 200


def shrink(outcome: Outcome, run: Callable[[Plan], Outcome] = run_plan) -> Outcome:
    """The smallest plan found that breaks the invariant which `outcome` broke first.

    Greedy: each simplification that keeps the breach is kept, until none does or `MAX_RUNS` are
    spent. The plan's seed stays, so the requests that are left are the same ones.
    """
    name = outcome.violations[0].name
    runs = 0
    while True:
        for plan in _simpler(outcome.plan):
            if runs == MAX_RUNS:
                return outcome
            runs += 1
            found = run(plan)
            if found.broke(name):
                outcome = found
                break
        else:
            return outcome


def _simpler(plan: Plan) -> Iterator[Plan]:
    """One step simpler each, the boldest first."""
    faults = plan.faults
    half = len(faults) // 2
    if half:
        yield replace(plan, faults=faults[:half])
        yield replace(plan, faults=faults[half:])
    for index in range(len(faults)):
        yield replace(plan, faults=faults[:index] + faults[index + 1 :])
    if plan.n_requests > 1:
        yield replace(plan, n_requests=plan.n_requests // 2)
        yield replace(plan, n_requests=plan.n_requests - 1)
    for index, fault in enumerate(faults):
        for milder in fault.milder():
            yield replace(plan, faults=(*faults[:index], milder, *faults[index + 1 :]))
