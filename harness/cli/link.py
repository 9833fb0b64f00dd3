"""`prfaas link`: set up, show, probe or remove a shaped link by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tomllib
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cli.link_words import (
    carried,
    findings_table,
    offers_json,
    print_offers,
    print_ways_in,
    state_json,
    status,
)
from harness.cli.numbers import finite
from harness.errors import BadInput, ExitCode
from harness.links.achieved import measure
from harness.links.base import ShapedLink
from harness.links.factory import DEFAULT_SIDES, attach, open_link, shaped_link
from harness.links.follow import follow
from harness.links.probe import probe
from harness.links.relay import RelayLink
from harness.links.spec import PRESETS, LinkSpec, parse_link
from harness.links.state import (
    LinkState,
    all_states,
    find_state,
    remove,
    sweep_stale,
)
from harness.places import make_folder

#: What `prfaas link follow` runs unless told otherwise.
HOUR = Path(__file__).parents[1] / "links" / "hour.toml"
HOUR_S = 3600.0

EPILOG = """
examples:
  prfaas link probe                                     which backends this host offers
  prfaas link probe --preset metro --rate-gbps 1        a temporary link, measured
  prfaas link up --rate-gbps 1 --rtt-ms 2               a link that stays until `prfaas link down`
  prfaas link up --spec experiment.toml                 the [link] table of an experiment
  prfaas link up --backend relay --rate-gbps 1 --forward pd=127.0.0.1:5201
  prfaas link show                                      what is up, whose, and what it carried
  prfaas link probe TOKEN --check                       exit 6 if it misses its specification
  prfaas link follow                                    an hour of steps, a sine and two outages
  prfaas link follow --spec experiment.toml --seconds 60   its schedule under load
  prfaas link down TOKEN                                remove one (else all made by `up`)
Rates count Ethernet frames: TCP payload gets 0.956 of them at a 1500-byte MTU.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    actions = parser.add_subparsers(
        dest="action", metavar="up|show|probe|follow|down", required=True
    )
    raw = argparse.RawDescriptionHelpFormatter

    up = actions.add_parser("up", help="make a link that stays until `down`", formatter_class=raw)
    _add_spec_arguments(up)
    up.add_argument(
        "--forward",
        action="append",
        default=[],
        metavar="SIDE=HOST:PORT",
        help="relay only: make a port at which the other side reaches this listener of SIDE",
    )
    show = actions.add_parser("show", help="list links, their owners and counters")
    probing = actions.add_parser(
        "probe", help="backends of this host, or configured against achieved of a link"
    )
    probing.add_argument("token", nargs="?", help="a link that is up; else a temporary one is made")
    _add_spec_arguments(probing)
    probing.add_argument(
        "--seconds", type=finite(0.1), default=3.0, help="length of each rate measurement"
    )
    probing.add_argument("--check", action="store_true", help="exit 6 when a tolerance is missed")
    probing.add_argument("--no-iperf3", action="store_true", help="do not run iperf3 beside it")
    following = actions.add_parser(
        "follow",
        help="run a link's schedule under the KV transport's load: what each segment carried",
    )
    _add_spec_arguments(following)
    following.add_argument(
        "--seconds", type=float, metavar="S", help="of the schedule (the shipped hour: all of it)"
    )
    following.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="K",
        help="run it K times as fast, as emulate does: RTT and the schedule's times are divided",
    )
    following.add_argument(
        "--out", type=Path, metavar="DIR", help="a new directory for links.parquet and follow.json"
    )
    following.add_argument("--check", action="store_true", help="exit 6 when it was not followed")
    down = actions.add_parser("down", help="remove stale links and those made by `up`")
    down.add_argument("token", nargs="*", help="only these")
    down.add_argument(
        "--force", action="store_true", help="also a named link whose harness is still running"
    )
    for action in (up, show, probing, following, down):
        action.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(options: argparse.Namespace) -> int:
    actions = {"up": _up, "show": _show, "probe": _probe, "follow": _follow, "down": _down}
    return actions[options.action](options)


def _add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spec", type=Path, metavar="TOML", help="file with a [link] table")
    parser.add_argument("--preset", choices=sorted(PRESETS))
    for name, unit in (("rate-gbps", "Gbit/s"), ("rtt-ms", "ms"), ("jitter-ms", "ms")):
        parser.add_argument(f"--{name}", type=float, metavar="X", help=f"{unit}")
    parser.add_argument("--queue-ms", type=float, metavar="X", help="queue, ms at the rate")
    parser.add_argument(
        "--bundle-segments", type=int, metavar="N", help="netem: segments in a packet (default 1)"
    )
    parser.add_argument("--loss", type=float, metavar="P", help="independent loss probability")
    parser.add_argument("--backend", help="auto (default), netem, tun, tbf or relay")


def _given_spec(options: argparse.Namespace) -> LinkSpec | None:
    """The specification from --spec and the options over it; None when nothing was given."""
    table: dict[str, Any] = {}
    where = "link"
    if options.spec:
        where = f"{options.spec}: link"
        table = _linkfindings_table(options.spec)
    scalars = (
        "preset",
        "rate_gbps",
        "rtt_ms",
        "jitter_ms",
        "queue_ms",
        "bundle_segments",
        "backend",
    )
    for name in scalars:
        if (value := getattr(options, name)) is not None:
            table[name] = value
    if options.loss is not None:
        table["loss"] = {"model": "independent", "probability": options.loss}
    return parse_link(table, where) if table else None


def _linkfindings_table(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text()).get("link") or {}
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None
    if not table or not isinstance(table, dict):
        raise BadInput(f"{path}: has no [link] table")
    return table


def _up(options: argparse.Namespace) -> int:
    spec = _given_spec(options)
    if spec is None:
        raise BadInput("link up: give --preset, --rate-gbps or --spec (see `prfaas link --help`)")
    forwards = [_parse_forward(text) for text in options.forward]

    async def bring_up() -> ShapedLink:
        link = await open_link(spec, persistent=True)
        try:
            for side, host, port in forwards:
                if not isinstance(link, RelayLink):
                    raise BadInput(f"--forward is for the relay; this link is {link.backend}")
                await link.expose(side, host, port)
        except BaseException:
            await link.close()
            raise
        await link.detach()
        return link

    link = _run(bring_up())
    if options.json:
        print(json.dumps(state_json(link.state)))
        return ExitCode.OK
    print(f"link {link.state.token} is up: {link.description}")
    if spec.schedule or spec.sine:
        print("  its schedule is not followed: that takes a running harness; it stays at its start")
    print_ways_in(link.state)
    print(f"  prfaas link probe {link.state.token}    prfaas link down {link.state.token}")
    return ExitCode.OK


def _show(options: argparse.Namespace) -> int:
    states = all_states()
    if options.json:
        print(json.dumps([state_json(state) for state in states]))
        return ExitCode.OK
    if not states:
        print("no link is up")
    for state in states:
        print(f"link {state.token}: {status(state)}; {state.description}")
        print_ways_in(state)
        for direction, counters in carried(state).items():
            print(f"  {direction}: {counters['sent_bytes']} bytes, {counters['dropped']} dropped")
    return ExitCode.OK


def _probe(options: argparse.Namespace) -> int:
    spec = _given_spec(options)
    if options.token and spec:
        raise BadInput("link probe: give a TOKEN or a specification, not both")
    if options.token:
        state = find_state(options.token)
        return _report_achieved(options, lambda: _measure_state(state, options))
    if spec:
        return _report_achieved(options, lambda: _measure_temporary(spec, options))
    offers = probe()
    if options.json:
        print(json.dumps(offers_json(offers)))
        return ExitCode.OK
    print_offers(offers)
    return ExitCode.OK


def _follow(options: argparse.Namespace) -> int:
    shipped = options.spec is None
    if shipped:
        options.spec = HOUR
    spec = _given_spec(options)
    assert spec is not None
    seconds = HOUR_S if shipped and options.seconds is None else options.seconds
    if seconds is None:
        raise BadInput("link follow: --seconds says how much of --spec's schedule to run")
    if seconds <= 0:
        raise BadInput(f"link follow: --seconds {seconds:g} must be above 0")
    if options.time_scale <= 0:
        raise BadInput(f"link follow: --time-scale {options.time_scale:g} must be above 0")
    if options.out and options.out.exists() and any(options.out.iterdir()):
        raise BadInput(f"--out {options.out}: is not empty; name a new directory")
    if options.out:
        make_folder("--out", options.out)
    spec = spec.scaled(1.0, options.time_scale)
    return _report_achieved(
        options, lambda: _follow_temporary(spec, seconds / options.time_scale, options.out)
    )


def _down(options: argparse.Namespace) -> int:
    if options.token:
        chosen = [find_state(token) for token in options.token]
        for state in chosen:
            if not state.persistent and not state.stale() and not options.force:
                raise BadInput(
                    f"link {state.token} belongs to running process {state.owner.pid}; "
                    "end that, or give --force"
                )
        for state in chosen:
            remove(state)
    else:
        chosen = sweep_stale()
        persistent = [state for state in all_states() if state.persistent]
        for state in persistent:
            remove(state)
        chosen += persistent
    removed = [state.token for state in chosen]
    if options.json:
        print(json.dumps({"removed": removed}))
    else:
        print(f"removed {', '.join(removed)}" if removed else "nothing to remove")
    return ExitCode.OK


async def _measure_temporary(spec: LinkSpec, options: argparse.Namespace) -> Any:
    async with shaped_link(spec) as link:
        return link.state, await measure(link, options.seconds, not options.no_iperf3)


async def _follow_temporary(spec: LinkSpec, seconds: float, out: Path | None) -> Any:
    from results.recorder import Recorder

    async with shaped_link(spec) as link:
        if out is None:
            return link.state, (await follow(link, seconds)).findings
        recorder = Recorder(out, {"link": link.description}, tables=("links",), row_group_rows=512)
        complete = False
        try:
            followed = await follow(
                link, seconds, on_row=lambda row: recorder.link(row, link.backend, "follow")
            )
            complete = True
        finally:
            recorder.close(complete)
        report = {"description": link.description, "spec": link.state.spec, **asdict(followed)}
        (out / "follow.json").write_text(json.dumps(report, indent=1) + "\n")
        return link.state, followed.findings


async def _measure_state(state: LinkState, options: argparse.Namespace) -> Any:
    link = attach(state)
    return state, await measure(link, options.seconds, not options.no_iperf3)


def _report_achieved(options: argparse.Namespace, measuring: Any) -> int:
    state, findings = _run(measuring())
    missed = [finding for finding in findings if finding.ok is False]
    if options.json:
        print(
            json.dumps(
                {
                    "backend": state.backend,
                    "description": state.description,
                    "findings": [finding.to_json() for finding in findings],
                    "ok": not missed,
                }
            )
        )
    else:
        print(f"{state.backend}: {state.description}")
        Console().print(findings_table(findings))
    if options.check and missed:
        names = ", ".join(finding.name for finding in missed)
        print(f"the link misses its specification: {names}", file=sys.stderr)
        return ExitCode.SLO_MISSED
    return ExitCode.OK


def _parse_forward(text: str) -> tuple[str, str, int]:
    side, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    if side not in DEFAULT_SIDES or not host or not port.isdigit():
        raise BadInput(f"--forward {text}: must be SIDE=HOST:PORT with SIDE one of {DEFAULT_SIDES}")
    return side, host, int(port)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; SIGTERM cancels like Ctrl-C does, so that links are closed."""

    async def guarded() -> Any:
        task = asyncio.current_task()
        assert task
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
