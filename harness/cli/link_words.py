"""What `prfaas link` says of links, for people and as JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from harness.links.achieved import Finding
from harness.links.factory import attach, choose
from harness.links.probe import Offers
from harness.links.shape import LinkShape
from harness.links.spec import LinkSpec
from harness.links.state import NETNS_DIR, LinkState


def findings_table(findings: list[Finding]) -> Table:
    table = Table()
    for heading in ("", "configured", "achieved", "within tolerance"):
        table.add_column(heading)
    words = {True: "yes", False: "NO", None: ""}
    for finding in findings:
        table.add_row(finding.name, finding.configured, finding.achieved, words[finding.ok])
    return table


def print_offers(offers: Offers) -> None:
    for offer in offers.by_backend.values():
        print(f"  {offer.backend:6} {'yes' if offer.available else 'no ':3}  {offer.reason}")
    chosen, why = choose(LinkSpec(rate_gbps=1, rtt_ms=2), offers)
    print(f"  auto at 1 Gbit/s and 2 ms: {chosen} ({why})")


def offers_json(offers: Offers) -> dict[str, Any]:
    return {
        offer.backend: {"available": offer.available, "reason": offer.reason}
        for offer in offers.by_backend.values()
    }


def print_ways_in(state: LinkState) -> None:
    if state.shape:
        print(f"  shape now: {LinkShape.from_json(state.shape).describe()}")
    for side, name in zip(state.sides, state.namespaces, strict=False):
        address = attach(state).bind_host(side)
        print(f"  {side}: {address}; nsenter --net={NETNS_DIR / name} COMMAND")
    for listener, dialled in state.forwards.items():
        print(f"  {listener} is reached by the other side at {dialled}")


def status(state: LinkState) -> str:
    if state.emulator and not state.emulator.alive():
        return "BROKEN, its emulator process is gone (prfaas link down removes it)"
    if state.stale():
        return f"stale, its owner {state.owner.pid} is dead (prfaas link down removes it)"
    return "kept until down" if state.persistent else f"owned by running process {state.owner.pid}"


def carried(state: LinkState) -> dict[str, dict[str, int]]:
    """Counters by direction, read now; empty when the link cannot be asked any more."""
    try:
        forward, reverse = attach(state).read_counters()
    except (OSError, ValueError):
        return {}
    first, second = state.sides
    return {
        f"{source} -> {sink}": {
            "sent_bytes": counters.sent_bytes,
            "sent_packets": counters.sent_packets,
            "dropped": counters.dropped_packets,
        }
        for source, sink, counters in ((first, second, forward), (second, first, reverse))
    }


def state_json(state: LinkState) -> dict[str, Any]:
    namespaces = dict(zip(state.sides, state.namespaces, strict=False))
    return {
        "token": state.token,
        "backend": state.backend,
        "description": state.description,
        "status": status(state),
        "persistent": state.persistent,
        "owner_pid": state.owner.pid,
        "netns": {side: str(NETNS_DIR / name) for side, name in namespaces.items()},
        "forwards": state.forwards,
        "carried": carried(state),
        "spec": state.spec,
        "shape": state.shape,
    }
