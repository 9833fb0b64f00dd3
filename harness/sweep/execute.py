"""Runs a study on all cores and writes one dataset. What is done is kept: a rerun goes on.

Each finished point is a JSON file named after everything that its figures depend on (see
`harness.sweep.identity`). A rerun takes the points whose files are there and computes the others.
The dataset has the points in order, whatever the order in which they ended, so equal studies give
equal bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from harness.control import check_control
from harness.errors import BadInput
from harness.passed_over import passed_over
from harness.planner.model import check_decodes
from harness.processes import process_pool
from harness.profiles import load_profile
from harness.sweep.evaluate import Row, as_record, evaluate
from harness.sweep.identity import identity
from harness.sweep.study import Point, Study, points
from results.whole import write_whole

DATASET = "sweep.parquet"
FORMAT = 1

#: (points done, points in all, index of the one that ended, taken from an earlier run)
Progress = Callable[[int, int, int, bool], None]

#: Evaluates points (the second argument: search threshold and split anew), as they end.
Evaluated = Callable[[list[Point], bool], Iterator[tuple[Point, list[Row]]]]

_TEXT = {"configuration", "phase", "bottleneck"}
_WHOLE = {"n_prfaas", "n_prefill", "n_decode", "decode_batch"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The dataset's path, its rows, and how many points were computed now and taken as done."""

    dataset: Path
    records: list[dict[str, Any]]
    computed: int
    resumed: int
    #: What points set that their mode does not know.
    notes: tuple[str, ...]


def execute(
    study: Study,
    directory: Path,
    jobs: int,
    progress: Progress = lambda *_: None,
    evaluated: Evaluated | None = None,
) -> Outcome:
    """Evaluate every point of `study` with `jobs` processes into `directory`; `evaluated` does it
    elsewhere.

    Raises BadInput before anything runs when a point is not a valid experiment, or nothing can be
    written to `directory`.
    KeyboardInterrupt, or Incomplete when a process died, leaves the finished points, which the next
    call takes up.
    """
    for name in study.axis_names():
        if name.startswith("emulate."):
            raise BadInput(f"axis {name}: says nothing to a sweep, which never emulates")
    todo = points(study)
    axis_types = {
        name: _axis_type(name, [dict(point.settings)[name] for point in todo])
        for name in study.axis_names()
    }
    files = {point.index: _file_name(point, study.best) for point in todo}
    for local in {point.experiment.profiles.pd for point in todo}:
        check_decodes(load_profile(local))
    for point in todo:
        check_control(point.experiment)
        if point.experiment.measure.flow_rates:
            raise BadInput("measure.flow_rates: a sweep writes no table of flows; leave it out")
    parts = directory / "points"
    asked = tomli_w.dumps(study.model_dump(mode="json", exclude_none=True))
    try:
        parts.mkdir(parents=True, exist_ok=True)
        write_whole(directory / "study.toml", asked)
    except OSError as error:
        raise BadInput(f"{directory}: the dataset cannot be put there: {error.strerror}") from None
    results: dict[int, list[dict[str, Any]]] = {}
    missing = []
    for point in todo:
        kept = _read(parts / files[point.index])
        if kept is None:
            missing.append(point)
        else:
            results[point.index] = kept
            progress(len(results), len(todo), point.index, True)
    resumed = len(results)
    finished = (
        _evaluated(missing, study.best, jobs)
        if evaluated is None
        else evaluated(missing, study.best)
    )
    for point, rows in finished:
        records = [as_record(row) for row in rows]
        write_whole(parts / files[point.index], json.dumps(records))
        results[point.index] = records
        progress(len(results), len(todo), point.index, False)
    records = [
        {"study": study.name, "mode": study.mode, "point": point.index}
        | dict(point.settings)
        | record
        for point in todo
        for record in results[point.index]
    ]
    dataset = directory / DATASET
    write_whole(dataset, _parquet(axis_types, records))
    notes = dict.fromkeys(
        line for point in todo for line in passed_over(point.experiment, study.mode)
    )
    return Outcome(dataset, records, len(missing), resumed, tuple(notes))


def _evaluated(missing: list[Point], best: bool, jobs: int) -> Iterator[tuple[Point, list[Row]]]:
    """Points with their rows, as they end. One process does without a pool."""
    if jobs <= 1 or len(missing) <= 1:
        for point in missing:
            yield point, evaluate(point, best)
        return
    with process_pool(min(jobs, len(missing))) as pool:
        pending: dict[Future[list[Row]], Point] = {
            pool.submit(evaluate, point, best): point for point in missing
        }
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future), future.result()


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _file_name(point: Point, best: bool) -> str:
    return f"{identity(point, best)}.json"


def _read(path: Path) -> list[dict[str, Any]] | None:
    """The records of a finished point; None when there are none, or the file is cut short."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return records if isinstance(records, list) else None


def _parquet(axis_types: dict[str, pa.DataType], records: list[dict[str, Any]]) -> bytes:
    fields = []
    for name in records[0]:
        if name in axis_types:
            fields.append(pa.field(name, axis_types[name]))
        elif name in _TEXT or name in ("study", "mode"):
            fields.append(pa.field(name, pa.string()))
        elif name in _WHOLE or name == "point":
            fields.append(pa.field(name, pa.int64()))
        else:
            fields.append(pa.field(name, pa.float64()))
    schema = pa.schema(fields, metadata={"prfaas.sweep_format": str(FORMAT)})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records, schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _axis_type(name: str, values: list[Any]) -> pa.DataType:
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    if kinds <= {int, float}:
        return pa.float64()
    if kinds == {str}:
        return pa.string()
    raise BadInput(f"axis {name}: its values must be all numbers, all strings or all booleans")
