"""Ownership: what is ours goes, also after kill -9; what is not ours is never touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.errors import BadInput
from harness.links.factory import choose
from harness.links.probe import Offer, Offers
from harness.links.spec import parse_link
from harness.links.state import (
    LinkState,
    NotOurs,
    Process,
    all_states,
    command,
    find_state,
    remove,
    sweep_stale,
)

HOLD_A_LINK = """
import asyncio, sys
from harness.links.factory import open_link
from harness.links.spec import parse_link
async def main():
    link = await open_link(parse_link({"rate_gbps": 1, "rtt_ms": 2, "backend": sys.argv[1]}))
    print(link.state.token, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def hold_a_link(backend: str) -> tuple[subprocess.Popen, LinkState]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_LINK, backend], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, find_state(process.stdout.readline().strip())


def test_workers_that_start_together_save_at_once() -> None:
    state = LinkState.new("relay", ("prfaas", "pd"), persistent=False)

    def add(number: int) -> None:
        state.forwards[str(number)] = "somewhere"
        state.save()

    try:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(add, range(64)))
        assert len(LinkState.load(state.path).forwards) == 64
    finally:
        state.path.unlink(missing_ok=True)


@pytest.mark.parametrize("backend", ["relay", "tbf", "tun"])
def test_a_killed_owner_leaves_a_stale_link_that_the_next_run_removes(backend, offers) -> None:
    if not offers.available(backend):
        pytest.skip(offers.by_backend[backend].reason)
    process, state = hold_a_link(backend)
    assert not state.stale()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state.stale()
    assert state.token in [removed.token for removed in sweep_stale()]
    assert not state.path.exists()
    assert not any((Path("/run/netns") / name).exists() for name in state.namespaces)
    assert state.emulator is None or not state.emulator.alive()


def test_an_emulator_ends_with_its_owner_however_that_died() -> None:
    process, state = hold_a_link("relay")
    assert state.emulator
    process.send_signal(signal.SIGKILL)
    process.wait()
    for _ in range(100):
        if not state.emulator.alive():
            break
        time.sleep(0.05)
    assert not state.emulator.alive()
    sweep_stale()


def test_sweeping_leaves_the_links_of_living_owners() -> None:
    state = LinkState.new("relay", ("prfaas", "pd"), persistent=False)
    state.save()
    sweep_stale()
    assert state.token in [kept.token for kept in all_states()]
    remove(state)
    assert state.token not in [kept.token for kept in all_states()]


def test_a_namespace_that_the_state_did_not_make_is_not_touched(offers) -> None:
    if not offers.available("tbf"):
        pytest.skip(offers.by_backend["tbf"].reason)
    foreign = f"prfaas-foreign-{os.getpid()}"
    command("ip", "netns", "add", foreign)
    try:
        state = LinkState.new("tbf", ("prfaas", "pd"), persistent=False)
        state.namespaces = {foreign: 0}
        state.save()
        with pytest.raises(NotOurs, match="is not the one that link"):
            remove(state)
        assert (Path("/run/netns") / foreign).exists()
        state.path.unlink()
    finally:
        command("ip", "netns", "delete", foreign)


def test_a_namespace_made_anew_under_our_name_is_not_touched(offers) -> None:
    if not offers.available("tbf"):
        pytest.skip(offers.by_backend["tbf"].reason)
    state = LinkState.new("tbf", ("prfaas", "pd"), persistent=False)
    name = state.namespace_name("a")
    command("ip", "netns", "add", name)
    try:
        state.namespaces = {name: (Path("/run/netns") / name).stat().st_ino + 1}
        state.save()
        with pytest.raises(NotOurs):
            remove(state)
        assert (Path("/run/netns") / name).exists()
        state.path.unlink()
    finally:
        command("ip", "netns", "delete", name)


def test_a_reused_process_id_is_not_the_same_process() -> None:
    assert Process.current().alive()
    assert not Process(os.getpid(), Process.current().started - 1).alive()


def test_an_unknown_token_names_the_known_ones() -> None:
    with pytest.raises(BadInput, match="no link 'zzz' is up"):
        find_state("zzz")


def offers_with(*available: str) -> Offers:
    names = ("netem", "tun", "tbf", "relay")
    return Offers(
        {name: Offer(name, name in available, f"why {name} not") for name in names}, "tbf"
    )


@pytest.mark.parametrize(
    ("table", "available", "expected"),
    [
        ({"rtt_ms": 2, "rate_gbps": 1}, ("netem", "tun", "tbf", "relay"), "netem"),
        ({"rtt_ms": 2, "rate_gbps": 1}, ("tun", "tbf", "relay"), "tun"),
        ({"rate_gbps": 1}, ("tun", "tbf", "relay"), "tbf"),
        ({"rtt_ms": 2, "rate_gbps": 20}, ("tun", "tbf", "relay"), "tbf"),
        ({"rtt_ms": 2, "rate_gbps": 1}, ("relay",), "relay"),
        ({"rate_gbps": 1, "backend": "relay"}, ("netem", "relay"), "relay"),
    ],
)
def test_auto_takes_the_best_that_serves(table, available, expected) -> None:
    assert expected == choose(parse_link(table), offers_with(*available))[0]


def test_a_backend_asked_for_by_name_is_not_replaced() -> None:
    spec = parse_link({"backend": "netem"})
    with pytest.raises(Exception, match="backend netem is not available here: why netem not"):
        choose(spec, offers_with("relay"))
