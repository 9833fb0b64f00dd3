"""Colours, and how one drawing serves a light page, a dark page and a PNG.

Charts are drawn with marker colours that occur nowhere else. In the page each becomes a CSS
variable, which the page sets for light and for dark; in a PNG each becomes its light value. The
series colours are told apart with every common colour blindness, and lines differ in dash and point
shape as well.
"""

from __future__ import annotations

import re
from typing import Any

INK, MUTED, GRID, SURFACE = "#0a0a01", "#0a0a02", "#0a0a03", "#0a0a04"
SERIES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3])
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

#: marker -> (CSS variable, light value, dark value)
VARIABLES: dict[str, tuple[str, str, str]] = {
    INK: ("--ink", "#1b1f24", "#e8eaed"),
    MUTED: ("--muted", "#57606a", "#a8b0ba"),
    GRID: ("--grid", "#d8dee4", "#3a414a"),
    SURFACE: ("--surface", "#ffffff", "#14181d"),
    SERIES[0]: ("--s1", "#0072b2", "#5ab4e8"),
    SERIES[1]: ("--s2", "#c2500a", "#f39455"),
    SERIES[2]: ("--s3", "#00805d", "#3ecba2"),
    SERIES[3]: ("--s4", "#9a4a80", "#e3a5cb"),
    SERIES[4]: ("--s5", "#8a6d00", "#e6bf4d"),
    SERIES[5]: ("--s6", "#4a5568", "#b6c2d1"),
}

FONT = "system-ui, sans-serif"


def css_variables(dark: bool) -> str:
    return "".join(f"{name}:{values[dark]};" for name, *values in VARIABLES.values())


def for_page(svg: str, prefix: str) -> str:
    """Markers to CSS variables, and ids made unique in the page (charts number their own)."""
    for marker, (name, _, _) in VARIABLES.items():
        svg = svg.replace(marker, f"var({name})")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    return re.sub(r'(url\(["\']?#|href="#)', rf"\g<1>{prefix}-", svg)


def for_png(svg: str) -> str:
    for marker, (_, light, _) in VARIABLES.items():
        svg = svg.replace(marker, light)
    return svg


def config() -> dict[str, Any]:
    """Vega-Lite configuration of every chart."""
    axis = {
        "titlePadding": 10,
        "labelColor": MUTED,
        "titleColor": INK,
        "domainColor": MUTED,
        "tickColor": MUTED,
        "gridColor": GRID,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelFont": FONT,
        "titleFont": FONT,
        "labelLimit": 140,
    }
    return {
        "background": None,
        "view": {"stroke": None},
        "axis": axis,
        "legend": {
            "orient": "top",
            "labelColor": INK,
            "titleColor": MUTED,
            "labelFontSize": 12,
            "labelFont": FONT,
            "titleFont": FONT,
            "symbolStrokeWidth": 2,
            "columnPadding": 14,
            "title": None,
            "labelLimit": 220,
        },
        "title": {"color": INK, "font": FONT, "fontSize": 14, "anchor": "start"},
        "text": {"color": INK, "font": FONT, "fontSize": 12},
        "range": {"category": list(SERIES)},
        "line": {"strokeWidth": 2},
        "point": {"filled": True, "size": 60},
        "rule": {"color": MUTED},
    }
