"""What the load generator itself can do, against the bundled stub server on this machine.

`make bench-load` prints, each from runs of the `prfaas load` command's own client processes:
- the ceiling: requests/s of one client process in a closed loop, and requests and stream chunks per
  CPU-second of it (every chunk stamped and written to Parquet), net of start-up, by the difference
  of a long and a short run;
- half of that ceiling, and how late sends are there in an open loop;
- 10,000 streams at once, and whether each of them came through;
- the client's memory over a run of many requests (a million with --million).

On a machine that others use, only the CPU figures mean much. The stub is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq

from harness.load.clients import Clients, PhaseDone
from harness.load.spec import LoadSpec, measured_phase
from harness.targets.base import TargetSpec
from results.table import number
from workloads.spec import parse_arrivals, parse_workload

#: Chunks, and tokens, of an answer in the ceiling; prompt tokens; requests in flight.
CHUNKS, PROMPT_TOKENS, IN_FLIGHT = 32, 100, 32


@contextmanager
def stub(*options: str) -> Iterator[str]:
    """A stub server in a process of its own; gives its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.stub", *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def spec_of(
    url: str,
    requests: int,
    *,
    chunks: int = CHUNKS,
    in_flight: int | None = IN_FLIGHT,
    rate: float | None = None,
    processes: int = 1,
) -> LoadSpec:
    """`requests` in a closed loop, or at a constant rate."""
    return LoadSpec(
        target=TargetSpec(base_urls=(url,)),
        workload=parse_workload(
            {"kind": "fixed", "input_tokens": PROMPT_TOKENS, "output_tokens": chunks}
        ),
        arrivals=parse_arrivals({"process": "constant"}),
        num_requests=requests,
        max_concurrency=in_flight,
        request_rate=rate,
        processes=processes,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the client processes. `cpu_s` is theirs, from start to closed files."""

    done: PhaseDone
    wall_s: float
    cpu_s: float
    rows: int


def run(spec: LoadSpec) -> Run:
    """Run `spec` in client processes of its own and count the rows that are on disk after it."""
    before = _children_cpu_s()
    with tempfile.TemporaryDirectory() as directory:

        def part(index: int) -> Path:
            return Path(directory) / f"client-{index}"

        async def main() -> tuple[PhaseDone, float]:
            clients = Clients(spec, part, {})
            try:
                await clients.start(10.0)
                begun_s = time.monotonic()
                done = await clients.phase(measured_phase(spec, "load", 0))
                wall_s = time.monotonic() - begun_s
                await clients.close(True)
            finally:
                await clients.abandon()
            return done, wall_s

        done, wall_s = asyncio.run(main())
        rows = sum(
            pq.read_metadata(part(index) / "requests.parquet").num_rows
            for index in range(spec.processes)
        )
    return Run(done, wall_s, _children_cpu_s() - before, rows)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True, slots=True)
class Ceiling:
    requests_per_cpu_s: float
    chunks_per_cpu_s: float
    requests_per_s: float
    client_cpu_share: float


def ceiling(requests: int) -> Ceiling:
    """CPU by the difference of two runs, so that starting and importing are out of it."""
    with stub() as url:
        short = run(spec_of(url, requests // 10))
        long = run(spec_of(url, requests))
    for each in (short, long):
        assert each.done.counts.succeeded == each.rows == each.done.counts.offered
    spent_s = long.cpu_s - short.cpu_s
    done = long.rows - short.rows
    health = long.done.clients[0]
    return Ceiling(
        done / spent_s,
        CHUNKS * done / spent_s,
        long.rows / health.duration_s,
        health.cpu_share,
    )


@dataclass(frozen=True, slots=True)
class Lateness:
    rate: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    client_cpu_share: float
    core_wait_share: float


def lateness(rate: float, seconds: float) -> Lateness:
    """Own lateness of sends (sent - due) at a constant `rate`, requests/s."""
    with stub("--ttft-ms", "20") as url:
        made = run(spec_of(url, int(rate * seconds), in_flight=None, rate=rate))
    assert made.done.counts.succeeded == made.rows
    histogram = made.done.tally.histograms["lateness"]

    def ms(q: float) -> float | None:
        value = histogram.percentile(q)
        return None if value is None else value * 1e3

    health = made.done.clients[0]
    return Lateness(rate, ms(0.5), ms(0.9), ms(0.99), health.cpu_share, health.core_wait_share)


@dataclass(frozen=True, slots=True)
class AtOnce:
    streams: int
    succeeded: int
    chunks_recorded: int
    chunks_sent: int
    most_in_flight: int


def at_once(streams: int, chunks: int = 12, itl_ms: float = 2000.0) -> AtOnce:
    """`streams` that are all open together: each lasts far longer than opening them takes."""
    spec_holder: list[int] = [0]
    with stub("--itl-ms", str(itl_ms)) as url, tempfile.TemporaryDirectory() as directory:
        spec = spec_of(url, streams, chunks=chunks, in_flight=None)

        async def main() -> PhaseDone:
            clients = Clients(spec, lambda index: Path(directory), {})
            try:
                await clients.start(10.0)
                done = await clients.phase(
                    measured_phase(spec, "load", 0),
                    lambda progress: spec_holder.append(progress.in_flight),
                )
                await clients.close(True)
            finally:
                await clients.abandon()
            return done

        done = asyncio.run(main())
        recorded = sum(
            pq.read_table(Path(directory) / "client.parquet", columns=["chunks"])["chunks"]
            .to_numpy()
            .tolist()
        )
    return AtOnce(streams, done.counts.succeeded, recorded, streams * chunks, max(spec_holder))


@dataclass(frozen=True, slots=True)
class Memory:
    requests: int
    first_tenth_mib: float
    whole_mib: float


def memory(requests: int) -> Memory:
    """Peak resident memory of the client after a tenth of the requests, and after all."""
    with stub() as url:
        first = run(spec_of(url, requests // 10, chunks=4, in_flight=64))
        whole = run(spec_of(url, requests, chunks=4, in_flight=64))
    assert whole.rows == requests
    return Memory(
        requests,
        max(first.done.max_rss_bytes) / 2**20,
        max(whole.done.max_rss_bytes) / 2**20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=10_000, help="of the ceiling")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the lateness run")
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--million", action="store_true", help="memory over a million requests")
    parser.add_argument("--only", choices=("ceiling", "lateness", "streams", "memory"))
    parser.add_argument(
        "--rate", type=float, default=None, help="of the lateness run, instead of half the ceiling"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, object] = {}

    def tell(name: str, figure: object, text: str) -> None:
        found[name] = figure
        if not options.json:
            print(f"{name:<10}{text}", flush=True)

    def wanted(name: str) -> bool:
        return options.only in (None, name)

    rate = options.rate
    if wanted("ceiling") or (wanted("lateness") and rate is None):
        top = ceiling(options.requests)
        rate = rate or top.requests_per_s / 2
        tell(
            "ceiling",
            asdict(top),
            f"{top.requests_per_s:,.0f} requests/s at {top.client_cpu_share:.0%} of a core (the "
            f"stub has the other); {top.requests_per_cpu_s:,.0f} requests and "
            f"{top.chunks_per_cpu_s:,.0f} chunks per CPU-second",
        )
    if wanted("lateness"):
        assert rate is not None
        late = lateness(rate, options.seconds)
        named = (
            f"{late.rate:,.0f} requests/s" if options.rate else f"half of it, {late.rate:,.0f}/s"
        )
        tell(
            "lateness",
            asdict(late),
            f"at {named}: P50 {number(late.p50_ms)} ms, P90 {number(late.p90_ms)} ms, P99 "
            f"{number(late.p99_ms)} ms; {late.client_cpu_share:.0%} of a core, waited for one "
            f"{late.core_wait_share:.1%} of the time",
        )
    if wanted("streams"):
        many = at_once(options.streams)
        tell(
            "streams",
            asdict(many),
            f"{many.succeeded:,} of {many.streams:,} succeeded, {many.chunks_recorded:,} of "
            f"{many.chunks_sent:,} chunks recorded, {many.most_in_flight:,} in flight at once",
        )
    if wanted("memory"):
        held = memory(1_000_000 if options.million else 50_000)
        tell(
            "memory",
            asdict(held),
            f"{held.whole_mib:.0f} MiB resident after {held.requests:,} requests, "
            f"{held.first_tenth_mib:.0f} MiB after a tenth of them",
        )
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
