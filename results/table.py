"""The comparison table: configurations as columns, each measured figure with its prediction.

`comparison_rows` is the content, as text; `plain` and `rich_table` only lay it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from results.summary import (
    NONE,
    ConfigurationSummary,
    Latency,
    Measured,
    PhaseSummary,
    RunSummary,
)

if TYPE_CHECKING:
    from rich.table import Table

ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """A label with its unit, and one text cell a configuration. `group` starts a new block."""

    label: str
    cells: tuple[str, ...]
    group: bool = False


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, without exponents; `-` for none."""
    if value is None:
        return ABSENT
    if value == 0:
        return "0"
    magnitude = abs(value)
    decimals = 0
    while decimals < 9 and magnitude < 10 ** (digits - 1 - decimals):
        decimals += 1
    # 99.96 rounds to 100, which has a digit more before the point.
    if decimals and round(magnitude, decimals) >= 10 ** (digits - decimals):
        decimals -= 1
    return f"{value:,.{decimals}f}"


def with_prediction(figure: Measured, factor: float = 1.0) -> str:
    """`measured [predicted]` in paper units times `factor`; only what there is."""
    measured = number(None if figure.paper is None else figure.paper * factor)
    if figure.predicted is None:
        return measured
    return f"{measured} [{number(figure.predicted * factor)}]"


def _instances(each: ConfigurationSummary) -> str:
    return "/".join(
        ABSENT if count is None else str(count) for count in (each.n_prfaas, each.n_p, each.n_d)
    )


def comparison_rows(run: RunSummary) -> list[Row]:
    """All rows that have a figure in any configuration."""
    columns = run.configurations

    def row(
        label: str, cell: Callable[[ConfigurationSummary], str], group: bool = False
    ) -> list[Row]:
        cells = tuple(cell(each) for each in columns)
        return [] if all(text == ABSENT for text in cells) else [Row(label, cells, group)]

    def phase_row(
        label: str, phase: str, cell: Callable[[PhaseSummary], str], group: bool = False
    ) -> list[Row]:
        def of(each: ConfigurationSummary) -> str:
            found = each.phase(phase) or each.phase(run.latency_phase)
            return ABSENT if found is None else cell(found)

        return row(label, of, group)

    def latency_rows(
        name: str, get: Callable[[PhaseSummary], Latency], unit: str, factor: float
    ) -> list[Row]:
        rows = []
        for statistic in ("mean", "p50", "p90", "p99"):
            shown = statistic if statistic == "mean" else statistic.upper()
            cells = []
            for each in columns:
                phase = each.phase(run.latency_phase)
                found = getattr(get(phase), statistic) if phase else NONE
                cells.append(with_prediction(found, factor))
            rows.append(Row(f"{name} {shown}, {unit}", tuple(cells), statistic == "mean"))
        # A percentile that no configuration has samples for is shown as missing, not left out.
        measured = any(cell != ABSENT for each in rows for cell in each.cells)
        return rows if measured else []

    scaled = run.scale.time != 1.0
    at_rate = "" if run.load_rate is None else f" at {number(run.load_rate)} req/s"
    rows = row("instances prfaas/p/d", _instances)
    rows += row("threshold, tokens", lambda each: _whole(each.threshold_tokens))
    rows += row("capacity, req/s", lambda each: with_prediction(each.capacity), True)
    rows += row("  95 % interval", lambda each: _interval(each.capacity))
    if scaled:
        rows += row("  raw, req/s", lambda each: number(each.capacity.raw))
    rows += row("  / homogeneous", lambda each: with_prediction(each.capacity_ratio))
    rows += row("SLO rate, req/s", lambda each: with_prediction(each.slo_rate))
    rows += row("zero-queue TTFT mean, s", lambda each: with_prediction(each.zero_queue_ttft.mean))
    rows += row("zero-queue TTFT P90, s", lambda each: with_prediction(each.zero_queue_ttft.p90))
    ttft = latency_rows("TTFT", lambda phase: phase.ttft, "s", 1.0)
    rows += [Row(r.label + (at_rate if at == 0 else ""), r.cells, r.group) for at, r in
             enumerate(ttft)]  # fmt: skip
    rows += latency_rows("TPOT", lambda phase: phase.tpot, "ms", 1e3)[:1]
    latency = run.latency_phase
    rows += phase_row("goodput, %", latency, lambda phase: with_prediction(phase.goodput, 100))
    for label, name, factor in (
        ("egress mean, Gbps", "mean_gbps", 1.0),
        ("egress peak, Gbps", "peak_gbps", 1.0),
        ("egress mean, % of link", "mean_share", 100.0),
        ("egress peak, % of link", "peak_share", 100.0),
    ):
        rows += phase_row(
            label,
            run.capacity_phase,
            lambda phase, n=name, f=factor: with_prediction(  # type: ignore[misc]
                getattr(phase.egress, n), f
            ),
            name == "mean_gbps",
        )
    rows += phase_row(
        "offloaded, %",
        run.capacity_phase,
        lambda phase: with_prediction(phase.offloaded_share, 100),
    )
    rows += row("offered", lambda each: _total(each, "offered"), True)
    for name in ("succeeded", "failed", "unsent"):
        rows += row(f"  {name}", lambda each, n=name: _total(each, n))  # type: ignore[misc]
    rows += row("verified", _verified)
    return rows


def _whole(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def _interval(figure: Measured) -> str:
    if figure.low is None or figure.high is None:
        return ABSENT
    return f"{number(figure.low)}..{number(figure.high)}"


def _total(each: ConfigurationSummary, name: str) -> str:
    return str(sum(getattr(phase.counts, name) for phase in each.phases))


def _verified(each: ConfigurationSummary) -> str:
    equal = sum(phase.counts.verified for phase in each.phases)
    wrong = sum(phase.counts.mismatched for phase in each.phases)
    if equal + wrong == 0:
        return ABSENT
    return f"{equal} of {equal + wrong}" if wrong else f"all {equal}"


def notes(run: RunSummary) -> list[str]:
    """What a reader must know to read the table: units, link, scale, verdict, warnings."""
    lines = ["measured [model]; seconds, rates and Gbps in units of the modelled system"]
    scale = run.scale
    if (scale.time, scale.tokens, scale.bytes) != (1.0, 1.0, 1.0):
        lines.append(
            f"scale: 1 run second = {number(scale.time)} modelled seconds, 1 output token = "
            f"{number(scale.tokens)} tokens, 1 byte on the link = {number(scale.bytes)} bytes"
        )
    if run.link.backend:
        parts = [f"link: {run.link.backend}"]
        if run.link.paper_rate_gbps is not None:
            parts.append(f"{number(run.link.paper_rate_gbps)} Gbps modelled")
        if run.link.rtt_s is not None:
            parts.append(f"RTT {number(run.link.rtt_s * scale.time * 1e3)} ms modelled")
        lines.append(", ".join(parts))
    if any(
        phase.ttft.p99.paper is None and phase.ttft.p99.n
        for each in run.configurations
        for phase in each.phases
        if phase.name == run.latency_phase
    ):
        lines.append("-: too few samples for this percentile, or not applicable")
    if not run.complete:
        lines.append("INCOMPLETE: the run was interrupted; figures are of what there is")
    if run.verdict != "ok":
        lines.append(f"verdict: {run.verdict}")
    lines += [f"warning: {text}" for text in run.warnings]
    for each in run.configurations:
        lines += [f"{each.name}: {text}" for text in each.notes]
    return lines


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned text: first column left, the rest right."""
    widths = [max(len(line[at]) for line in [header, *rows]) for at in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [text.rjust(width) for text, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([first, *rest]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [line(header), rule, *(line(each) for each in rows)]


def plain(run: RunSummary) -> str:
    """The table and its notes as text."""
    rows = comparison_rows(run)
    header = ["", *(each.name for each in run.configurations)]
    return "\n".join([*grid(header, [[r.label, *r.cells] for r in rows]), "", *notes(run)]) + "\n"


def rich_table(run: RunSummary) -> Table:
    """The table for a terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for each in run.configurations:
        table.add_column(each.name, justify="right")
    rows = comparison_rows(run)
    for at, each_row in enumerate(rows):
        last = at + 1 < len(rows) and rows[at + 1].group
        table.add_row(each_row.label, *map(_escape, each_row.cells), end_section=last)
    return table


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def show(run: RunSummary) -> None:
    """Print the table to standard output: laid out for a terminal, else as plain text."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(rich_table(run))
        for line in notes(run):
            console.print(line, highlight=False, markup=False)
    else:
        print(plain(run), end="")
