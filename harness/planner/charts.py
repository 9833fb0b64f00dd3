"""Fig 5 as a chart: the rates of both prefill stages over the threshold, and of both phases over
the split. Written as HTML that works offline, PNG or SVG, or as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.places import check_file
from harness.planner.search import CurvePoint, SplitPoint

SUFFIXES = (".html", ".png", ".svg")

REMOTE = "remote prefill full: Theta_prfaas / p"
LOCAL = "local prefill full: Theta_pd_p / (1 - p)"
DECODE = "decode full: Theta_pd_d"
PREFILL_BOTH = "prefill of both clusters"


def check_chart(path: Path) -> None:
    """Raises BadInput where `save_chart` could not write."""
    if path.suffix not in SUFFIXES:
        raise BadInput(f"--chart {path}: needs a name that ends in {', '.join(SUFFIXES)}")
    check_file("--chart", path)


def save_chart(
    path: Path, curves: Sequence[CurvePoint], splits: Sequence[SplitPoint], title: str
) -> None:
    """Writes both panels to `path`, by its suffix. Raises BadInput as `check_chart`."""
    check_chart(path)
    chart = _figure(curves, splits, title)
    if path.suffix == ".html":
        chart.save(str(path), inline=True)
    else:
        chart.save(str(path), scale_factor=2)


def _figure(curves: Sequence[CurvePoint], splits: Sequence[SplitPoint], title: str) -> Any:
    # Altair takes most of a second to import, and only a chart needs it.
    import altair as alt

    best_rate = max(point.requests_per_s for point in curves)
    best = next(point for point in curves if point.requests_per_s == best_rate)
    ceiling = 3 * best_rate
    rows = [
        {"x": point.threshold_tokens, "rate": rate, "curve": name}
        for point in curves
        for name, rate in (
            (REMOTE, point.prfaas_per_s),
            (LOCAL, point.prefill_per_s),
            (DECODE, point.decode_per_s),
        )
        if rate is not None and rate <= ceiling
    ]
    by_threshold = (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X("x:Q", title="threshold t, tokens"),
            y=alt.Y("rate:Q", title="requests/s at which it is full"),
            color=alt.Color("curve:N", title=None, legend=alt.Legend(orient="bottom", columns=1)),
        )
    )
    mark = [{"x": best.threshold_tokens, "rate": best_rate}]
    label = f"t = {best.threshold_tokens:,.0f}: {best_rate:.3f} req/s"
    crossing = alt.Chart(alt.Data(values=mark)).mark_point(size=90, filled=True, color="black")
    text = alt.Chart(alt.Data(values=mark)).mark_text(align="left", dx=10, dy=-12, text=label)
    at = {"x": "x:Q", "y": "rate:Q"}
    left = alt.layer(by_threshold, crossing.encode(**at), text.encode(**at))
    split_rows = [
        {"split": f"{point.split.n_prefill}/{point.split.n_decode}", "rate": rate, "curve": name}
        for point in splits
        for name, rate in (
            (PREFILL_BOTH, point.prefill_total_per_s),
            (DECODE, point.decode_per_s),
        )
    ]
    right = (
        alt.Chart(alt.Data(values=split_rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("split:N", title="N_p / N_d, each at its best t", sort=None),
            y=alt.Y("rate:Q", title="requests/s"),
            color=alt.Color("curve:N", title=None, legend=alt.Legend(orient="bottom", columns=1)),
        )
    )
    panels = alt.hconcat(
        left.properties(width=420, height=280, title="Eq 7: threshold"),
        right.properties(width=300, height=280, title="Eq 8: split"),
    )
    return panels.resolve_scale(color="independent").properties(title=title)


def text_chart(curves: Sequence[CurvePoint], width: int = 64, height: int = 12) -> str:
    """Both prefill curves over the threshold: `r` remote, `l` local, `*` where they meet."""
    rates = [rate for point in curves for rate in (point.prfaas_per_s, point.prefill_per_s) if rate]
    # Without local prefill nothing gets through at any threshold above the shortest prompt.
    top = 2 * max(point.requests_per_s for point in curves) or max(rates, default=1.0)
    least, most = curves[0].threshold_tokens, curves[-1].threshold_tokens
    cells = [[" "] * width for _ in range(height)]

    def plot(threshold: float, rate: float | None, mark: str) -> None:
        if rate is None or rate > top:
            return
        column = round((threshold - least) / max(1, most - least) * (width - 1))
        row = height - 1 - min(height - 1, int(rate / top * height))
        taken = cells[row][column]
        cells[row][column] = mark if taken in (" ", mark) else "*"

    for point in curves:
        plot(point.threshold_tokens, point.prfaas_per_s, "r")
        plot(point.threshold_tokens, point.prefill_per_s, "l")
    lines = []
    for i, row in enumerate(cells):
        shown = f"{top * (height - i) / height:6.2f}" if i % 3 == 0 else " " * 6
        lines.append(f"{shown} |{''.join(row).rstrip()}")
    lines.append(f"{0:6.2f} +{'-' * width}")
    ends = f"{least:,.0f}", f"{most:,.0f}"
    lines.append(
        " " * 8 + ends[0] + "threshold, tokens".center(width - len("".join(ends))) + ends[1]
    )
    lines.append(" " * 8 + "requests/s at which remote (r) and local (l) prefill are full; * both")
    return "\n".join(lines)
