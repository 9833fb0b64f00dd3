"""What is seen of a phase while it runs."""

from __future__ import annotations

import asyncio
import os
import pty
import select

import pytest

from harness.clock import run
from harness.dashboard import Dashboard
from harness.live import LivePhase, TtftLines, watched
from harness.phases import Phase
from harness.scale import Scale
from harness.screen import Screen
from results.records import RequestRecord, Status
from results.rows import LinkRow

PHASE = Phase("latency", 2.0, 10.0, 50.0)
SCALE = Scale(time_scale=6.0, token_scale=64, byte_scale=1000.0)


def served(ttft_s: float, tokens: int = 5, step_s: float = 0.1) -> RequestRecord:
    record = RequestRecord(0, 1.0, 10, tokens)
    record.status = Status.SUCCEEDED
    record.first_token_s = 1.0 + ttft_s
    record.last_token_s = record.first_token_s + step_s * (tokens - 1)
    record.tokens_received = tokens
    return record


def failed(reason: str) -> RequestRecord:
    record = RequestRecord(0, 1.0, 10, 5)
    record.status, record.failure = Status.FAILED, reason
    return record


def test_figures_are_the_modelled_systems() -> None:
    async def main() -> None:
        live = LivePhase("prfaas", PHASE, SCALE)
        for _ in range(10):
            live.record(served(0.5))
        assert live.ttft.percentile(0.5) == pytest.approx(3.0, rel=0.002)
        assert live.tpot.percentile(0.5) == pytest.approx(0.1 * 6 / 64, rel=0.002)

    run(main())


def test_one_token_has_no_tpot_and_a_failure_neither() -> None:
    async def main() -> None:
        live = LivePhase("prfaas", PHASE, SCALE)
        live.record(served(0.5, tokens=1))
        live.record(failed("lost"))
        assert (live.ttft.count, live.tpot.count, live.failures) == (1, 0, {"lost": 1})

    run(main())


def test_kinds_of_failures_are_bounded() -> None:
    async def main() -> None:
        live = LivePhase("prfaas", PHASE, SCALE)
        for number in range(1000):
            live.record(failed(f"no {number}"))
        live.record(failed("no 3"))
        assert len(live.failures) == 100
        assert live.failures["no 3"] == 2

    run(main())


def test_lines_come_every_quarter_minute_and_none_before_the_first_token() -> None:
    said: list[tuple[float, str]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        lines = TtftLines(lambda line: said.append((loop.time(), line)))
        for _ in range(2):
            live = LivePhase("prfaas", PHASE, SCALE)
            watcher = loop.create_task(watched(live, lines))
            await asyncio.sleep(20.0)
            for _ in range(10):
                live.record(served(0.5))
            await asyncio.sleep(20.5)
            watcher.cancel()

    run(main())
    assert [round(at_s) for at_s, _ in said] == [30, 70]
    assert said[0][1] == "  10 first tokens, TTFT P50 3.00 s, P90 3.00 s so far"


def drawn(*draw: object) -> str:
    """What a terminal gets of a screen."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, Screen(stream) as screen:
        assert screen.terminal
        for each in draw:
            each(screen)  # type: ignore[operator]
        stream.flush()
    text = b""
    while select.select([ours], [], [], 0.1)[0]:
        try:
            text += os.read(ours, 65536)
        except OSError:  # the other end is closed, and all is read
            break
    os.close(ours)
    return text.decode()


def test_the_picture_has_rates_latencies_links_and_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")

    def show(screen: Screen) -> None:
        async def main() -> None:
            live = LivePhase("prfaas", PHASE, SCALE)
            dashboard = Dashboard(screen)
            live.counts.offered, live.counts.unsent = 70, 10
            live.counts.succeeded, live.counts.failed = 50, 2
            for _ in range(50):
                live.record(served(0.5))
            live.record(failed("TransferFailed: [red]lost[/]"))
            live.link(LinkRow(1.0, "prfaas->pd", 10, 1e9, 0.25e9, 0.25))
            await asyncio.sleep(2.0)
            dashboard(live)

        run(main())

    text = " ".join(drawn(show).split())
    # 2 real seconds are 12 modelled ones.
    for part in (
        "prfaas: latency 12 of 60 s, 2.00 req/s asked",
        "sent 60 5.00/s",
        "succeeded 50 4.17/s",
        "in flight 8",
        "prfaas->pd 41.7 of 167 Gbps (25%)",
        "TTFT, s 3.00 3.00 -",
        "1 x TransferFailed: [red]lost[/]",
    ):
        assert part in text
    assert "failed" in text


def test_lines_stay_above_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = drawn(
        lambda screen: screen.say("before [b]"),
        lambda screen: screen.show("picture"),
        lambda screen: screen.say("between [b]"),
    )
    assert text.index("before [b]") < text.index("picture") < text.index("between [b]")
    assert text.rindex("picture") > text.index("between [b]")


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        assert not Screen(stream).terminal
    os.close(ours)
