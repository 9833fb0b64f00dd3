"""The frame of a page, and its figures and tables: no scripts, no outside requests."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from results.report import theme


def whole(title: str, body: str) -> str:
    """A page of `body` (HTML) that follows the reader's colour scheme."""
    css = files("results.report").joinpath("report.css").read_text()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>'
        f":root{{{theme.css_variables(False)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{theme.css_variables(True)}}}}}"
        f"{css}</style></head><body>{body}</body></html>\n"
    )


def figure(title: str, reading: str, wide: str, narrow: str) -> str:
    """A drawing (SVG) in two widths, of which the page shows one, under its reading."""
    label = escape(f"{title}. {reading}", quote=True)
    return (
        f"<figure><figcaption>{escape(reading)}</figcaption>"
        f'<div class="wide" role="img" aria-label="{label}">{wide}</div>'
        f'<div class="narrow" role="img" aria-label="{label}">{narrow}</div></figure>'
    )


def table(rows: Sequence[Sequence[str]], label: str) -> str:
    """A table in a region that scrolls by itself; the first row is the heading."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows[1:]
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label, quote=True)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
