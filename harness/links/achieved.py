"""Configured against achieved: measures an open link with the prober and judges it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from harness.links.base import ShapedLink
from harness.links.shape import GOODPUT_SHARE, SEGMENT_PAYLOAD_BYTES, LinkShape, Shape
from harness.links.state import LinkError

RATE_TOLERANCE = 0.02
RTT_TOLERANCE_S = 0.5e-3
MATHIS_FACTOR = 1.5
LOSS_PACKETS = 40_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured property; `ok` is None where nothing was asked."""

    name: str
    configured: str
    achieved: str
    value: float
    ok: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def mathis_bps(loss: float, rtt_s: float) -> float:
    """Payload rate of one loss-limited TCP connection: MSS / RTT * sqrt(3/2) / sqrt(p).

    Mathis, Semke, Mahdavi, Ott: "The macroscopic behavior of the TCP congestion avoidance
    algorithm", 1997, with the constant of one acknowledgement a segment.
    """
    return SEGMENT_PAYLOAD_BYTES * 8 / rtt_s * math.sqrt(1.5 / loss)


async def measure(link: ShapedLink, duration_s: float = 3.0, iperf3: bool = True) -> list[Finding]:
    """Measure both directions of an idle link. Raises LinkError when a prober fails."""
    findings = []
    async with prober(link, link.sides[1]) as there, prober(link, link.sides[0]) as back:
        crossing = await there.drive({"rtt_count": 200})
        inside = await there.drive({"rtt_count": 200}, crossing=False)
        findings.append(_judge_rtt(link, crossing["rtt_s"], inside["rtt_s"]["median"]))
        for name, end, shape in (
            ("rate there", there, link.shape.forward),
            ("rate back", back, link.shape.reverse),
        ):
            plan = _rate_plan(link.shape, shape, duration_s)
            goodput_bps = (await end.drive(plan))["goodput_bps"]
            findings.append(_judge_rate(name, link, shape, goodput_bps))
        for name, end, shape in (
            ("loss there", there, link.shape.forward),
            ("loss back", back, link.shape.reverse),
        ):
            if shape.loss.lossless or link.backend in ("relay", "tbf"):
                continue
            plan = {"loss_packets": LOSS_PACKETS, "loss_bps": min(shape.rate_bps / 3, 20e6)}
            findings.append(_judge_loss(name, shape, (await end.drive(plan))["loss"]))
    if iperf3 and shutil.which("iperf3"):
        findings.append(await _iperf3(link, duration_s))
    return findings


def _rate_plan(link: LinkShape, shape: Shape, duration_s: float) -> dict[str, Any]:
    """One cubic connection on a lossless link takes a while to open its window: warm up longer."""
    warm_up_s = 0.5 + 20 * link.rtt_s
    return {
        "rate_s": duration_s if shape.loss.lossless else max(duration_s, 8.0),
        "warm_up_s": min(4.0, warm_up_s),
        "connections": 1,
        "congestion": None if shape.loss.lossless else "cubic",
    }


def _judge_rtt(link: ShapedLink, rtt_s: dict[str, float], own_s: float) -> Finding:
    """`own_s` is the same exchange inside one side: the prober's and the host's own cost."""
    achieved_s = rtt_s["median"] - own_s
    applied = link.base_rtt_s == link.shape.rtt_s
    return Finding(
        "rtt",
        f"{link.shape.rtt_s * 1e3:.3f} ms" + ("" if applied else " (not applied)"),
        f"{achieved_s * 1e3:.3f} ms (median {rtt_s['median'] * 1e3:.3f} less {own_s * 1e3:.3f} "
        f"inside one side; p95 {rtt_s['p95'] * 1e3:.3f})",
        achieved_s,
        abs(achieved_s - link.base_rtt_s) <= RTT_TOLERANCE_S + 2 * link.shape.forward.jitter_s,
    )


def _judge_rate(name: str, link: ShapedLink, shape: Shape, goodput_bps: float) -> Finding:
    configured = f"{shape.rate_bps / 1e6:.1f} Mbit/s"
    achieved = f"{goodput_bps / GOODPUT_SHARE / 1e6:.1f} Mbit/s (payload {goodput_bps / 1e6:.1f})"
    applies_loss = link.backend in ("netem", "tun") and not shape.loss.lossless
    if applies_loss and link.base_rtt_s:
        bound_bps = min(
            mathis_bps(shape.loss.mean, link.base_rtt_s), shape.rate_bps * GOODPUT_SHARE
        )
        ratio = goodput_bps / bound_bps
        achieved += f", {ratio:.2f} of the loss bound {bound_bps / 1e6:.0f}"
        return Finding(
            name, configured, achieved, goodput_bps, 1 / MATHIS_FACTOR <= ratio <= MATHIS_FACTOR
        )
    error = goodput_bps / GOODPUT_SHARE / shape.rate_bps - 1
    return Finding(
        name, configured, f"{achieved}, {error:+.1%}", goodput_bps, abs(error) <= RATE_TOLERANCE
    )


def _judge_loss(name: str, shape: Shape, loss: float) -> Finding:
    # Four standard deviations of the count, doubled for bursts that are not independent.
    spread = 4 * math.sqrt(shape.loss.mean / LOSS_PACKETS) * (2 if shape.loss.good_to_bad else 1)
    return Finding(
        name,
        f"{shape.loss.mean:.3%}",
        f"{loss:.3%} of {LOSS_PACKETS} datagrams",
        loss,
        abs(loss - shape.loss.mean) <= spread,
    )


class ProbeEnd:
    """A prober server on `side`, driven from the other side of the link."""

    def __init__(self, link: ShapedLink, side: str, port: int) -> None:
        self._link, self._side, self._port = link, side, port

    async def drive(self, plan: dict[str, Any], crossing: bool = True) -> dict[str, Any]:
        """Run `plan` from the other side, or (`crossing` false) from the server's own side."""
        link = self._link
        host, port, source = link.bind_host(self._side), self._port, self._side
        if crossing:
            host, port = await link.expose(self._side, host, port)
            source = next(side for side in link.sides if side != self._side)
        process = await asyncio.create_subprocess_exec(
            *link.launch_prefix(source),
            *(sys.executable, "-m", "harness.links.prober", "drive"),
            *(host, str(port), json.dumps(plan)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), 120)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        if process.returncode:
            said = (err.decode().strip().splitlines() or ["no message"])[-1]
            raise LinkError(f"the prober failed on {link.backend}: {said}")
        return dict(json.loads(out))


@contextlib.asynccontextmanager
async def prober(link: ShapedLink, side: str) -> AsyncIterator[ProbeEnd]:
    """A prober server on `side`, ended on exit."""
    process = await asyncio.create_subprocess_exec(
        *link.launch_prefix(side),
        *(sys.executable, "-m", "harness.links.prober", "serve", link.bind_host(side)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout
        line = await asyncio.wait_for(process.stdout.readline(), 20)
        if not line:
            raise LinkError(f"the prober on {side} did not start")
        yield ProbeEnd(link, side, int(line))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _iperf3(link: ShapedLink, duration_s: float) -> Finding:
    """The rate there as iperf3 sees it; informative only."""
    side, other = link.sides[1], link.sides[0]
    host, port = link.bind_host(side), 5201
    server = await asyncio.create_subprocess_exec(
        *link.launch_prefix(side),
        *("iperf3", "--server", "--one-off", "--bind", host, "--port", str(port)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.sleep(0.5)
        dial_host, dial_port = await link.expose(side, host, port)
        client = await asyncio.create_subprocess_exec(
            *link.launch_prefix(other),
            *("iperf3", "--client", dial_host, "--port", str(dial_port), "--json"),
            *("--time", str(math.ceil(duration_s)), "--omit", "1"),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(client.communicate(), duration_s + 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        await server.wait()
    report = json.loads(out or "{}")
    goodput_bps = report.get("end", {}).get("sum_received", {}).get("bits_per_second", 0.0)
    text = report.get("error") or f"payload {goodput_bps / 1e6:.1f} Mbit/s"
    return Finding("iperf3 there", "", text, goodput_bps, None)
