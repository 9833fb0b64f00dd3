"""What must hold of a campaign, each a small named check over the evidence.

A check yields one line for each breach. Some breaches are seen the moment they happen and come with
a name of their own: `wrong cache` (a byte that attention or the recurrence is about to read is not
the right one: part of a cache, another tenant's, freed, of another prompt), `source memory` and
`step memory` (memory changed or went while it was in use), `worker loop`, `worker error`,
`control plane` (an exception that nobody expected), `routing` (work was given to a worker that is
known to be dead).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from harness.chaos.content import right_tokens
from harness.chaos.faults import Plan
from harness.chaos.system import RETRY, System
from harness.ports import Role
from harness.replay import ReplayCounts
from results.records import RequestRecord, Status
from workloads.request import Request


@dataclass(slots=True)
class Evidence:
    """What a campaign left: its requests (probes among them), their records, and the system."""

    plan: Plan
    system: System
    requests: dict[int, Request] = field(default_factory=dict)
    probes: set[int] = field(default_factory=set)
    records: list[RequestRecord] = field(default_factory=list)
    counts: list[ReplayCounts] = field(default_factory=list)


def each_request_ends_once(evidence: Evidence) -> Iterator[str]:
    """One record for each request, succeeded or failed for a stated reason."""
    seen = Counter(record.id for record in evidence.records)
    for request_id in evidence.requests:
        if seen[request_id] != 1:
            yield f"request {request_id} ended {seen[request_id]} times"
    for record in evidence.records:
        if record.status is Status.FAILED and not record.failure:
            yield f"request {record.id} failed without a reason"
        elif record.status not in (Status.FAILED, Status.SUCCEEDED):
            yield f"request {record.id} ended {record.status}"


def tokens_are_right(evidence: Evidence) -> Iterator[str]:
    """A request that succeeded has the tokens of one engine alone, all of them."""
    for record in evidence.records:
        if record.status is not Status.SUCCEEDED:
            continue
        request = evidence.requests[record.id]
        if record.token_ids != right_tokens(request, evidence.plan.seed):
            yield f"request {record.id}: {record.token_ids}"
        if record.tokens_received != request.output_tokens:
            yield f"request {record.id}: {record.tokens_received} tokens counted"


def peace_fails_nothing(evidence: Evidence) -> Iterator[str]:
    """Without faults every request succeeds at its first attempt."""
    if evidence.plan.faults:
        return
    for record in evidence.records:
        if record.status is not Status.SUCCEEDED or record.attempts != 1:
            how = record.failure or "succeeded"
            yield f"request {record.id}: {record.attempts} attempts, {how}"


def service_recovers(evidence: Evidence) -> Iterator[str]:
    """Requests sent a bounded time after the last fault succeed."""
    for record in evidence.records:
        if record.id in evidence.probes and record.status is not Status.SUCCEEDED:
            yield f"probe {record.id}: {record.failure}"


def attempts_are_counted(evidence: Evidence) -> Iterator[str]:
    """An attempt is one routing, and there are no more than the rules allow: losses excuse
    attempts, and returns are waited for."""
    system = evidence.system
    most = RETRY.max_attempts + 2 * system.losses + system.conversions
    for record in evidence.records:
        routings = system.routings.get(record.id, 0)
        if record.attempts != routings:
            yield f"request {record.id}: {record.attempts} attempts, routed {routings} times"
        if record.attempts > most:
            yield f"request {record.id}: {record.attempts} attempts"


def memory_comes_back(evidence: Evidence) -> Iterator[str]:
    """At rest every page and slot is free or cached, and none is pinned."""
    for name, worker in evidence.system.workers.items():
        for group, figures in worker.pool.figures().items():
            if figures.owned or figures.pinned:
                yield f"{name}: {figures.owned} of {group} owned, {figures.pinned} pinned"
        if worker.pool.leases:
            yield f"{name}: {worker.pool.leases} leases"


def workers_are_idle(evidence: Evidence) -> Iterator[str]:
    """At rest no worker has a job, a sequence, an arrived cache or an open parcel."""
    for name, worker in evidence.system.workers.items():
        left = {
            "jobs": len(worker.jobs),
            "sequences": len(worker.scheduler),
            "arrivals": len(worker.arrivals),
            "inbound": len(worker.courier._inbound),
        }
        for what, count in left.items():
            if count:
                yield f"{name}: {count} {what}"
        if worker.state != "ready":
            yield f"{name} is {worker.state}"


def transfers_are_over(evidence: Evidence) -> Iterator[str]:
    """At rest neither end has a transfer, a byte that was not acknowledged, or a lease."""
    for name, worker in evidence.system.workers.items():
        plane = worker.plane
        if plane.receiver.active or plane.reservations or plane.landing.destinations:
            yield f"{name}: {plane.receiver.active} arriving"
        if plane._transfers:
            yield f"{name}: {len(plane._transfers)} sending"
        for session in plane.sessions.values():
            sender = session.sender
            if sender.active or sender.backlog_bytes:
                yield f"{name} to {session.peer.host}: {sender.backlog_bytes} bytes left"


def bytes_add_up(evidence: Evidence) -> Iterator[str]:
    """Sent = received + lost + in flight; what records claim was really sent."""
    system = evidence.system
    books, flying = system.books, system.switch.flying
    if books.sent != books.received + books.lost + flying:
        yield (
            f"{books.sent} sent, {books.received} received, {books.lost} lost, {flying} in flight"
        )
    claimed = sum(
        record.wire_bytes for record in evidence.records if record.status is Status.SUCCEEDED
    )
    if claimed > books.sent:
        yield f"records claim {claimed} bytes of {books.sent}"


def accounts_return_to_zero(evidence: Evidence) -> Iterator[str]:
    """At rest the router has promised no work and no bytes."""
    view = evidence.system.view
    for pool in view.prefill.values():
        for name, queued in zip(pool.names, pool.queued, strict=True):
            if queued:
                yield f"{name}: {queued} queued"
    for decode in view.decode.values():
        for key, name in enumerate(decode.names):
            if decode.active(key):
                yield f"{name}: {decode.active(key)} active"
    for pair, path in view._paths.items():
        if abs(path.outstanding_bytes) > 1e-3:
            yield f"{pair}: {path.outstanding_bytes} bytes promised"


def everyone_serves(evidence: Evidence) -> Iterator[str]:
    """Each worker is usable in the pool of the role that it has, and in no other."""
    system = evidence.system
    for spec in system.specs:
        worker = system.workers.get(spec.name)
        if worker is None:
            yield f"{spec.name} was not started again"
            continue
        pools = {
            Role.PREFILL: system.view.prefill.get(spec.cluster),
            Role.DECODE: system.view.decode.get(spec.cluster),
        }
        usable = [
            role
            for role, pool in pools.items()
            if pool is not None and spec.name in pool.key_of and pool.usable(pool.key_of[spec.name])
        ]
        if usable != [Role(worker.role)]:
            yield f"{spec.name} does {worker.role}, is used for {', '.join(usable) or 'nothing'}"


def counts_add_up(evidence: Evidence) -> Iterator[str]:
    """offered = succeeded + failed + unsent, and the records say the same."""
    succeeded = sum(record.status is Status.SUCCEEDED for record in evidence.records)
    for counts in evidence.counts:
        if counts.offered != counts.succeeded + counts.failed + counts.unsent:
            yield f"{counts}"
    if sum(counts.succeeded for counts in evidence.counts) != succeeded:
        yield f"{succeeded} records succeeded, counted {evidence.counts}"


def times_are_in_order(evidence: Evidence) -> Iterator[str]:
    """A request's events happen in the order of its life."""
    for record in evidence.records:
        if record.status is not Status.SUCCEEDED:
            continue
        times = [
            record.scheduled_s,
            record.sent_s,
            record.prefill_started_s,
            record.prefill_finished_s,
            record.delivered_s,
            record.admitted_s,
            record.first_token_s,
            record.last_token_s,
            record.ended_s,
        ]
        known = [time_s for time_s in times if time_s is not None]
        if len(known) != len(times) or any(b < a - 1e-9 for a, b in pairwise(known)):
            yield f"request {record.id}: {times}"


#: Name -> check. All are made when a campaign has come to rest.
CHECKS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    check.__name__.replace("_", " "): check
    for check in (
        each_request_ends_once,
        tokens_are_right,
        peace_fails_nothing,
        service_recovers,
        attempts_are_counted,
        memory_comes_back,
        workers_are_idle,
        transfers_are_over,
        bytes_add_up,
        accounts_return_to_zero,
        everyone_serves,
        counts_add_up,
        times_are_in_order,
    )
}
