"""The live view of a load run: a picture on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import io
import os
import pty
import select

import numpy as np
import pytest

from harness.load.clients import Progress
from harness.load.live import LiveView
from harness.load.recording import Tally
from harness.replay import ReplayCounts
from harness.screen import Screen


def progress(elapsed_s: float, sent: int, unsent: int = 0) -> Progress:
    tally = Tally()
    tally.histograms["ttft"].record_many(np.full(200, 0.25))
    counts = ReplayCounts(offered=sent + unsent, succeeded=sent - 5, failed=2, unsent=unsent)
    return Progress(elapsed_s, counts, 3, sent * 1000, tally, {"HTTP 503: [b]busy": 2})


def test_without_a_terminal_a_line_comes_every_five_seconds() -> None:
    out = io.StringIO()
    now_s = 0.0
    view = LiveView(Screen(out), clock=lambda: now_s)
    for second in range(1, 12):
        now_s = float(second)
        view.update("load", progress(float(second), 100 * second))
    lines = out.getvalue().splitlines()
    assert [line.split(" s:")[0] for line in lines] == ["load 1", "load 6", "load 11"]
    assert lines[1] == (
        "load 6 s: 600 sent (100/s), 595 succeeded (100/s), 2 failed, 3 in flight, "
        "TTFT P50 250 P99 250 ms"
    )


def test_what_an_interrupt_left_unsent_was_not_sent() -> None:
    out = io.StringIO()
    LiveView(Screen(out)).update("load", progress(1.0, 100, unsent=900))
    assert out.getvalue().startswith("load 1 s: 100 sent (100/s)")


def test_a_run_among_several_is_named() -> None:
    out = io.StringIO()
    LiveView(Screen(out), name="load-naive").update("load", progress(1.0, 100))
    assert out.getvalue().startswith("load-naive load 1 s: 100 sent (100/s)")


def test_on_a_terminal_there_is_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, Screen(stream) as screen:
        view = LiveView(screen)
        view.update("load", progress(1.0, 100))
        view.update("load", progress(2.0, 300))
        stream.flush()
        text = b""
        while select.select([ours], [], [], 0.2)[0]:
            text += os.read(ours, 65536)
    os.close(ours)
    shown = " ".join(text.decode().split())
    for part in (
        *("load, 2 s", "sent 300 200/s", "succeeded 295 200/s", "in flight 3"),
        *("TTFT 250 250 250", "own lateness - - -", "2 x HTTP 503: [b]busy"),
    ):
        assert part in shown
