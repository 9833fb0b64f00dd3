"""The requests of a campaign: conversations that share prefixes, within and across tenants."""

from __future__ import annotations

import random
from dataclasses import replace

from harness.chaos.content import PAGE_TOKENS
from harness.chaos.faults import SPAN_S, Burst, Plan
from workloads.request import Request

TENANTS = ("ann", "bob")
#: Probes are sent so long after the last fault, one every `PROBE_EVERY_S`.
GRACE_S = 6.0
PROBES = 4
PROBE_EVERY_S = 0.4


def load_of(plan: Plan) -> list[Request]:
    """In order of arrival. Ids count from 0; the same prefixes turn up for every tenant."""
    dice = random.Random(plan.seed * 2 + 1)
    arrivals = [round(dice.uniform(0.0, SPAN_S), 3) for _ in range(plan.n_requests)]
    for fault in plan.faults:
        if isinstance(fault, Burst):
            arrivals += [fault.at_s] * fault.count
    requests = [_request(dice, at_s) for at_s in arrivals]
    requests.sort(key=lambda request: request.arrival_s)
    return [replace(request, id=number) for number, request in enumerate(requests)]


def probes_of(plan: Plan, first_id: int) -> list[Request]:
    """After everything is whole again: these must succeed, over one cluster or two."""
    dice = random.Random(plan.seed * 2 + 2)
    return [
        replace(_request(dice, plan.healed_s + GRACE_S + n * PROBE_EVERY_S), id=first_id + n)
        for n in range(PROBES)
    ]


def _request(dice: random.Random, at_s: float) -> Request:
    family = dice.randrange(3)
    shared = dice.randint(0, 6)
    own = dice.randint(0, 3)
    unique = dice.getrandbits(30)
    blocks = [family * 100 + depth + 1 for depth in range(shared)]
    blocks += [1000 + unique + depth for depth in range(own)]
    tail = dice.randint(0 if blocks else 1, PAGE_TOKENS - 1)
    input_tokens = len(blocks) * PAGE_TOKENS + tail
    if tail:
        blocks.append(2000 + unique)
    return Request(
        id=0,
        arrival_s=at_s,
        input_tokens=input_tokens,
        output_tokens=dice.randint(1, 6),
        block_ids=tuple(blocks),
        block_tokens=PAGE_TOKENS,
        tenant=dice.choice(TENANTS),
    )
