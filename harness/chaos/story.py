"""Tells a campaign: the plan, what happened when, and what was broken."""

from __future__ import annotations

from collections.abc import Iterator

from harness.chaos.campaign import Outcome

_SHOWN = 500


def tell(outcome: Outcome) -> Iterator[str]:
    """Lines for a terminal."""
    plan = outcome.plan
    yield (
        f"seed {plan.seed}: policy {plan.policy}, {plan.n_prfaas} remote prefill, "
        f"{plan.n_prefill} local prefill and {plan.n_decode} decode workers of {plan.pages} pages "
        f"and {plan.slots} states, queues {plan.discipline}; {plan.n_requests} requests"
    )
    yield f"faults: {len(plan.faults) or 'none'}"
    for fault in plan.faults:
        yield f"  {fault.tell()}"
    yield "what happened:"
    for at_s, what in outcome.story:
        lines = what.splitlines()
        yield f"  {at_s:8.3f} s  {lines[0][:_SHOWN]}"
        for line in lines[1:]:
            yield f"              {line[:_SHOWN]}"
    broken = {violation.name: None for violation in outcome.violations}
    yield f"broken: {', '.join(broken) or 'nothing'}"
