"""`prfaas transport bench`: the KV transport against plain sockets and iperf3."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.transport.bench import Place, Plan, Result, run_bench
from engine.transport.certificates import make_authority, make_certificate
from engine.transport.frames import MAX_CHUNK_BYTES
from engine.transport.messages import CHUNK_BYTES, MAX_REGIONS
from engine.transport.security import Security, tls_by
from harness.errors import BadInput, NotReady

UNSHAPED = ("loopback", "veth")
SHAPED = ("netem", "tun", "tbf", "relay")
NAMESPACES = "prfaas-tt-"
#: A thread at either end each.
MOST_LANES = 256
#: Payload per byte of Ethernet frame at an MTU of 1500 (shapers count frames).
PAYLOAD_SHARE = 0.956


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """examples:
  prfaas transport bench                              loopback, against sockets and iperf3
  prfaas transport bench --at veth --tls              two network namespaces (root), and TLS 1.3
  prfaas transport bench --at tbf --rate-gbps 1       a shaped link of 1 Gbit/s
  prfaas transport bench --at tun --rate-gbps 1 --rtt-ms 4 --json

All contestants run in turn, round by round. `raw` is the same memory over plain sockets, without
protocol or checksums; `single` one large region; `layers` the same bytes cut into layers; `iperf3`
has the host's congestion control, and where data connections take another (named in the title)
`iperf3 -C` has theirs. Ratios are medians over rounds. CPU is of both ends, per GB. Nothing is said
about the machine's absolute speed: compare ratios, and only within one table.
"""
    actions = parser.add_subparsers(dest="action", metavar="bench", required=True)
    bench = actions.add_parser(
        "bench", help="measure it", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.epilog = parser.epilog
    bench.add_argument(
        "--at",
        action="append",
        choices=[*UNSHAPED, *SHAPED],
        help="where (repeatable; default loopback); shaped ones need --rate-gbps",
    )
    bench.add_argument("--mib", type=int, default=256, help="size of one cache (default 256)")
    bench.add_argument("--layers", type=int, default=32, help="layers of the layer-wise transfers")
    bench.add_argument(
        "--layer-kib",
        type=int,
        help="size of a layer; the layer-wise transfers are then a stream of caches that make up "
        "--mib, four under way at a time (default: one cache of --mib)",
    )
    bench.add_argument("--lanes", type=int, default=4, help="connections (default 4)")
    bench.add_argument(
        "--chunk-kib",
        type=int,
        default=CHUNK_BYTES >> 10,
        help=f"chunk size (default {CHUNK_BYTES >> 10})",
    )
    bench.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    bench.add_argument("--rate-gbps", type=float, help="rate of a shaped link")
    bench.add_argument("--rtt-ms", type=float, default=0.0, help="round trip of a shaped link")
    bench.add_argument("--tls", action="store_true", help="measure TLS 1.3 as well")
    bench.add_argument("--no-overlap", action="store_true", help="skip the paced transfers")
    bench.add_argument("--json", action="store_true", help="print all rounds as JSON")


def run(options: argparse.Namespace) -> int:
    plan = _plan(options)
    with tempfile.TemporaryDirectory(prefix="prfaas-certs-") as directory:
        if options.tls:
            plan = _with_tls(plan, Path(directory))
        results = asyncio.run(_all(options, plan))
    if options.json:
        print(json.dumps([_as_json(result) for result in results]))
    else:
        for result in results:
            _print(result)
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    for name, least in (("mib", 1), ("layers", 1), ("lanes", 1), ("chunk_kib", 4), ("rounds", 1)):
        if getattr(options, name) < least:
            flag = name.replace("_", "-")
            raise BadInput(f"--{flag} {getattr(options, name)}: at least {least} would do")
    for name, most in (("layers", MAX_REGIONS), ("lanes", MOST_LANES)):
        if getattr(options, name) > most:
            raise BadInput(f"--{name} {getattr(options, name)}: at most {most} would do")
    if options.chunk_kib % 4 or options.chunk_kib << 10 > MAX_CHUNK_BYTES:
        raise BadInput(
            f"--chunk-kib {options.chunk_kib}: a multiple of 4 up to {MAX_CHUNK_BYTES >> 10} "
            "would do"
        )
    memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    if 2 * options.mib > memory_mib:
        raise BadInput(
            f"--mib {options.mib}: both ends hold one cache, and this host has {memory_mib} MiB"
        )
    if options.layer_kib is None:
        if (options.mib << 20) % (options.layers * 4096):
            raise BadInput(
                f"--mib {options.mib} does not divide into {options.layers} layers of pages"
            )
    elif not 4 <= options.layer_kib * options.layers <= options.mib << 10 or options.layer_kib % 4:
        raise BadInput(
            f"--layer-kib {options.layer_kib} x --layers {options.layers}: whole pages of 4 KiB, "
            f"together at most --mib {options.mib}, would do"
        )
    shaped = [at for at in options.at or () if at in SHAPED]
    if shaped and not options.rate_gbps:
        raise BadInput(f"--at {shaped[0]} needs --rate-gbps")
    if not shaped and (options.rate_gbps is not None or options.rtt_ms):
        raise BadInput(f"--rate-gbps and --rtt-ms are for --at {', '.join(SHAPED)}")
    return Plan(
        size_bytes=options.mib << 20,
        layers=options.layers,
        layer_bytes=(options.layer_kib or 0) << 10,
        lanes=options.lanes,
        chunk_bytes=options.chunk_kib << 10,
        rounds=options.rounds,
        overlap=not options.no_overlap,
    )


def _with_tls(plan: Plan, directory: Path) -> Plan:
    authority = make_authority(directory)
    pair = []
    for name in ("source", "sink"):
        certificate, key = make_certificate(directory, name)
        pair.append(Security(str(certificate), str(key), str(authority)))
    values = {name: getattr(plan, name) for name in Plan.__slots__}
    return Plan(**{**values, "security": (pair[0], pair[1])})


async def _all(options: argparse.Namespace, plan: Plan) -> list[Result]:
    results = []
    for name in options.at or ["loopback"]:
        async with _place(name, options) as place:
            results.append(await run_bench(place, plan))
    return results


@contextlib.asynccontextmanager
async def _place(name: str, options: argparse.Namespace) -> AsyncIterator[Place]:
    if name == "loopback":

        async def local(port: int) -> tuple[str, int]:
            return "127.0.0.1", port

        yield Place("loopback", "this host's loopback", "127.0.0.1", local)
    elif name == "veth":
        with _veth() as place:
            yield place
    else:
        from harness.links.factory import shaped_link
        from harness.links.spec import parse_link

        table: dict[str, Any] = {"backend": name, "rate_gbps": options.rate_gbps}
        if options.rtt_ms:
            table["rtt_ms"] = options.rtt_ms
        async with shaped_link(parse_link(table, "--at")) as link:
            source, sink = link.sides
            host = link.bind_host(sink)

            async def across(port: int) -> tuple[str, int]:
                return await link.expose(sink, host, port)

            yield Place(
                name,
                link.description,
                host,
                across,
                link.launch_prefix(source),
                link.launch_prefix(sink),
                options.rate_gbps * 1e9 * PAYLOAD_SHARE,
            )


@contextlib.contextmanager
def _veth() -> Any:
    """Two namespaces and an unshaped veth pair between them; removed whatever happens."""
    if os.geteuid() != 0:
        raise NotReady("--at veth needs root (network namespaces); loopback does not")
    _remove_stale()
    names = [f"{NAMESPACES}{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        pair = ("type", "veth", "peer", "name", "tt1", "netns", names[1])
        _ip("-n", names[0], "link", "add", "tt0", *pair)
        for name, device, address in zip(
            names, ("tt0", "tt1"), ("10.98.0.1/30", "10.98.0.2/30"), strict=True
        ):
            _ip("-n", name, "addr", "add", address, "dev", device)
            for interface in (device, "lo"):
                _ip("-n", name, "link", "set", interface, "up")

        async def across(port: int) -> tuple[str, int]:
            return "10.98.0.2", port

        prefixes = [["ip", "netns", "exec", name] for name in names]
        yield Place("veth", "veth pair, unshaped", "10.98.0.2", across, prefixes[0], prefixes[1])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _remove_stale() -> None:
    """Namespaces of a bench that was killed: their names carry its process id."""
    for path in Path("/run/netns").glob(f"{NAMESPACES}*"):
        owner = path.name.removeprefix(NAMESPACES).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReady(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _print(result: Result) -> None:
    console = Console()
    size_mib = result.plan.size_bytes >> 20
    table = Table(
        title=f"{result.place.name}: {result.place.description}; caches of {size_mib} MiB, "
        f"{result.plan.lanes} connections ({result.congestion}), {result.plan.rounds} rounds"
    )
    compared = [f"x {name}" for name in result.yardsticks]
    for column in ("", "Gbit/s", "CPU s/GB", *compared, "of the shaper"):
        table.add_column(column, justify="left" if not column else "right")
    for name, measure in result.measures.items():
        gbps = statistics.median(measure.gbps)
        allowed = result.place.rate_bps
        table.add_row(
            name,
            f"{gbps:.3g}",
            f"{statistics.median(measure.cpu_s_per_gb):.2f}",
            *(_ratio(result.ratio(name, to)) for to in result.yardsticks),
            f"{gbps * 1e9 / allowed:.1%}" if allowed else "",
        )
    console.print(table)
    cipher = result.cipher
    if cipher is not None:
        tls = result.measures["tls"]
        gbps = statistics.median(tls.gbps)
        plain = statistics.median(result.measures["single"].cpu_s_per_gb)
        left = plain / (plain + cipher.cpu_s_per_gb)
        console.print(
            f"TLS by {tls_by()}, {cipher.cipher}: one core seals {cipher.seal_gbps:.3g} and opens "
            f"{cipher.open_gbps:.3g} Gbit/s; TLS carried {gbps:.3g}, "
            f"{gbps / cipher.bound_gbps:.0%} of that and {_ratio(result.ratio('tls', 'single'))} "
            f"of plain; of its {statistics.median(tls.cpu_s_per_gb):.2f} CPU s/GB the cipher takes "
            f"{cipher.cpu_s_per_gb:.2f}, which alone leaves {left:.2f} of plain where both ends "
            f"share all cores"
        )
    overlap = result.overlap
    if overlap is not None:
        console.print(
            f"transfer {overlap.transfer_s:.3f} s, 60 % of prefill {overlap.prefill_s:.3f} s: "
            f"layer-wise {overlap.layer_wise_s:.3f} s "
            f"({overlap.layer_wise_s / overlap.ideal_s - 1:+.1%} of prefill + last layer), "
            f"serial {overlap.serial_s:.3f} s"
        )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "at": result.place.name,
        "description": result.place.description,
        "size_bytes": result.plan.size_bytes,
        "layers": result.plan.layers,
        "lanes": result.plan.lanes,
        "chunk_bytes": result.plan.chunk_bytes,
        "congestion": result.congestion,
        "shaper_payload_bps": result.place.rate_bps,
        "measures": {name: asdict(measure) for name, measure in result.measures.items()},
        "ratios": {
            name: {to: result.ratio(name, to) for to in (*result.yardsticks, "single")}
            for name in result.measures
        },
        "cipher": None if result.cipher is None else asdict(result.cipher),
        "overlap": None if result.overlap is None else asdict(result.overlap),
    }
