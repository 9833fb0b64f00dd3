"""What a terminal shows while real workers run, and Ctrl-C typed into it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import time

import pytest

pytest.importorskip("torch")

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal and all that was written to it."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.text = ""

    def read(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.ours], [], [], left)[0]:
                try:
                    self.text += _CONTROL.sub("", os.read(self.ours, 65536).decode())
                except OSError:
                    return

    def shows(self, *parts: str, timeout_s: float = 90.0) -> bool:
        end = time.monotonic() + timeout_s
        while not all(re.search(part, self.text) for part in parts):
            if time.monotonic() > end:
                return False
            self.read(0.2)
        return True


@pytest.mark.timeout(300)
def test_figures_are_drawn_and_ctrl_c_drains(cli, experiment_file) -> None:
    terminal = Terminal()
    process = cli.start(
        "run", str(experiment_file), "--json", "--set", "measure.capacity_window_s=600",
        terminal=terminal.theirs,
    )  # fmt: skip
    os.close(terminal.theirs)
    shown = terminal.shows(
        r"prfaas: capacity at [\d.]+ req/s",
        r"phase +prfaas: capacity +\d+ of 610 s",
        r"succeeded +[1-9]",
        r"failed +0",
        r"in flight +[1-9]",
        r"link +prfaas->pd +[\d.]+ of [\d,]+ Gbps \(\d+%\)",
        r"TTFT, s +[\d.]+",
        r"TPOT, ms +[\d.]+",
    )
    os.write(terminal.ours, b"\x03")
    drained = terminal.shows("interrupted: no new requests", timeout_s=20)
    # A terminal that nobody reads would stop the run.
    end = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < end:
        terminal.read(0.2)
    if process.poll() is None:
        process.kill()
    out, _ = process.communicate()
    os.close(terminal.ours)
    assert shown and drained, terminal.text
    assert process.returncode == 130, terminal.text
    counts = json.loads(out)["configurations"][0]["phases"][0]["counts"]
    assert counts["offered"] == counts["succeeded"] + counts["failed"] + counts["unsent"]
    assert counts["unsent"] > 0 and counts["succeeded"] > 0
    assert "first tokens" not in terminal.text
