"""The figures of a load run out of its tables: phases, intervals over repeats, and remarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness.load.spec import LoadSpec
from harness.topology import PRFAAS
from results import metrics, reader
from results.metrics import Requests
from results.summarise import phase_summary
from results.summary import Counts, Latency, Measured, PhaseSummary

#: What `reader.as_requests` needs, and nothing else: a million requests are a million times this.
_COLUMNS = (
    *("configuration", "phase", "status", "failure", "attempts", "input_tokens"),
    *("output_tokens", "tokens_received", "prefill_cluster", "verified"),
    *(name[:-2] + "_us" for name in metrics.TIMES),
)
#: Prompts longer or shorter than asked by more than this share are remarked on.
_PROMPT_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """What client.parquet says of a phase. `prompt_ratio`: prompt tokens by the server / asked."""

    mismatched_counts: int
    counted_by_client: int
    several_a_chunk: int
    new_connections: int
    no_answer: int
    no_text: int
    prompt_ratio: float | None
    answer_mean_s: float | None
    first_byte_mean_s: float | None


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """A phase whole, and its requests scheduled within the steady window (None: no window)."""

    whole: PhaseSummary
    steady: PhaseSummary | None
    client: ClientFigures


def phase_figures(directory: Path, spec: LoadSpec, phase: str) -> PhaseFigures:
    """Raises ReadError."""
    table = reader.where(reader.read(directory, "requests", _COLUMNS), None, phase)
    requests = reader.as_requests(table, remote=(PRFAAS,))
    slo = spec.slo.limits()
    window = metrics.steady_window(requests)
    whole = phase_summary(phase, requests, slo=slo, window_s=window)
    steady = None
    if window is not None:
        inside = (requests.scheduled_s >= window[0]) & (requests.scheduled_s <= window[1])
        steady = replace(
            phase_summary(f"{phase}-steady", requests.where(inside), slo=slo, window_s=window),
            throughput=whole.throughput,
        )
    client = _client_figures(
        reader_client(directory, phase), requests, np.asarray(table["input_tokens"].to_numpy())
    )
    return PhaseFigures(whole, steady, client)


def reader_client(directory: Path, phase: str) -> pa.Table:
    """The rows of client.parquet of one phase."""
    import pyarrow.parquet as pq

    return reader.where(pq.read_table(directory / "client.parquet"), None, phase)


def _client_figures(table: pa.Table, requests: Requests, asked: np.ndarray) -> ClientFigures:
    sent = pc.greater(table["chunks"], 0)
    several = pc.and_(sent, pc.greater(table["server_tokens"], table["chunks"]))
    told = ~np.isnan(_floats(table["prompt_tokens"]))
    ratio = None
    if told.any() and asked[told].sum():
        ratio = float(np.nansum(_floats(table["prompt_tokens"])) / asked[told].sum())
    done = requests.succeeded
    answer_s = _floats(table["first_answer_us"]) / 1e6 - requests.scheduled_s
    byte_s = _floats(table["first_byte_us"]) / 1e6 - requests.scheduled_s
    return ClientFigures(
        mismatched_counts=_count(pc.and_(sent, table["mismatch"])),
        counted_by_client=_count(pc.and_(sent, pc.is_null(table["server_tokens"]))),
        several_a_chunk=_count(several),
        new_connections=_count(table["new_connection"]),
        no_answer=int((done & np.isnan(answer_s) & ~np.isnan(requests.first_token_s)).sum()),
        no_text=int((done & np.isnan(requests.first_token_s)).sum()),
        prompt_ratio=ratio,
        answer_mean_s=metrics.mean(np.where(done, answer_s, np.nan)),
        first_byte_mean_s=metrics.mean(np.where(done, byte_s, np.nan)),
    )


def _floats(column: pa.ChunkedArray) -> metrics.Floats:
    return np.asarray(
        pc.cast(column, pa.float64()).combine_chunks().to_numpy(zero_copy_only=False),
        dtype=np.float64,
    )


def _count(flags: pa.ChunkedArray) -> int:
    return int(pc.sum(pc.fill_null(flags, False)).as_py() or 0)


def remarks(spec: LoadSpec, phases: Sequence[PhaseFigures]) -> list[str]:
    """What a reader of the figures must know, each in one line."""

    def total(get: str) -> int:
        return sum(getattr(each.client, get) for each in phases)

    found = []
    if not spec.target.stream:
        found.append("not streamed: an answer comes whole, so TTFT is E2E and there is no TPOT")
    if total("several_a_chunk"):
        found.append(
            f"{total('several_a_chunk')} answers carried several tokens a chunk: gaps are chunk "
            "gaps, not ITL, and TPOT is by the server's token count"
        )
    counted = total("mismatched_counts") - total("several_a_chunk")
    if counted > 0:
        found.append(
            f"{counted} answers have fewer tokens by the server's count than chunks or ids that "
            "arrived; the server's count was used"
        )
    if total("counted_by_client"):
        found.append(
            f"{total('counted_by_client')} answers came without usage: their tokens are chunks as "
            "the client counted them"
        )
    short = sum(each.whole.counts.short for each in phases)
    if short and spec.target.ignore_eos:
        found.append(
            f"{short} answers are shorter than asked although the end of text was to be ignored"
        )
    ratios = [each.client.prompt_ratio for each in phases if each.client.prompt_ratio is not None]
    if ratios and abs(ratios[0] - 1) > _PROMPT_TOLERANCE:
        found.append(
            f"prompts had {ratios[0]:.2f} times the tokens asked for, by the server's count (words "
            "are not its tokens; with --prompt-vocab prompts are sent as ids)"
        )
    retried = sum(each.whole.counts.retried for each in phases)
    if retried:
        found.append(
            f"{retried} requests were sent again because their kept connection had been closed"
        )
    if total("no_text"):
        found.append(
            f"{total('no_text')} answers ended well and carried no text: they have no TTFT"
        )
    if total("no_answer"):
        found.append(
            f"{total('no_answer')} answers ended before anything but reasoning came; their TTFT is "
            "that of the reasoning"
        )
    return found


def over_repeats(name: str, phases: Sequence[PhaseSummary]) -> PhaseSummary:
    """The mean of each figure over repeats with its 95 % interval; counts are added up. One repeat
    is itself.
    """
    if len(phases) == 1:
        return phases[0]

    def joined(figures: Sequence[Measured]) -> Measured:
        values = [each.raw for each in figures if each.raw is not None]
        # A figure that some repeat does not have is not a mean over the repeats.
        if not values or len(values) < len(figures):
            return Measured(n=sum(each.n for each in figures))
        mean = float(np.mean(values))
        low, high = metrics.interval(values) or (None, None)
        return Measured(mean, mean, None, low, high, sum(each.n for each in figures))

    def latency(get: str) -> Latency:
        parts = [getattr(each, get) for each in phases]
        return Latency(
            **{
                each.name: joined([getattr(part, each.name) for part in parts])
                for each in fields(Latency)
            }
        )

    counts = Counts(
        **{each.name: sum(getattr(p.counts, each.name) for p in phases) for each in fields(Counts)}
    )
    return PhaseSummary(
        name,
        counts=counts,
        offered_rate=joined([each.offered_rate for each in phases]),
        admitted_rate=joined([each.admitted_rate for each in phases]),
        achieved_rate=joined([each.achieved_rate for each in phases]),
        throughput=joined([each.throughput for each in phases]),
        goodput=joined([each.goodput for each in phases]),
        ttft=latency("ttft"),
        tpot=latency("tpot"),
        e2e=latency("e2e"),
        duration_s=sum(each.duration_s or 0.0 for each in phases),
        lateness_p99_s=max(
            (each.lateness_p99_s for each in phases if each.lateness_p99_s is not None),
            default=None,
        ),
    )
