"""Writes flights to Parquet as they end, in a thread, so that the loop never waits for a disk.

The loop only appends to a list. Batches of it are turned into columns, counted into histograms and
gathered into row groups by one writer thread; at most a few batches wait for it, so memory does not
grow with the run.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness.load.flight import Flight
from harness.load.tables import TABLES, Batch, client_table, requests_table, schema, tokens_table
from results import metrics
from results.growing import GrowingParquet
from results.live import LiveHistogram
from results.metrics import Slo
from results.recorder import COMPLETE_KEY

#: Flights, and chunks in them, that make a batch: small, so that its columns hold the interpreter
#: for a few milliseconds only.
_BATCH_FLIGHTS = 512
_BATCH_CHUNKS = 65_536
_GROUP_ROWS = 32_768
_GROUP_BYTES = 48 << 20
#: Batches that may wait for the writer. Beyond that the loop waits, and its lag shows it.
_MAX_WAITING = 8

_MAKERS = {"requests": requests_table, "tokens": tokens_table, "client": client_table}
MEASURES = ("ttft", "tpot", "e2e", "gap", "lateness", "pool_wait")


@dataclass(slots=True)
class Tally:
    """A phase so far: histograms in seconds, and how many requests met the SLO. `lateness` is the
    client's own: sent - due.
    """

    histograms: dict[str, LiveHistogram] = field(
        default_factory=lambda: {name: LiveHistogram() for name in MEASURES}
    )
    met_slo: int = 0

    def add(self, batch: Batch, slo: Slo) -> None:
        requests = batch.requests()
        samples = {
            "ttft": metrics.ttft_s(requests),
            "tpot": metrics.tpot_s(requests),
            "e2e": metrics.e2e_s(requests),
            "gap": batch.chunk_gaps_s(),
            "lateness": batch.sent_s - batch.due_s,
            "pool_wait": batch.pool_wait_s,
        }
        for name, values in samples.items():
            self.histograms[name].record_many(values)
        self.met_slo += int(metrics.met_slo(requests, slo).sum())

    def merge(self, other: Tally) -> None:
        """Add the samples of `other`: percentiles are only ever taken of the sum."""
        for name, histogram in self.histograms.items():
            histogram.merge(other.histograms[name])
        self.met_slo += other.met_slo

    def encode(self) -> dict[str, Any]:
        coded = {name: each.encode().decode("ascii") for name, each in self.histograms.items()}
        return {"histograms": coded, "met_slo": self.met_slo}

    @classmethod
    def decode(cls, data: dict[str, Any]) -> Tally:
        return cls(
            {
                name: LiveHistogram.decode(text.encode())
                for name, text in data["histograms"].items()
            },
            data["met_slo"],
        )


class _OpenGroup:
    """Rows of one table that are not on disk yet."""

    def __init__(self) -> None:
        self._parts: list[pa.Table] = []
        self.rows = self.size_bytes = 0

    def add(self, part: pa.Table) -> None:
        self._parts.append(part)
        self.rows += part.num_rows
        # Summed as they come: asking each part again costs more than making it.
        self.size_bytes += part.nbytes

    def take(self) -> pa.Table:
        """All of it, in one piece; it is empty then."""
        whole = pa.concat_tables(self._parts).unify_dictionaries().combine_chunks()
        self._parts, self.rows, self.size_bytes = [], 0, 0
        return whole


class ClientRecorder:
    """requests, tokens and client .parquet in `directory`. Close it, also after an error."""

    def __init__(
        self, directory: Path, configuration: str, meta: dict[str, str], slo: Slo = Slo()
    ) -> None:
        self._slo = slo
        self._configuration = configuration
        self._files = {
            table: GrowingParquet(directory / f"{table}.parquet", schema(table, meta))
            for table in TABLES
        }
        self._open = {table: _OpenGroup() for table in TABLES}
        self._flights: list[Flight] = []
        self._chunk_count = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._room = threading.Semaphore(_MAX_WAITING)
        self._failure: BaseException | None = None
        self.tallies: dict[str, Tally] = {}

    def add(self, flight: Flight) -> None:
        """A flight that ended and will not change. Raises what the writer met."""
        self._flights.append(flight)
        self._chunk_count += len(flight.chunk_s)
        if len(self._flights) >= _BATCH_FLIGHTS or self._chunk_count >= _BATCH_CHUNKS:
            self.seal()

    def seal(self) -> None:
        """Hand what has been added to the writer."""
        if self._failure is not None:
            raise self._failure
        if not self._flights:
            return
        flights, self._flights = self._flights, []
        self._chunk_count = 0
        self._room.acquire()
        self._writer.submit(self._take, flights).add_done_callback(self._taken)

    def snapshot(self, phase: str) -> Future[dict[str, Any]]:
        """The phase's histograms, encoded, once all that was sealed is in them."""
        return self._writer.submit(lambda: (self.tallies.get(phase) or Tally()).encode())

    def flush(self) -> None:
        """Seal, and make what there is readable on disk. In real time, every half minute or so."""
        self.seal()
        self._writer.submit(self._write, 0).add_done_callback(self._noted)

    def close(self, complete: bool) -> None:
        """Write the rest. Raises OSError, or what the writer met."""
        try:
            self.seal()
            self._writer.submit(self._write, 0).result()
        finally:
            self._writer.shutdown()
            for file in self._files.values():
                file.close({COMPLETE_KEY: "true" if complete else "false"})
        if self._failure is not None:
            raise self._failure

    def _taken(self, done: Future[None]) -> None:
        self._room.release()
        self._noted(done)

    def _noted(self, done: Future[None]) -> None:
        self._failure = self._failure or done.exception()

    def _take(self, flights: list[Flight]) -> None:
        batch = Batch(flights)
        for table, make in _MAKERS.items():
            self._open[table].add(make(batch, self._configuration, self._files[table].schema))
        phases = {each.phase for each in flights}
        for phase in sorted(phases):
            part = batch if len(phases) == 1 else Batch([f for f in flights if f.phase == phase])
            if phase not in self.tallies:
                self.tallies[phase] = Tally()
            self.tallies[phase].add(part, self._slo)
        self._write(_GROUP_ROWS)

    def _write(self, at_least: int) -> None:
        """Close the open row groups that have so many rows, or too many bytes."""
        for table, group in self._open.items():
            if group.rows and (group.rows >= at_least or group.size_bytes >= _GROUP_BYTES):
                self._files[table].append(group.take())
