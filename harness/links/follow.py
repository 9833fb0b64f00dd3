"""Does a link follow its schedule, and do caches cross it exactly once while it does?

The KV transport keeps the link full from one side to the other (`caches`) while its schedule runs;
each segment of the schedule is then compared with what the link itself counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.links.achieved import Finding
from harness.links.base import ShapedLink
from harness.links.caches import DRAIN_S, Load
from harness.links.shape import GOODPUT_SHARE, TimedShape
from harness.links.state import LinkError
from results.rows import LinkRow

#: Relative error of a settled segment's rate.
TOLERANCE = 0.03
#: After a step TCP needs this long, and so many round trips, before its rate is the link's.
SETTLE_S, SETTLE_ROUND_TRIPS = 1.0, 100
#: What was queued when an outage begins still leaves; nothing may after this long.
EMPTY_S = 0.5
#: After an outage connections are made anew: bytes must flow again within this time.
RESUME_S = 5.0
#: A segment is judged only if so much of it is left when the link has settled.
LEAST_JUDGED_S = 1.0
#: The schedule's steps must come no later than this.
MOST_LATE_S = 0.5
TICK_S = 0.05
START_S = 30.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the schedule with one shape. Judged from `settled_s` on."""

    begin_s: float
    end_s: float
    settled_s: float
    rate_bps: float
    down: bool

    @property
    def name(self) -> str:
        return f"{self.begin_s:g} to {self.end_s:g} s"


@dataclass(frozen=True, slots=True)
class Sample:
    """Frames that the link had carried there (`sent_bytes`) at `at_s` of the schedule."""

    at_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Followed:
    """Findings of every segment and of the whole; both ends' ledgers."""

    findings: list[Finding]
    sent: dict[str, int]
    taken: dict[str, int]


def segments(timeline: Sequence[TimedShape], until_s: float) -> list[Segment]:
    """The schedule up to `until_s`, each with the time from which it is judged."""
    steps = [timed for timed in timeline if timed.at_s < until_s]
    ends = [timed.at_s for timed in steps[1:]] + [until_s]
    found: list[Segment] = []
    for timed, end_s in zip(steps, ends, strict=True):
        down = timed.shape.forward.down
        settle_s = SETTLE_S + SETTLE_ROUND_TRIPS * timed.shape.rtt_s
        if down:
            settle_s = EMPTY_S
        elif not found or found[-1].down:
            settle_s += RESUME_S
        rate_bps = 0.0 if down else timed.shape.forward.rate_bps
        found.append(Segment(timed.at_s, end_s, timed.at_s + settle_s, rate_bps, down))
    return found


async def follow(
    link: ShapedLink,
    until_s: float,
    load: Load = Load(),
    on_row: Callable[[LinkRow], None] = lambda row: None,
) -> Followed:
    """Run the schedule of an idle link up to `until_s` with `load` on it. `on_row` gets a row of
    links.parquet each `load.report_s`. Raises LinkError when a process of the load ends early."""
    plan = segments(link.spec.timeline(), until_s)
    loop = asyncio.get_running_loop()
    samples: list[Sample] = []
    async with _processes(link, load) as (source, sink):
        zero_s = loop.time()
        link.start_schedule()
        reports = asyncio.create_task(_record(link, source, zero_s, on_row))
        try:
            while (now_s := loop.time() - zero_s) < until_s:
                samples.append(Sample(now_s, link.read_counters()[0].sent_bytes))
                if link.failure or reports.done():
                    break
                await asyncio.sleep(TICK_S)
            if not reports.done():
                source.tell()
            async with asyncio.timeout(DRAIN_S + START_S):
                sent = await reports
            carried_bytes = link.read_counters()[0].sent_bytes
            sink.tell()
            taken = await sink.answer()
        finally:
            reports.cancel()
            await asyncio.gather(reports, return_exceptions=True)
    if link.failure:
        raise LinkError(link.failure)
    late_s = link.schedule_lateness_s
    findings = [
        *(judge(segment, samples) for segment in plan),
        _volume(plan, samples),
        exactly_once(sent, taken),
        _payload(sent, carried_bytes),
        Finding("lateness", "", f"{late_s * 1e3:.0f} ms at most", late_s, late_s < MOST_LATE_S),
    ]
    return Followed(findings, sent, taken)


def judge(segment: Segment, samples: Sequence[Sample]) -> Finding:
    """One segment against what the link counted in it."""
    inside = [sample for sample in samples if segment.settled_s <= sample.at_s < segment.end_s]
    configured = "down" if segment.down else f"{segment.rate_bps / 1e6:.2f} Mbit/s"
    long_enough = bool(inside) and inside[-1].at_s - inside[0].at_s >= LEAST_JUDGED_S
    if not long_enough:
        return Finding(segment.name, configured, "too short to settle", 0.0, None)
    first, last = inside[0], inside[-1]
    carried = last.sent_bytes - first.sent_bytes
    if segment.down:
        resumed_s = next(
            (
                sample.at_s - segment.end_s
                for sample in samples
                if sample.at_s >= segment.end_s and sample.sent_bytes > last.sent_bytes
            ),
            float("inf"),
        )
        after = samples[-1].at_s - segment.end_s
        ended = after < RESUME_S  # the run ended in or right after the outage
        return Finding(
            segment.name,
            configured,
            f"{carried} bytes; flows again {resumed_s:.2f} s after it",
            float(carried),
            carried == 0 and (ended or resumed_s <= RESUME_S),
        )
    carried_bps = carried * 8 / (last.at_s - first.at_s)
    error = carried_bps / segment.rate_bps - 1
    return Finding(
        segment.name,
        configured,
        f"{carried_bps / 1e6:.2f} Mbit/s ({error:+.2%})",
        carried_bps,
        abs(error) <= TOLERANCE,
    )


def exactly_once(sent: dict[str, int], taken: dict[str, int]) -> Finding:
    """Every cache that was begun is at the sink, whole, once."""
    ok = (
        sent["unfinished"] == 0
        and sent["committed"] == taken["caches"] == taken["highest"] + 1
        and taken["doubled"] == taken["damaged"] == 0
    )
    return Finding(
        "caches",
        "each exactly once",
        f"{sent['committed']} sent, {taken['caches']} there, {taken['doubled']} doubled, "
        f"{taken['damaged']} damaged, {sent['unfinished']} unfinished; {sent['failed']} attempts "
        f"failed and were made again ({sent['late']} had arrived)",
        float(taken["caches"]),
        ok,
    )


def _volume(plan: Sequence[Segment], samples: Sequence[Sample]) -> Finding:
    """The whole schedule, settling and resumption included; said, not judged."""
    allowed = sum(each.rate_bps * (each.end_s - each.begin_s) / 8 for each in plan)
    carried = samples[-1].sent_bytes - samples[0].sent_bytes
    return Finding(
        "whole schedule",
        f"{allowed / 1e6:.1f} MB",
        f"{carried / 1e6:.1f} MB on the link ({carried / allowed:.2%})",
        float(carried),
        None,
    )


def _payload(sent: dict[str, int], carried_bytes: int) -> Finding:
    """Bytes of committed attempts / payload that the link carried; said, not judged."""
    share = sent["wire_bytes"] / (carried_bytes * GOODPUT_SHARE)
    return Finding(
        "committed", "", f"{sent['wire_bytes'] / 1e6:.1f} MB, {share:.2%} of payload", share, None
    )


class _Peer:
    """A process of the load; JSON lines both ways."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise LinkError(f"the {self._name} of the load ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _record(
    link: ShapedLink, source: _Peer, zero_s: float, on_row: Callable[[LinkRow], None]
) -> dict[str, int]:
    """Turns the source's reports into rows until its ledger comes, and returns that."""
    loop = asyncio.get_running_loop()
    name = "->".join((link.forward.source, link.forward.sink))
    then_s, then = zero_s, link.read_counters()[0].sent_bytes
    retransmits = 0
    while True:
        report = await source.answer()
        if "sent" in report:
            ledger: dict[str, int] = report["sent"]
            return ledger
        now_s, counters = loop.time(), link.read_counters()[0]
        shape, seen = link.shape.forward, report["link"]
        throughput_bps = (counters.sent_bytes - then) * 8 / (now_s - then_s)
        retransmits += seen["retransmits"]
        on_row(
            LinkRow(
                now_s - zero_s,
                name,
                counters.sent_bytes,
                0.0 if shape.down else shape.rate_bps,
                throughput_bps,
                throughput_bps / shape.rate_bps,
                **{**seen, "retransmits": retransmits},
            )
        )
        then_s, then = now_s, counters.sent_bytes


@contextlib.asynccontextmanager
async def _processes(link: ShapedLink, load: Load) -> AsyncIterator[tuple[_Peer, _Peer]]:
    """(source, sink) of the load, one on each side of the link; ended on exit."""
    from_side, to_side = link.sides
    host = link.bind_host(to_side)
    async with contextlib.AsyncExitStack() as stack:
        options: dict[str, Any] = {"load": asdict(load), "host": host}
        sink = await stack.enter_async_context(_process(link, to_side, "sink", options))
        async with asyncio.timeout(START_S):
            port = (await sink.answer())["port"]
            options["to"] = await link.expose(to_side, host, port)
            source = await stack.enter_async_context(_process(link, from_side, "source", options))
            await source.answer()
        yield source, sink


@contextlib.asynccontextmanager
async def _process(
    link: ShapedLink, side: str, part: str, options: dict[str, Any]
) -> AsyncIterator[_Peer]:
    process = await asyncio.create_subprocess_exec(
        *link.launch_prefix(side),
        *(sys.executable, "-m", "harness.links.caches", part, json.dumps(options)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield _Peer(part, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
