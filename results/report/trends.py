"""A figure over the nights: baseline and candidate, and where a level shift began."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import vl_convert

from results.history import Row
from results.report import theme

_WIDTHS = (880, 340)


def trend_svg(rows: Sequence[Row], shifts: Sequence[int]) -> tuple[str, str]:
    """(wide, narrow) SVG with the theme's marker colours. `shifts` are indices into `rows`."""
    wide, narrow = (str(vl_convert.vegalite_to_svg(_spec(rows, shifts, w))) for w in _WIDTHS)
    return wide, narrow


def _spec(rows: Sequence[Row], shifts: Sequence[int], width: int) -> dict[str, Any]:
    values = [
        {"night": at, "side": side, "value": getattr(row, side)}
        for at, row in enumerate(rows, 1 - len(rows))
        for side in ("base", "candidate")
        if getattr(row, side) is not None
    ]
    sides = ["base", "candidate"]
    unit = rows[-1].unit or "value"
    line = (
        alt.Chart(alt.Data(values=values))
        .mark_line(point=alt.OverlayMarkDef(size=22), strokeWidth=1.5)
        .encode(
            x=alt.X("night:Q", title="nights before this one", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("value:Q", title=unit, scale=alt.Scale(zero=False)),
            color=alt.Color(
                "side:N", scale=alt.Scale(domain=sides, range=[theme.MUTED, theme.SERIES[0]])
            ),
            strokeDash=alt.StrokeDash(
                "side:N", scale=alt.Scale(domain=sides, range=[[3, 3], [1, 0]])
            ),
        )
    )
    marks = [{"night": at + 1 - len(rows) - 0.5} for at in shifts if 0 < at < len(rows)]
    rule = (
        alt.Chart(alt.Data(values=marks))
        .mark_rule(color=theme.SERIES[1], strokeWidth=2)
        .encode(x="night:Q")
    )
    layered = alt.layer(rule, line) if marks else alt.layer(line)
    spec: dict[str, Any] = layered.properties(width=width, height=150).to_dict()
    spec["autosize"] = {"type": "fit", "contains": "padding"}
    spec["padding"] = {"left": 14, "right": 14, "top": 4, "bottom": 4}
    spec["config"] = theme.config()
    return spec
