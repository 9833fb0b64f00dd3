"""A load run as text: the figures, what they mean, and what to know about them."""

from __future__ import annotations

from collections.abc import Iterator

from harness.load.execute import LoadDone
from results.metrics import DEFINITIONS, sample_floor
from results.summary import Latency, Measured, PhaseSummary
from results.table import number

_WIDTH = 26


def lines(done: LoadDone) -> Iterator[str]:
    """The report, one line at a time."""
    run = done.summary
    configuration = run.configurations[0]
    yield f"{run.name}: {run.model or 'a model the server did not name'}, {run.workload} workload"
    if done.search is not None:
        yield from _search(done)
    shown = configuration.phases[0] if configuration.phases else PhaseSummary("load")
    repeated = done.spec.repeats > 1 and done.search is None
    if done.search is not None and done.phases:
        shown = done.best.whole
        yield f"figures of the trial at {number(shown.offered_rate.raw)} req/s:"
    steady = None if repeated else _steady(done, shown.name)
    counts = shown.counts
    yield (
        f"{'requests':<{_WIDTH}}{counts.offered:,} offered = {counts.succeeded:,} succeeded + "
        f"{counts.failed:,} failed + {counts.unsent:,} unsent"
    )
    details = [
        f"{value:,} {name}"
        for name, value in (
            ("truncated", counts.truncated),
            ("short", counts.short),
            ("retried", counts.retried),
            ("without a TPOT", counts.one_chunk),
        )
        if value
    ]
    if details:
        yield f"{'  of these':<{_WIDTH}}{', '.join(details)}"
    yield f"{'':<{_WIDTH}}{'whole run':>24}{'steady window':>24}"
    for label, name in (
        ("offered, req/s", "offered_rate"),
        ("admitted, req/s", "admitted_rate"),
        ("achieved, req/s", "achieved_rate"),
        ("throughput, req/s", "throughput"),
    ):
        whole = getattr(shown, name)
        # Throughput is only defined within a steady window.
        first = "-" if name == "throughput" and not repeated else _cell(whole)
        second = _cell(shown.throughput) if name == "throughput" and steady else "-"
        yield f"{label:<{_WIDTH}}{first:>24}{second:>24}"
    if any((run.slo.ttft_s, run.slo.tokens_per_s, run.slo.e2e_s)):
        second = _cell(steady.goodput, 100) if steady else "-"
        yield f"{'goodput, %':<{_WIDTH}}{_cell(shown.goodput, 100):>24}{second:>24}"
    for label, name, unit, factor in (
        ("TTFT", "ttft", "ms", 1e3),
        ("TPOT", "tpot", "ms", 1e3),
        ("E2E", "e2e", "ms", 1e3),
    ):
        yield from _latency(label, unit, factor, getattr(shown, name), steady, name)
    yield from _gaps(done)
    if repeated:
        yield f"mean over {done.spec.repeats} repeats +- its 95 % interval"
    elif steady is None:
        yield "steady window             none: too few completions, or they never settled"
    elif shown.window is not None:
        begun, ended, end = shown.window.start_s, shown.window.end_s, shown.duration_s or 0.0
        yield (
            f"{'phases of the run, s':<{_WIDTH}}warm-up 0 to {number(begun)}, steady to "
            f"{number(ended)}, drain to {number(max(end, ended))}"
        )
    yield from _client(done)
    for kind, count in sorted(done.failures.items(), key=lambda pair: -pair[1])[:5]:
        yield f"failure x {count:<15,} {kind}"
    for warning in run.warnings:
        yield f"note                      {warning}"
    yield f"verdict                   {run.verdict}"


def definitions() -> Iterator[str]:
    """What the figures mean, and from how many samples a percentile is given."""
    for name in ("ttft", "tpot", "itl", "e2e", "goodput", "offered_rate", "admitted_rate",
                 "achieved_rate", "throughput", "percentile", "steady_window",
                 "interval"):  # fmt: skip
        unit, text = DEFINITIONS[name]
        yield f"{name.replace('_', ' ')}{f' ({unit})' if unit else ''}: {text}"
    floors = ", ".join(f"P{q * 100:g} {sample_floor(q)}" for q in (0.5, 0.9, 0.99))
    yield f"sample floors: {floors}"


def _cell(figure: Measured, factor: float = 1.0) -> str:
    if figure.raw is None:
        return "-"
    text = number(figure.raw * factor)
    if figure.low is not None and figure.high is not None:
        text += f" +- {number((figure.high - figure.low) / 2 * factor)}"
    return text


def _latency(
    label: str, unit: str, factor: float, whole: Latency, steady: PhaseSummary | None, name: str
) -> Iterator[str]:
    for statistic in ("mean", "p50", "p90", "p99"):
        first = _cell(getattr(whole, statistic), factor)
        second = "-"
        if steady is not None:
            second = _cell(getattr(getattr(steady, name), statistic), factor)
        shown = statistic if statistic == "mean" else statistic.upper()
        yield f"{f'{label} {shown}, {unit}':<{_WIDTH}}{first:>24}{second:>24}"


def _gaps(done: LoadDone) -> Iterator[str]:
    """ITL only where every chunk was one token."""
    phases, tally = done.phases, done.tally
    if done.search is not None and phases:
        # As the figures above: of one trial.
        phases = [done.best]
        tally = done.tallies[done.best.whole.name]
    gaps = tally.histograms["gap"]
    several = sum(each.client.several_a_chunk for each in phases)
    label = "chunk gap" if several else "ITL"
    for shown, value in (
        ("mean", gaps.mean()),
        ("P50", gaps.percentile(0.5)),
        ("P99", gaps.percentile(0.99)),
    ):
        text = number(None if value is None else value * 1e3)
        yield f"{f'{label} {shown}, ms':<{_WIDTH}}{text:>24}"


def _steady(done: LoadDone, phase: str) -> PhaseSummary | None:
    return next((each.steady for each in done.phases if each.whole.name == phase), None)


def _search(done: LoadDone) -> Iterator[str]:
    from harness.load.search import wilson

    assert done.search is not None
    for trial in done.search.trials:
        low, high = wilson(trial.met, trial.offered)
        limited = ", client-limited: not used" if trial.limited else ""
        yield (
            f"  {number(trial.rate):>8} req/s: {trial.met:,} of {trial.offered:,} met the SLO "
            f"({low:.1%} to {high:.1%}){limited}"
        )
    met, missed = done.search.bracket
    yield (
        f"highest rate at the SLO   {number(met)} req/s met it for {done.search.share:.0%} of the "
        f"requests, {number(missed)} did not"
    )


def _client(done: LoadDone) -> Iterator[str]:
    lateness = done.tally.histograms["lateness"].percentile(0.99)
    waits = done.tally.histograms["pool_wait"].percentile(0.99)
    clients = [each for of in done.summary.extra["clients"].values() for each in of]
    busiest = max((each["cpu_s"] / max(each["duration_s"], 1e-9) for each in clients), default=0.0)
    blocked = max(
        (each["blocked_s"] / max(each["duration_s"], 1e-9) for each in clients), default=0.0
    )
    starved = max(
        (each["core_wait_s"] / max(each["duration_s"], 1e-9) for each in clients), default=0.0
    )

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{number(value * 1e3)} ms"

    yield (
        f"{'the client itself':<{_WIDTH}}own lateness P99 {ms(lateness)}, connection wait P99 "
        f"{ms(waits)}, loop blocked {blocked:.1%}, CPU {busiest:.0%} of a core, {starved:.1%} "
        "of the time ready and without one"
    )
