"""The points of a sweep as tasks of a Ray cluster, in batches; the driver writes what comes back.

A batch that is lost with its node is run again by Ray. Points are kept by the driver as they come
(`harness.sweep.execute`), so an interrupted sweep goes on where it was, here or anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.errors import Incomplete
from harness.ray.cluster import join
from harness.sweep.evaluate import Row, evaluate
from harness.sweep.execute import Evaluated
from harness.sweep.study import Point

#: A task costs about a millisecond, a planned point a few: batches of this many make it small.
BATCH = 20
#: How often a batch whose worker or node died is run again.
RETRIES = 5
#: Batches under way for each CPU of the cluster; the rest wait here and not in Ray.
DEPTH = 2


def evaluate_batch(batch: list[Point], best: bool) -> list[list[Row]]:
    """The rows of each point, in order."""
    return [evaluate(point, best) for point in batch]


def on_ray(address: str | None) -> Evaluated:
    """Evaluates on the cluster at `address`. Raises BadInput, NotReady."""
    ray = join(address)

    def evaluated(missing: list[Point], best: bool) -> Iterator[tuple[Point, list[Row]]]:
        remote = ray.remote(evaluate_batch).options(num_cpus=1, max_retries=RETRIES)
        width = max(1, int(ray.cluster_resources().get("CPU", 1)) * DEPTH)
        waiting = [missing[at : at + BATCH] for at in range(0, len(missing), BATCH)]
        waiting.reverse()
        pending: dict[Any, list[Point]] = {}
        while waiting or pending:
            while waiting and len(pending) < width:
                batch = waiting.pop()
                pending[remote.remote(batch, best)] = batch
            (ready, *_), _ = ray.wait(list(pending), num_returns=1)
            batch = pending.pop(ready)
            try:
                rows = ray.get(ready)
            except ray.exceptions.RayTaskError:
                raise  # what the evaluation itself raised, as its own class
            except ray.exceptions.RayError as error:
                first = str(error).strip().splitlines()[0]
                raise Incomplete(
                    f"a batch of the sweep was lost {RETRIES + 1} times ({first}); what is done is "
                    "kept, and the same command goes on from there"
                ) from error
            yield from zip(batch, rows, strict=True)

    return evaluated
