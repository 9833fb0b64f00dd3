"""Flights that ended to rows of requests, tokens and client .parquet, column by column.

Token times: one entry a chunk that carried tokens. Where the counts say that every chunk was one
token, they are stored as gaps between tokens; else as runs of several tokens at one instant, which
`timing` then calls chunks. A server that counts tokens without saying how they fall on chunks has
them spread evenly; the chunks' times are measured either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.load.flight import Flight
from results import columns
from results.metrics import Floats, Requests
from results.schemas import GAPS, NAMES, RUNS, SCHEMA_VERSION, SCHEMAS


def _field(name: str, kind: pa.DataType, unit: str, definition: str) -> pa.Field:
    return pa.field(name, kind, metadata={"unit": unit, "definition": definition})


#: What only a client of a foreign server knows, beside requests.parquet.
CLIENT = pa.schema(
    [
        _field("configuration", NAMES, "", "as in requests.parquet"),
        _field("phase", NAMES, "", "as in requests.parquet"),
        _field("id", pa.int64(), "", "id of the request in requests.parquet"),
        _field("due_us", pa.int64(), "us", "when schedule and concurrency cap allowed the send; "
               "sent - due is the client's own lateness"),
        _field("pool_wait_us", pa.int64(), "us", "wait for a connection after sent_us, opening it "
               "included"),
        _field("first_byte_us", pa.int64(), "us", "first byte of the answer's body"),
        _field("first_answer_us", pa.int64(), "us", "first token that is not reasoning; null: none "
               "came"),
        _field("chunks", pa.int32(), "count", "chunks that carried tokens"),
        _field("server_tokens", pa.int32(), "tokens", "usage.completion_tokens; null: not sent"),
        _field("client_tokens", pa.int32(), "tokens", "counted by the client: token ids, or chunks "
               "that carried tokens"),
        _field("token_source", NAMES, "", "whose count tokens_received is: server or client"),
        _field("mismatch", pa.bool_(), "", "the two counts differ"),
        _field("prompt_tokens", pa.int32(), "tokens", "usage.prompt_tokens; null: not sent"),
        _field("received_bytes", pa.int64(), "bytes", "of the answer's body"),
        _field("finish_reason", NAMES, "", "as the server gave it"),
        _field("http_status", pa.int32(), "", "0: no answer began"),
        _field("new_connection", pa.bool_(), "", "a connection was opened for it"),
    ]
)  # fmt: skip

TABLES: dict[str, pa.Schema] = {
    "requests": SCHEMAS["requests"],
    "tokens": SCHEMAS["tokens"],
    "client": CLIENT,
}


def schema(table: str, meta: dict[str, str]) -> pa.Schema:
    """The schema of `table` with `meta` as key-value metadata."""
    own = {"prfaas.table": table, "prfaas.schema_version": str(SCHEMA_VERSION)}
    return TABLES[table].with_metadata(own | {f"prfaas.{key}": meta[key] for key in sorted(meta)})


class Batch:
    """Some flights as arrays, made once for both the tables and the histograms. Times in seconds of
    their phases, NaN where there are none.
    """

    def __init__(self, flights: Sequence[Flight]) -> None:
        self.flights = flights
        self.origin_s = np.array([each.origin_s for each in flights])
        self.chunks = np.fromiter((len(each.chunk_s) for each in flights), np.int64, len(flights))
        joined = b"".join([each.chunk_s.tobytes() for each in flights])
        self.chunk_s: Floats = np.frombuffer(joined, np.float64)
        self.tokens = self.integers(lambda each: each.tokens_received)
        self.scheduled_s = self.times(lambda each: each.scheduled_s)
        self.sent_s = self.times(lambda each: each.sent_s)
        self.due_s = self.times(lambda each: each.due_s)
        self.ended_s = self.times(lambda each: each.ended_s)
        self.pool_wait_s = self.floats(lambda each: each.pool_wait_s)
        self.succeeded = np.fromiter(
            (each.status == "succeeded" for each in flights), np.bool_, len(flights)
        )
        ends = np.cumsum(self.chunks)
        some = self.chunks > 0
        self.first_s = np.full(len(flights), np.nan)
        self.last_s = np.full(len(flights), np.nan)
        self.first_s[some] = self.chunk_s[(ends - self.chunks)[some]] - self.origin_s[some]
        self.last_s[some] = self.chunk_s[ends[some] - 1] - self.origin_s[some]

    def floats(self, get: Callable[[Flight], float | None]) -> Floats:
        return np.array([get(each) for each in self.flights], dtype=np.float64)

    def times(self, get: Callable[[Flight], float | None]) -> Floats:
        return self.floats(get) - self.origin_s

    def integers(self, get: Callable[[Flight], int]) -> NDArray[np.int64]:
        return np.fromiter(map(get, self.flights), np.int64, len(self.flights))

    def requests(self) -> Requests:
        """The flights as `results.metrics` takes them."""
        absent = np.full(len(self.flights), np.nan)
        none = np.zeros(len(self.flights), np.bool_)
        return Requests(
            scheduled_s=self.scheduled_s,
            sent_s=self.sent_s,
            prefill_started_s=absent,
            prefill_finished_s=absent,
            delivered_s=absent,
            first_token_s=self.first_s,
            last_token_s=self.last_s,
            ended_s=self.ended_s,
            tokens_asked=self.integers(lambda each: each.request.output_tokens).astype(np.float64),
            tokens_received=self.tokens.astype(np.float64),
            attempts=self.integers(lambda each: each.attempts).astype(np.float64),
            succeeded=self.succeeded,
            unsent=np.isnan(self.sent_s),
            truncated=none,
            offloaded=none,
            verified=none,
            mismatched=none,
        )

    def chunk_gaps_s(self) -> Floats:
        """Gaps between chunks of the same flight, of flights that succeeded."""
        gaps = np.diff(self.chunk_s)
        inner = np.ones(len(gaps), np.bool_)
        inner[(np.cumsum(self.chunks)[:-1] - 1).clip(0)[self.chunks[1:] > 0]] = False
        owner = np.repeat(self.succeeded, self.chunks)[1:]
        return gaps[inner & owner] if len(gaps) else gaps


def _us(seconds: Floats) -> pa.Array:
    missing = np.isnan(seconds)
    return pa.array(columns.to_us(np.nan_to_num(seconds)), mask=missing if missing.any() else None)


def _optional(values: list[int | None]) -> pa.Array:
    return pa.array(values, pa.int32())


def requests_table(batch: Batch, configuration: str, made: pa.Schema) -> pa.Table:
    flights = batch.flights
    requests = [each.request for each in flights]
    absent = np.full(len(flights), np.nan)

    def names(get: Callable[[Any], str], of: Sequence[Any] = flights) -> pa.Array:
        return columns.names([get(each) for each in of])

    def ints(get: Callable[[Flight], int], kind: pa.DataType) -> pa.Array:
        return pa.array(batch.integers(get)).cast(kind)

    values: dict[str, pa.Array] = {
        "configuration": columns.repeated([(configuration, len(flights))]),
        "phase": names(lambda each: each.phase),
        "id": pa.array([each.id for each in requests], pa.int64()),
        "status": names(lambda each: each.status.value),
        "failure": names(lambda each: each.failure),
        "attempts": ints(lambda each: each.attempts, pa.int32()),
        "session": names(lambda each: each.session, requests),
        "tenant": names(lambda each: each.tenant, requests),
        "slo_class": names(lambda each: each.slo_class, requests),
        "input_tokens": pa.array([each.input_tokens for each in requests], pa.int32()),
        "output_tokens": pa.array([each.output_tokens for each in requests], pa.int32()),
        "cached_tokens": ints(lambda each: each.cached_tokens, pa.int32()),
        "tokens_received": pa.array(batch.tokens).cast(pa.int32()),
        "wire_bytes": pa.array(np.zeros(len(flights), np.int64)),
        "prefill_cluster": names(lambda each: each.prefill_cluster),
        "prefill_instance": names(lambda each: each.prefill_instance),
        "decode_instance": names(lambda each: each.decode_instance),
        "scheduled_us": _us(batch.scheduled_s),
        "sent_us": _us(batch.sent_s),
        "prefill_started_us": _us(batch.times(lambda each: each.prefill_started_s)),
        "prefill_finished_us": _us(batch.times(lambda each: each.prefill_finished_s)),
        "delivered_us": _us(absent),
        "admitted_us": _us(absent),
        "first_token_us": _us(batch.first_s),
        "last_token_us": _us(batch.last_s),
        "ended_us": _us(batch.ended_s),
        "verified": pa.nulls(len(flights), pa.bool_()),
    }
    # A column that the schema gains later is null here.
    arrays = [
        values[field.name] if field.name in values else pa.nulls(len(flights), field.type)
        for field in made
    ]
    return pa.Table.from_arrays(arrays, schema=made)


def client_table(batch: Batch, configuration: str, made: pa.Schema) -> pa.Table:
    flights = batch.flights
    arrays = [
        columns.repeated([(configuration, len(flights))]),
        columns.names([each.phase for each in flights]),
        pa.array([each.request.id for each in flights], pa.int64()),
        _us(batch.due_s),
        _us(batch.pool_wait_s),
        _us(batch.times(lambda each: each.first_byte_s)),
        _us(batch.times(lambda each: each.first_answer_s)),
        pa.array(batch.chunks).cast(pa.int32()),
        _optional([each.server_tokens for each in flights]),
        pa.array([each.client_tokens for each in flights], pa.int32()),
        columns.names(["client" if each.server_tokens is None else "server" for each in flights]),
        pa.array([each.server_tokens not in (None, each.client_tokens) for each in flights]),
        _optional([each.prompt_tokens for each in flights]),
        pa.array([each.received_bytes for each in flights], pa.int64()),
        columns.names([each.finish_reason for each in flights]),
        pa.array([each.http_status for each in flights], pa.int32()),
        pa.array([each.new_connection for each in flights]),
    ]
    return pa.Table.from_arrays(arrays, schema=made)


def tokens_table(batch: Batch, configuration: str, made: pa.Schema) -> pa.Table:
    flights, chunks = batch.flights, batch.chunks
    chunked = batch.tokens > chunks
    at_us = columns.to_us(batch.chunk_s - np.repeat(batch.origin_s, chunks))
    first = np.zeros(len(at_us), np.bool_)
    first[(np.cumsum(chunks) - chunks)[chunks > 0]] = True
    gap_us = np.zeros(len(at_us), np.int64)
    gap_us[1:] = np.diff(at_us)
    gap_us[first] = 0
    in_runs = np.repeat(chunked, chunks)
    timing = np.where(chunks == 0, 2, np.where(chunked, 1, 0)).astype(np.int32)
    kept = ~in_runs & ~first
    per_chunk = list(
        chain.from_iterable(_tokens_a_chunk(flights[at]) for at in np.flatnonzero(chunked).tolist())
    )
    runs = pa.StructArray.from_arrays(
        [
            pa.array(gap_us[in_runs]),
            pa.array(np.array(per_chunk, np.int32)),
            pa.array(np.zeros(int(in_runs.sum()), np.int64)),
        ],
        fields=list(RUNS.value_type),
    )
    arrays = [
        columns.repeated([(configuration, len(flights))]),
        columns.names([each.phase for each in flights]),
        pa.array([each.request.id for each in flights], pa.int64()),
        pa.DictionaryArray.from_arrays(pa.array(timing), pa.array(["gaps", "chunks", ""])),
        _us(batch.first_s),
        pa.ListArray.from_arrays(_offsets(chunks, chunked), runs, type=RUNS),
        pa.ListArray.from_arrays(
            _offsets(np.maximum(chunks - 1, 0), ~chunked & (chunks > 0)),
            pa.array(np.minimum(gap_us[kept], 2**31 - 1).astype(np.int32)),
            type=GAPS,
        ),
    ]
    return pa.Table.from_arrays(arrays, schema=made)


def _tokens_a_chunk(flight: Flight) -> Sequence[int]:
    chunks, tokens = len(flight.chunk_s), flight.tokens_received
    counts = flight.chunk_tokens
    if counts is not None and sum(counts) == tokens:
        return counts
    base, extra = divmod(tokens, chunks) if chunks else (0, 0)
    return [base + (at < extra) for at in range(chunks)]


def _offsets(lengths: NDArray[np.int64], present: NDArray[np.bool_]) -> pa.Array:
    """List offsets where the lists that are not present are null."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.where(present, lengths, 0), out=offsets[1:])
    return pa.array(offsets, mask=np.append(~present, False))
