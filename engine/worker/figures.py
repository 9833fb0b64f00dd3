"""What a worker says of itself when it is asked."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine.in_use import in_use_bytes

if TYPE_CHECKING:
    from engine.worker.worker import Worker


def health(worker: Worker) -> dict[str, Any]:
    """Who it is, where its data plane listens, and whether it takes work."""
    options, engine = worker.options, worker.engine
    return {
        "name": options.name,
        "cluster": options.cluster,
        "role": worker.role,
        "state": worker.state,
        "incarnation": worker.incarnation,
        "pid": os.getpid(),
        "data": {"host": options.data_host, "port": worker.courier.plane.port},
        "layout": engine.layout.layout_id,
        "vocab": engine.model.config.vocab,
        "page_tokens": options.page_tokens,
        "queue_discipline": worker.scheduler.discipline.name,
    }


def stats(worker: Worker) -> dict[str, Any]:
    """Everything a fleet or a test asks: load, occupancy, hits, overruns, bytes, memory."""
    loop, scheduler, courier = worker.loop, worker.scheduler, worker.courier
    prefixes = courier.prefixes
    groups = {
        str(group): {**asdict(figures), "hit_rate": figures.hit_rate}
        for group, figures in worker.pool.figures().items()
    }
    return {
        "state": worker.state,
        "role": worker.role,
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "max_batch": scheduler.limits.max_batch,
        "preemptions": scheduler.preemptions,
        "leases": worker.pool.leases,
        "arrivals": len(worker.arrivals),
        "expired": worker.arrivals.expired,
        "jobs": len(worker.jobs),
        "steps": loop.steps,
        "busy_s": loop.busy_s,
        "cache": groups,
        "overruns": asdict(loop.timeline.overruns),
        "requests": asdict(worker.counters),
        "sent_bytes": courier.sent_bytes,
        "received_caches": courier.received,
        "memory": {
            "in_use_bytes": in_use_bytes(),
            "plane_in_use_bytes": courier.plane.in_use_bytes,
        },
        "prefixes": {
            "in_hand": len(prefixes),
            "sent": prefixes.sent,
            "sent_bytes": prefixes.sent_bytes,
            "received": prefixes.received,
        },
    }
