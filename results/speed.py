"""`python -m results.speed`: what recording costs, what it takes on disk, what reading back takes.

Prints each figure for many requests of 1,024 output tokens: regular steps, as the simulator makes
them, and measured ones, a time a token.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from results.recorder import Recorder
from results.records import RequestRecord, Status, TokenRun
from results.rows import DecisionRow

TOKENS = 1024
#: Files that hold when tokens came.
_TIMES = ("tokens", "gaps")

#: The `q` quantile of all gaps between tokens, over evenly spaced runs.
RUNS_SQL = """
with runs as (select unnest(runs, recursive := true) from '{tokens}'),
     gaps as (select span_us / (n - 1) as gap_us, sum(n - 1) as weight
              from runs where n > 1 group by all),
     ranked as (select gap_us, sum(weight) over (order by gap_us) as below,
                       sum(weight) over () as total from gaps)
select min(gap_us) from ranked where below >= {q} * total
"""
#: The same over measured gaps, which gaps.parquet has counted.
GAPS_SQL = """
with counted as (select gap_us, sum(tokens) as weight from '{gaps}' group by all),
     ranked as (select gap_us, sum(weight) over (order by gap_us) as below,
                       sum(weight) over () as total from counted)
select min(gap_us) from ranked where below >= {q} * total
"""
#: The same over one gap a token, for what a chosen part of the requests needs.
EACH_SQL = """
with counted as (select gap_us, count(*) as weight
                 from (select unnest(gaps_us) as gap_us from '{tokens}') group by all),
     ranked as (select gap_us, sum(weight) over (order by gap_us) as below,
                       sum(weight) over () as total from counted)
select min(gap_us) from ranked where below >= {q} * total
"""


def _record(ident: int, rng: np.random.Generator, runs: list[TokenRun]) -> RequestRecord:
    made = RequestRecord(ident, 0.3 * ident, int(rng.integers(128, 131_072)), TOKENS)
    made.sent_s, made.status, made.attempts = made.scheduled_s, Status.SUCCEEDED, 1
    made.prefill_cluster = "prfaas" if ident % 2 else "pd"
    made.prefill_instance, made.decode_instance = f"prefill-{ident % 7}", f"decode-{ident % 5}"
    made.prefill_started_s = made.scheduled_s + float(rng.exponential(0.3))
    made.prefill_finished_s = made.prefill_started_s + float(rng.exponential(2.0))
    made.delivered_s = made.prefill_finished_s + 0.1
    made.admitted_s = made.first_token_s = made.delivered_s + 0.001
    made.token_runs = [(made.first_token_s + at, step, n) for at, step, n in runs]
    start_s, step_s, count = made.token_runs[-1]
    made.last_token_s = made.ended_s = start_s + step_s * (count - 1)
    made.tokens_received, made.wire_bytes = TOKENS, 1_000_000 + ident
    return made


def _write(directory: Path, records: Iterator[RequestRecord], decisions: bool) -> float:
    """CPU seconds inside the recorder; making the records is apart."""
    recorder = Recorder(directory, {"seed": "1"})
    spent = 0.0
    batch: list[RequestRecord] = []

    def flush() -> float:
        rows = [
            DecisionRow(r.id, 1, r.scheduled_s, r.input_tokens, 0, 0, 19_400.0, r.prefill_cluster,
                        r.prefill_instance, r.decode_instance, 3.0, 0.1, 3, 0.1, 0.0, "longer")
            for r in batch
        ] if decisions else []  # fmt: skip
        begun = time.process_time()
        for record in batch:
            recorder.request(record, "prfaas", "capacity")
        for row in rows:
            recorder.decision(row, "prfaas", "capacity")
        return time.process_time() - begun

    for record in records:
        batch.append(record)
        if len(batch) == 2_000:
            spent += flush()
            batch = []
    spent += flush()
    begun = time.process_time()
    recorder.close()
    return spent + time.process_time() - begun


def _read(directory: Path, sql: str) -> tuple[float, float, float]:
    """(P90 gap in ms, seconds, seconds of CPU) in DuckDB, a connection opened for it."""
    import duckdb

    files = {name: directory / f"{name}.parquet" for name in _TIMES}
    begun, cpu_begun = time.perf_counter(), time.process_time()
    with duckdb.connect() as connection:
        found = connection.sql(sql.format(**files, q=0.9)).fetchall()[0][0]
    return float(found) / 1e3, time.perf_counter() - begun, time.process_time() - cpu_begun


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m results.speed", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    options = parser.parse_args()
    count = options.requests
    rng = np.random.default_rng(1)
    print(f"{count:,} requests of {TOKENS:,} tokens")

    def regular() -> list[TokenRun]:
        return [(0.0, 0.025, TOKENS)]

    def measured() -> list[TokenRun]:
        times = np.cumsum(rng.normal(0.025, 0.0005, TOKENS))
        return [(at, 0.0, 1) for at in (times - times[0]).tolist()]

    with tempfile.TemporaryDirectory() as folder:
        # What is written first pays for what pyarrow imports then.
        _write(Path(folder), (_record(i, rng, regular()) for i in range(100)), True)
    for name, runs, decisions, queries in (
        ("regular steps", regular, False, {"runs": RUNS_SQL}),
        ("regular steps and decisions", regular, True, {"runs": RUNS_SQL}),
        ("measured steps", measured, False, {"counted": GAPS_SQL, "one by one": EACH_SQL}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            made = (_record(i, rng, runs()) for i in range(count))
            spent_s = _write(directory, made, decisions)
            size = sum(path.stat().st_size for path in directory.iterdir())
            times = sum((directory / f"{each}.parquet").stat().st_size for each in _TIMES)
            print(
                f"{name}: {spent_s / count * 1e6:.1f} us of CPU a request, {size / 1e6:.1f} MB, "
                f"{times / count / TOKENS:.3f} bytes a token"
            )
            for form, sql in queries.items():
                p90_ms, read_s, read_cpu_s = _read(directory, sql)
                print(
                    f"  P90 gap {p90_ms:.3f} ms from {form}, read in {read_s:.2f} s "
                    f"({read_cpu_s:.2f} s of CPU)"
                )


if __name__ == "__main__":
    main()
