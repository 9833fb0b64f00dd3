"""Progress: estimates that are honest, and plain lines off a terminal."""

from __future__ import annotations

import io

from harness.progress import Progress, estimate_s, in_words, rounded


def test_no_estimate_before_three_steps() -> None:
    assert estimate_s([10.0, 12.0], 5) is None
    assert in_words(None, 5) == "5 left"


def test_an_estimate_is_a_range_of_what_steps_took() -> None:
    assert estimate_s([10.0, 20.0, 30.0], 2) == (30.0, 50.0)
    assert in_words((30.0, 50.0), 2) == "30 s to 50 s left"
    assert in_words((601.0, 605.0), 2) == "about 10 min left"
    assert in_words((5.0, 9.0), 0) == "done"


def test_rounding_is_as_coarse_as_an_estimate() -> None:
    assert [rounded(s) for s in (1.0, 12.0, 59.0, 61.0, 5500.0)] == [
        "5 s", "10 s", "60 s", "1 min", "1.5 h",
    ]  # fmt: skip


def test_lines_off_a_terminal() -> None:
    now = 0.0

    def clock() -> float:
        return now

    out = io.StringIO()
    with Progress("suite", 5, stream=out, clock=clock, every_s=10.0) as progress:
        for part in "abcde":
            now += 6.0
            progress.advance(part)
    assert out.getvalue().splitlines() == [
        "suite 1/5 a, 4 left",
        "suite 3/5 c, about 10 s left",
        "suite 5/5 e, done",
    ]
