"""Puts a report together: one HTML page without scripts or outside requests, and PNGs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import vl_convert

from results import metrics, rundir, table
from results.fidelity import HEADER, Difference, cells, differences
from results.report import document, errors, theme
from results.report.data import RunData
from results.report.sections import SECTIONS, Section
from results.summary import RunSummary
from results.whole import write_whole

#: Drawing widths in pixels: for pages wider than a phone, for phones, and for PNGs.
WIDE, NARROW, PNG_WIDTH = 880, 340, 900

#: Events listed for one configuration.
SHOWN_EVENTS = 80


@dataclass(frozen=True, slots=True)
class Drawn:
    """A section of one run, ready for the page."""

    section: Section
    wide: str
    narrow: str
    reading: str
    rows: list[list[str]]


def _svg(spec: dict[str, Any]) -> str:
    return str(vl_convert.vegalite_to_svg(spec))


def draw(run: RunData, prefix: str) -> list[Drawn]:
    """Every section that has something to show."""
    drawn = []
    for section in SECTIONS:
        wide, narrow = section.chart(run, WIDE), section.chart(run, NARROW)
        if wide is None or narrow is None:
            continue
        drawn.append(
            Drawn(
                section,
                theme.for_page(_svg(wide), f"{prefix}-{section.key}-w"),
                theme.for_page(_svg(narrow), f"{prefix}-{section.key}-n"),
                section.reading(run),
                _numbers(wide),
            )
        )
    return drawn


def _numbers(spec: dict[str, Any], limit: int = 60) -> list[list[str]]:
    """The chart's largest data set as rows with a header; thinned out to `limit` rows."""
    sets = [spec.get("data"), *(layer.get("data") for layer in spec.get("layer", ()))]
    values: list[dict[str, Any]] = max(
        (each["values"] for each in sets if each and "values" in each), key=len, default=[]
    )
    if not values:
        return []
    columns = [key for key in values[0] if key not in ("order", "label")]
    titles = _titles(spec)
    step = max(1, -(-len(values) // limit))
    rows = [[_cell(row.get(key)) for key in columns] for row in values[::step]]
    return [[_HEADINGS.get(key) or titles.get(key, key) for key in columns], *rows]


_HEADINGS = {
    "name": "configuration",
    "p90": "P90, s",
    "mean": "mean, s",
    "model": "model",
    "low": "95 % from",
    "high": "95 % to",
    "error": "error, %",
}


def _titles(spec: dict[str, Any]) -> dict[str, str]:
    """Field -> what its axis says, less what is about the drawing."""
    found: dict[str, str] = {}
    for part in (spec, *spec.get("layer", ())):
        for channel in ("x", "y"):
            encoded = part.get("encoding", {}).get(channel, {})
            if encoded.get("title"):
                found.setdefault(encoded["field"], encoded["title"].partition(" (")[0])
    return found


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return table.number(value, 4) if isinstance(value, int | float) else str(value)


def page(runs: Sequence[RunData], drawn: Sequence[Sequence[Drawn]]) -> str:
    """The whole page."""
    title = f"prfaas-bench: {', '.join(dict.fromkeys(run.summary.name for run in runs))}"
    body = [
        f'<a class="skip" href="#main">Skip to the comparison</a><h1>{escape(title)}</h1>',
        f'<p class="lede">{escape(_lede(runs))}</p>',
        _navigation(runs, drawn),
        '<main id="main">',
    ]
    body.append(_between_runs(runs))
    for at, (run, sections) in enumerate(zip(runs, drawn, strict=True)):
        body.append(_run(run, sections, at, many=len(runs) > 1))
    body += [_definitions(), "</main>", "<footer><p>Written by prfaas-bench. Everything on this "
             "page is in the run directories as Parquet and JSON.</p></footer>"]  # fmt: skip
    return document.whole(title, "".join(body))


def _lede(runs: Sequence[RunData]) -> str:
    said = []
    for run in runs:
        found = run.summary
        text = f"{found.name}: {found.mode}"
        if found.workload:
            text += f", {found.workload} workload"
        if found.seed is not None:
            text += f", seed {found.seed}"
        if found.commit:
            text += f", commit {found.commit[:12]}"
        said.append(text)
    return "; ".join(said) + "."


def between_runs(runs: Sequence[RunData]) -> list[Difference]:
    """Differences of an emulated run from a simulated one; [] unless `runs` are those two, of one
    experiment.
    """
    found = {run.summary.mode: run.summary for run in runs}
    same = {(each.name, each.workload, each.seed) for each in found.values()}
    if found.keys() != {"emulate", "simulate"} or len(runs) != 2 or len(same) != 1:
        return []
    return differences(found["emulate"], found["simulate"])


def _between_runs(runs: Sequence[RunData]) -> str:
    rows = between_runs(runs)
    if not rows:
        return ""
    reading = errors.between_runs_reading(rows)
    drawn = [
        theme.for_page(_svg(errors.between_runs(rows, width)), f"between-{width}")
        for width in (WIDE, NARROW)
    ]
    return (
        '<section aria-labelledby="between"><h2 id="between">Emulate against simulate</h2>'
        + _unlike(runs)
        + document.figure("Emulate against simulate", reading, *drawn)
        + document.table([HEADER, *map(cells, rows)], "Emulate against simulate")
        + "</section>"
    )


def _unlike(runs: Sequence[RunData]) -> str:
    """What the two experiments differ in beside the mode, and what only an emulated run uses."""
    every = [rundir.settings(run.path) for run in runs]
    keys = [
        f"{key} {every[0].get(key)} -> {every[1].get(key)}"
        for key in rundir.differing(every)
        if key != "mode" and not key.startswith("emulate.")
    ]
    if not keys:
        return ""
    return f'<p class="bad">{escape(f"The two experiments differ in {rundir.listed(keys)}.")}</p>'


def _navigation(runs: Sequence[RunData], drawn: Sequence[Sequence[Drawn]]) -> str:
    """A list of links a run, one for what stands before all runs, and one for what follows."""
    lists = [
        ['<li><a href="#between">Emulate against simulate</a></li>'] if between_runs(runs) else []
    ]
    for at, (run, sections) in enumerate(zip(runs, drawn, strict=True)):
        prefix = f"{run.summary.name} ({run.summary.mode}): " if len(runs) > 1 else ""
        items = [f'<li><a href="#r{at}">{escape(prefix)}Comparison</a></li>']
        items += [
            f'<li><a href="#r{at}-{each.section.key}">{escape(each.section.title)}</a></li>'
            for each in sections
        ]
        lists.append(items)
    last = '<li><a href="#definitions">Definitions</a></li>'
    if len(runs) > 1:
        lists.append([last])
    else:
        lists[-1].append(last)
    shown = "".join(f"<ul>{''.join(items)}</ul>" for items in lists if items)
    return f'<nav aria-label="Sections">{shown}</nav>'


def _run(run: RunData, sections: Sequence[Drawn], at: int, many: bool) -> str:
    heading = f"Comparison: {run.path.name} ({run.summary.mode})" if many else "Comparison"
    parts = [f'<section aria-labelledby="r{at}"><h2 id="r{at}">{escape(heading)}</h2>']
    # Whether the figures can be trusted comes before them.
    notes = sorted(table.notes(run.summary), key=lambda line: not _is_bad(line))
    bad = sum(map(_is_bad, notes))
    parts += [_note(line) for line in notes[:bad]]
    parts.append(_comparison(run.summary))
    parts += [_note(line) for line in notes[bad:]]
    for each in sections:
        parts.append(_figure(each, f"r{at}-{each.section.key}", run))
    parts.append("</section>")
    return "".join(parts)


def _is_bad(line: str) -> bool:
    return line.startswith(("verdict:", "INCOMPLETE"))


def _note(line: str) -> str:
    kind = "bad" if _is_bad(line) else "note"
    return f'<p class="{kind}">{escape(line)}</p>'


def _comparison(run: RunSummary) -> str:
    head = "".join(f'<th scope="col">{escape(each.name)}</th>' for each in run.configurations)
    rows = []
    for row in table.comparison_rows(run):
        kind = ' class="group"' if row.group else ""
        cells = "".join(f"<td>{_with_model(text)}</td>" for text in row.cells)
        rows.append(f'<tr{kind}><th scope="row">{escape(row.label.strip())}</th>{cells}</tr>')
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Comparison table">'
        f'<table><thead><tr><th scope="col">figure</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _with_model(text: str) -> str:
    measured, bracket, model = text.partition(" [")
    if not bracket:
        return escape(text)
    return f'{escape(measured)} <span class="model">[{escape(model)}</span>'


def _figure(each: Drawn, anchor: str, run: RunData) -> str:
    events = ""
    if each.section.key in ("threshold", "roles"):
        events = _events(run)
    return (
        f'<h3 id="{anchor}">{escape(each.section.title)}</h3>'
        + document.figure(each.section.title, each.reading, each.wide, each.narrow)
        + events
        + _details(each.rows)
    )


def _events(run: RunData) -> str:
    rows = []
    for name, events in run.events.items():
        rows += [
            [name, each.phase, f"{each.time_s / 60:.2f}", each.what]
            for each in events[:SHOWN_EVENTS]
        ]
        if len(events) > SHOWN_EVENTS:
            rows.append([name, "", "", f"and {len(events) - SHOWN_EVENTS} more"])
    if not rows:
        return ""
    return _details([["configuration", "phase", "minutes", "event"], *rows], "Events")


def _details(rows: Sequence[Sequence[str]], title: str = "Numbers of this chart") -> str:
    if not rows:
        return ""
    return f"<details><summary>{escape(title)}</summary>{document.table(rows, title)}</details>"


def _definitions() -> str:
    rows = [[name, unit, definition] for name, (unit, definition) in metrics.DEFINITIONS.items()]
    items = "".join(
        f"<dt><strong>{escape(name)}</strong>{f' ({escape(unit)})' if unit else ''}</dt>"
        f"<dd>{escape(definition)}</dd>"
        for name, unit, definition in rows
    )
    return f'<h2 id="definitions">Definitions</h2><dl>{items}</dl>'


def write_pngs(run: RunData, directory: Path) -> list[Path]:
    """One PNG a chart, with its title, on white, at twice the size for sharp print."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for section in SECTIONS:
        spec = section.chart(run, PNG_WIDTH)
        if spec is None:
            continue
        spec["title"] = {"text": section.title, "subtitle": "", "offset": 12}
        spec["background"] = theme.SURFACE
        spec["padding"] = 20
        path = directory / f"{section.key}.png"
        write_whole(path, vl_convert.svg_to_png(theme.for_png(_svg(spec)), scale=2.0))
        written.append(path)
    return written
