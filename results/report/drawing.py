"""What all charts share: size, colours by configuration, axes, data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from results.report import theme
from results.report.data import RunData

Spec = dict[str, Any]

_HEIGHT = 260


def finish(chart: Any, width: int, height: int = _HEIGHT) -> Spec:
    made = chart.properties(width=width, height=height).to_dict()
    # Room for labels where the reader's fonts are wider than those measured here.
    made["padding"] = {"left": 14, "right": 14, "top": 4, "bottom": 4}
    made["autosize"] = {"type": "fit", "contains": "padding"}
    made["config"] = theme.config()
    return dict(made)


def names_of(run: RunData) -> list[str]:
    return [each.name for each in run.summary.configurations]


@dataclass(frozen=True, slots=True)
class Style:
    """Colour, dash and shape of each of `shown` by its place in `names`: alike in all charts."""

    names: tuple[str, ...]
    shown: tuple[str, ...]
    width: int

    def _scale(self, values: Sequence[Any]) -> alt.Scale:
        places = [self.names.index(name) % len(values) for name in self.shown]
        return alt.Scale(domain=list(self.shown), range=[values[place] for place in places])

    def colour(self, legend: bool = True) -> alt.Color:
        return alt.Color(
            "name:N",
            scale=self._scale(theme.SERIES),
            legend=legend_for(self.width) if legend else None,
            sort=None,
        )

    def dash(self) -> alt.StrokeDash:
        scale = self._scale([list(dash) for dash in theme.DASHES])
        return alt.StrokeDash("name:N", scale=scale, sort=None)

    def shape(self) -> alt.Shape:
        return alt.Shape("name:N", scale=self._scale(theme.SHAPES), sort=None)


def legend_for(width: int) -> alt.Legend:
    return alt.Legend(columns=2) if width < 500 else alt.Legend()


def style_of(run: RunData, rows: Sequence[Mapping[str, Any]], width: int) -> Style:
    names = tuple(names_of(run))
    present = {row["name"] for row in rows}
    return Style(names, tuple(name for name in names if name in present), width)


def x_axis(field: str, title: str, width: int, **scale: Any) -> alt.X:
    return alt.X(
        field,
        title=title,
        axis=alt.Axis(tickCount=max(4, width // 90)),
        scale=alt.Scale(**scale),
    )


def values_of(rows: Sequence[Mapping[str, Any]]) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])
