"""`prfaas doctor`: says what this host offers and which backends will be used."""

from __future__ import annotations

import argparse
import json
from typing import Any

from harness.errors import ExitCode
from harness.links.host import describe_host

EPILOG = """
examples:
  prfaas doctor          read this first when a run refuses to start
  prfaas doctor --json   the same for machines
Link backends are found by really setting each up in a scratch namespace, removed at once.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(options: argparse.Namespace) -> int:
    host = describe_host()
    if options.json:
        print(json.dumps(host, indent=1))
    else:
        print("\n".join(lines(host)))
    return ExitCode.OK


def lines(host: dict[str, Any]) -> list[str]:
    """The report as text, one finding a line, with advice where something can be had."""
    machine, privileges, versions = host["machine"], host["privileges"], host["versions"]
    gib = 1 << 30
    text = [
        f"machine    {machine['cores']} cores ({machine['architecture']}, kernel "
        f"{machine['kernel']}), load {machine['load_1min']:.1f}",
        f"memory     {machine['memory_available_bytes'] / gib:.1f} of "
        f"{machine['memory_bytes'] / gib:.1f} GiB available; disk "
        f"{machine['disk_free_bytes'] / gib:.0f} GiB free",
    ]
    text += [
        f"gpu        {gpu['name']}, {gpu['memory']}, driver {gpu['driver']}" for gpu in host["gpus"]
    ]
    if not host["gpus"]:
        text.append("gpu        none found by nvidia-smi; the engine runs on the CPU")
    text.append(
        "versions   "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    )
    text.append(f"in C       {host['native']}")
    if host["native"] == "none":
        text.append(
            "           simulate and recording take more CPU time without them; with a C compiler"
            " and Python's headers, installing again builds them"
        )
    if not versions["torch"]:
        text.append(
            "           no torch: plan, simulate and load work; emulate needs the extra `engine`"
        )
    text.append(
        "privileges root: namespaces can be tried"
        if privileges["root"]
        else f"privileges uid {privileges['uid']}: only the relay link; root gives the others"
    )
    tcp = host["tcp"]
    text.append(
        f"tcp        {tcp.get('tcp_congestion_control', '?')} "
        f"(available: {tcp.get('tcp_available_congestion_control', '?')}), "
        f"rmem {tcp.get('tcp_rmem', '?')}, wmem {tcp.get('tcp_wmem', '?')}"
    )
    for name, offer in host["links"].items():
        text.append(
            f"link       {name:6} {'yes' if offer['available'] else 'no ':3}  {offer['reason']}"
        )
    if not host["links"]["netem"]["available"]:
        booted = host["commands"]["linux.uml"]
        text.append(
            "           netem is tested in user-mode Linux: `make test-netem` "
            + ("(installed)" if booted else "(Debian package user-mode-linux)")
        )
    for name in ("ip", "tc", "nsenter", "iperf3"):
        if not host["commands"][name]:
            text.append(f"commands   {name} is not installed")
    if host["stale_links"]:
        text.append(
            f"stale      links {', '.join(host['stale_links'])}: their owners died; "
            "the next run or `prfaas link down` removes them"
        )
    return text
