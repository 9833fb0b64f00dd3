"""The Parquet schemas of a run directory, versioned, with unit and definition of each field.

Times are integers of microseconds of the run's loop clock since the start of the phase. Columns are
only ever added, as nullable ones, never retyped; `results.reader` fills what an older file lacks,
and makes `gaps` from `tokens` for a run without one.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

#: Of the set of tables; raised when a table, or a column of any of them, is added.
SCHEMA_VERSION = 4

NAMES = pa.dictionary(pa.int32(), pa.string())
RUNS = pa.list_(
    pa.field(
        "element",
        pa.struct(
            [
                pa.field("gap_us", pa.int64(), nullable=False),
                pa.field("n", pa.int32(), nullable=False),
                pa.field("span_us", pa.int64(), nullable=False),
            ]
        ),
        nullable=False,
    )
)
GAPS = pa.list_(pa.field("element", pa.int32(), nullable=False))
ALTERNATIVES = pa.list_(
    pa.field(
        "element",
        pa.struct([pa.field("cluster", pa.string()), pa.field("ttft_us", pa.int64())]),
        nullable=False,
    )
)


def _field(name: str, kind: pa.DataType, unit: str, definition: str) -> pa.Field:
    return pa.field(name, kind, metadata={"unit": unit, "definition": definition})


def _time(name: str, definition: str) -> pa.Field:
    return _field(name, pa.int64(), "us", definition)


_WHERE = (
    _field("configuration", NAMES, "", "configuration of the comparison, e.g. prfaas"),
    _field("phase", NAMES, "", "phase of the run: capacity, latency, load-0.8, ..."),
)

REQUESTS = pa.schema(
    [
        *_WHERE,
        _field("id", pa.int64(), "", "id in the workload; unique in a configuration and phase"),
        _field("status", NAMES, "", "succeeded, failed or unsent"),
        _field("failure", NAMES, "", "why a request failed; empty otherwise"),
        _field("attempts", pa.int32(), "count", "attempts made, the first included"),
        _field("session", NAMES, "", "session id in the workload"),
        _field("tenant", NAMES, "", "tenant id in the workload"),
        _field("slo_class", NAMES, "", "class of service level in the workload"),
        _field("input_tokens", pa.int32(), "tokens", "prompt length, modelled system"),
        _field("output_tokens", pa.int32(), "tokens", "tokens asked, modelled system"),
        _field("cached_tokens", pa.int32(), "tokens", "of the prompt, not computed"),
        _field("tokens_received", pa.int32(), "tokens", "tokens that arrived"),
        _field("wire_bytes", pa.int64(), "bytes", "cache bytes delivered to the decode side"),
        _field("prefill_cluster", NAMES, "", "cluster of the last attempt's prefill"),
        _field("prefill_instance", NAMES, "", "instance of the last attempt's prefill"),
        _field("decode_instance", NAMES, "", "instance of the last attempt's decode"),
        _time("scheduled_us", "scheduled arrival; latencies count from here"),
        _time("sent_us", "sent by the load generator"),
        _time("prefill_started_us", "prefill began to compute"),
        _time("prefill_finished_us", "prefill finished computing"),
        _time("delivered_us", "whole cache committed at the decode side"),
        _time("admitted_us", "taken into a decode batch"),
        _time("first_token_us", "first token received"),
        _time("last_token_us", "last token received"),
        _time("ended_us", "request ended, however it ended"),
        _field("verified", pa.bool_(), "", "tokens equal to the monolithic engine's; null: not in "
               "the sample"),
    ]
)  # fmt: skip

TOKENS = pa.schema(
    [
        *_WHERE,
        _field("id", pa.int64(), "", "id of the request in requests.parquet"),
        _field("timing", NAMES, "", "runs: evenly spaced runs of tokens; gaps: one gap a token; "
               "chunks: several tokens came at one instant, so gaps are not ITL"),
        _time("first_us", "first token received; null without tokens"),
        _field("runs", RUNS, "us", "n tokens over span_us, evenly, gap_us after the last token "
               "before; null when `gaps_us` is used"),
        _field("gaps_us", GAPS, "us", "gap before each token after the first; null when `runs` is "
               "used"),
    ]
)  # fmt: skip

GAP_COUNTS = pa.schema(
    [
        *_WHERE,
        _time("gap_us", "a measured gap between a token and the one before in its request: one of "
              "`gaps_us` in tokens.parquet"),
        _field("tokens", pa.int64(), "count", "tokens that came after this gap. One gap may have "
               "several rows: sum them"),
    ]
)  # fmt: skip

LINKS = pa.schema(
    [
        *_WHERE,
        _time("time_us", "when the sample was taken"),
        _field("link", NAMES, "", "direction, source->sink cluster"),
        _field("sent_bytes", pa.int64(), "bytes", "counter of the link: bytes that left since up"),
        _field("rate_bps", pa.float64(), "bit/s", "configured rate at this time"),
        _field("throughput_bps", pa.float64(), "bit/s", "measured over the last interval"),
        _field("utilisation", pa.float64(), "share", "throughput / rate"),
        _field("backlog_bytes", pa.int64(), "bytes", "handed to the transport and not yet acked"),
        _field("rtt_us", pa.int64(), "us", "smoothed round trip, greatest over connections"),
        _field("min_rtt_us", pa.int64(), "us", "least round trip seen"),
        _field("loss", pa.float64(), "share", "retransmitted / sent segments of the interval"),
        _field("verdict", NAMES, "", "free, busy, saturated, lossy or receiver-limited"),
        _field("connections", pa.int32(), "count", "TCP connections that TCP_INFO was read of"),
        _field("goodput_bps", pa.float64(), "bit/s", "acknowledged by the receivers' TCP, all "
               "connections; null: TCP_INFO was not read"),
        _field("retransmits", pa.int64(), "count", "counter: segments sent again since up"),
        _field("rwnd_limited", pa.float64(), "share", "of the interval spent waiting for the "
               "receiver's window"),
        _field("sndbuf_limited", pa.float64(), "share", "of the interval spent waiting for the "
               "sender's own buffer"),
    ]
)  # fmt: skip

FLOWS = pa.schema(
    [
        *_WHERE,
        _time("time_us", "when the flow's rate became this; it keeps it until its next row"),
        _field("link", NAMES, "", "direction, source->sink cluster"),
        _field("id", pa.int64(), "", "id of the request in requests.parquet whose cache flows; "
               "null: a cached prefix that is copied"),
        _field("attempt", pa.int32(), "", "attempt of the request, 1 for the first"),
        _field("rate_bps", pa.float64(), "bit/s", "of payload; 0 in a flow's last row"),
    ]
)  # fmt: skip

INSTANCES = pa.schema(
    [
        *_WHERE,
        _time("time_us", "when the sample was taken"),
        _field("instance", NAMES, "", "name in the topology"),
        _field("cluster", NAMES, "", "cluster it stands in"),
        _field("role", NAMES, "", "prefill or decode, at this time"),
        _field("state", NAMES, "", "up, draining, converting, lost, ..."),
        _field("queued", pa.int32(), "requests", "assigned to it for prefill, not finished: "
               "waiting or computing; 0 in role decode"),
        _field("running", pa.int32(), "requests", "assigned to it for decode, not ended: on "
               "their way or in its batch; 0 in role prefill"),
        _field("busy_us", pa.int64(), "us", "counter: time that the prefills which have ended "
               "on it took, since its configuration began; null in role decode"),
        _field("cache_tokens", pa.int64(), "tokens", "prompts and outputs of the requests "
               "assigned to it for decode: what it caches, or is to; null in role prefill"),
    ]
)  # fmt: skip

DECISIONS = pa.schema(
    [
        *_WHERE,
        _field("id", pa.int64(), "", "id of the request in requests.parquet"),
        _field("attempt", pa.int32(), "", "1 for the first"),
        _time("time_us", "when it was decided"),
        _field("input_tokens", pa.int32(), "tokens", "prompt length"),
        _field("cached_tokens", pa.int32(), "tokens", "held where prefill runs: not computed"),
        _field("held_tokens", pa.int32(), "tokens", "held where decode runs: not sent again"),
        _field("threshold_tokens", pa.float64(), "tokens", "threshold in force; null: none"),
        _field("prefill_cluster", NAMES, "", "chosen"),
        _field("prefill_instance", NAMES, "", "chosen"),
        _field("decode_instance", NAMES, "", "chosen"),
        _field("predicted_work_us", pa.int64(), "us", "prefill time accounted to the instance"),
        _field("predicted_wait_us", pa.int64(), "us", "queue of the chosen prefill instance"),
        _field("decode_active", pa.int32(), "requests", "assigned to the chosen decode instance"),
        _field("link_utilisation", pa.float64(), "share", "of the egress link, as measured"),
        _field("link_backlog_bytes", pa.int64(), "bytes", "of the egress link, as measured"),
        _field("reason", NAMES, "", "the rule that decided"),
        _field("alternatives", ALTERNATIVES, "us", "predicted TTFT of each cluster considered"),
    ]
)  # fmt: skip

AUDIT = pa.schema(
    [
        *_WHERE,
        _field("unix_us", pa.int64(), "us", "since 1970, wall clock of the host of `reporter`: "
               "when it had the cache, or learned that it was delivered, or refused it"),
        _field("reporter", NAMES, "", "instance that says so; a cache that crossed has a row of "
               "its sender and one of its receiver"),
        _field("direction", NAMES, "", "sent or received, as seen by `reporter`"),
        _field("outcome", NAMES, "", "committed: all of it arrived, verified; refused: `sender` "
               "was not authorised to send it, and nothing crossed"),
        _field("cache", NAMES, "", "request: the cache of a request, on its way to its decode; "
               "prefix: a cached prefix, copied to another instance"),
        _field("id", pa.int64(), "", "id of the request in requests.parquet"),
        _field("attempt", pa.int32(), "", "attempt of the request, 1 for the first"),
        _field("tenant", NAMES, "", "tenant whose cache it is; empty: none named"),
        _field("sender", NAMES, "", "instance that sent; empty: not known to `reporter`"),
        _field("sender_cluster", NAMES, "", "cluster it stands in"),
        _field("receiver", NAMES, "", "instance that received; empty: not known to `reporter`"),
        _field("receiver_cluster", NAMES, "", "cluster it stands in"),
        _field("peer_identity", NAMES, "", "common name in the certificate of the end that is not "
               "`reporter`; empty: no TLS"),
        _field("tokens", pa.int32(), "tokens", "of the engine, that the cache stands for"),
        _field("held_tokens", pa.int32(), "tokens", "of them that the receiver held already, and "
               "that did not cross"),
        _field("bytes", pa.int64(), "bytes", "of the cache that crossed, as it lies in memory; of "
               "a refused one, that would have crossed"),
        _field("wire_bytes", pa.int64(), "bytes", "given to the network for it, headers and "
               "resends included; null in rows of the receiver, which does not know"),
        _field("digest", pa.string(), "", "xxh3-128 over the checksums of all chunks, hexadecimal; "
               "the same at both ends; null when refused"),
    ]
)  # fmt: skip

SCHEMAS: dict[str, pa.Schema] = {
    "requests": REQUESTS,
    "tokens": TOKENS,
    "gaps": GAP_COUNTS,
    "links": LINKS,
    "instances": INSTANCES,
    "decisions": DECISIONS,
    "audit": AUDIT,
    "flows": FLOWS,
}

#: Tables of runs in which real caches cross.
REAL = frozenset({"audit"})
#: Tables of runs that ask for them.
ASKED = frozenset({"flows"})


def with_metadata(table: str, meta: Mapping[str, str]) -> pa.Schema:
    """The schema of `table` with its name, the version and `meta` as key-value metadata."""
    own = {"prfaas.table": table, "prfaas.schema_version": str(SCHEMA_VERSION)}
    return SCHEMAS[table].with_metadata(own | {f"prfaas.{key}": meta[key] for key in sorted(meta)})
