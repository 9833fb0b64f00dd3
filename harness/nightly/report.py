"""What a night is told as: Markdown for a CI summary, JUnit XML, and a page with trends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from xml.etree import ElementTree

from harness.nightly.judge import FigureResult, Night
from results.gate import Outcome
from results.history import Row
from results.report import document, theme
from results.report.trends import trend_svg
from results.table import number

#: Nights that a trend shows.
SHOWN_NIGHTS = 120


def _percent(share: float) -> str:
    return f"{share * 100:+.2f} %"


def headline(night: Night) -> str:
    """One line: what the night found."""
    said = []
    if night.regressions:
        said.append(f"{len(night.regressions)} regressed")
    if night.drifts:
        said.append(f"{len(night.drifts)} drifted")
    if night.failures:
        said.append(f"failed: {', '.join(night.failures)}")
    judged = sum(each.judgement.outcome is not Outcome.UNJUDGED for each in night.figures)
    return "; ".join(said) if said else f"no regression in {judged} figures"


def compared(night: Night) -> str:
    """What was compared with what, and how much history there is to see a drift in."""
    commits = night.commits
    text = (
        f"Candidate {_short(commits.candidate)} against baseline {_short(commits.base)} "
        f"({commits.revision}), in turn on {commits.host}."
    )
    if not night.nights_before:
        return (
            f"{text} This is the first night of this history: figures are judged against that "
            "baseline only, and drift once there are nights enough."
        )
    nights = "night is" if night.nights_before == 1 else "nights are"
    return f"{text} {night.nights_before} earlier {nights} in the history."


def _short(commit: str) -> str:
    return commit[:12] + (" with uncommitted changes" if commit.endswith("+") else "")


def gate_sentence(each: FigureResult) -> str:
    """Why a figure is called a regression."""
    verdict = each.judgement
    why = "compared exactly" if verdict.p is None else f"p = {verdict.p:.2g}"
    return (
        f"{each.part} {each.metric} is worse by {_percent(verdict.worse)}: "
        f"{number(each.base, 4)} -> {number(each.candidate, 4)} {each.unit}".rstrip()
        + f" ({why}, {verdict.pairs} pairs)"
    )


def drift_sentence(each: FigureResult) -> str:
    """What level shift was told tonight."""
    assert each.drift is not None
    kind = "worse" if each.drift_worse else "better"
    return (
        f"{each.part} {each.metric} has been {kind} by {_percent(each.drift.change)} "
        f"since {each.began} (z = {each.drift.z:.1f})"
    )


def markdown(night: Night) -> str:
    """For a CI job summary."""
    lines = [
        f"## Nightly {night.stamp}: {headline(night)}",
        "",
        compared(night),
        "",
    ]
    for name, why in night.failures.items():
        lines.append(f"- **{name} failed**: {why}")
    lines += [f"- **regression**: {gate_sentence(each)}" for each in night.regressions]
    lines += [f"- **drift**: {drift_sentence(each)}" for each in night.drifts]
    lines += [
        f"- improvement: {drift_sentence(each)}"
        for each in night.figures
        if each.drift is not None and not each.drift_worse
    ]
    if lines[-1]:
        lines.append("")
    lines += [
        "| part | figure | baseline | candidate | worse by | p | pairs | verdict |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for each in shown(night):
        verdict = each.judgement
        p = "exact" if verdict.p is None else f"{verdict.p:.2g}"
        if verdict.outcome is Outcome.UNJUDGED:
            p = ""
        lines.append(
            f"| {each.part} | {each.metric} | {number(each.base, 4)} | "
            f"{number(each.candidate, 4)} {each.unit} | {_percent(verdict.worse)} | {p} | "
            f"{verdict.pairs} | {verdict.outcome.value} |"
        )
    lines += ["", *unchanged(night)]
    return "\n".join(lines).rstrip() + "\n"


def _same(each: FigureResult) -> bool:
    return each.judgement.p is None and each.base == each.candidate and each.drift is None


def shown(night: Night) -> list[FigureResult]:
    """The figures that a table lists: all but those that are exactly as in the baseline."""
    return [each for each in night.figures if not _same(each)]


def unchanged(night: Night) -> list[str]:
    """A line for each part with figures that are exactly as in the baseline."""
    counts = Counter(each.part for each in night.figures if _same(each))
    return [
        f"{part}: {count} figures exactly as in the baseline." for part, count in counts.items()
    ]


def junit(night: Night) -> str:
    """A suite a part and a test case a figure; a failed part is an error."""
    root = ElementTree.Element("testsuites", name=f"nightly {night.stamp}")
    for part in night.parts:
        chosen = [each for each in night.figures if each.part == part]
        failed = [
            each
            for each in chosen
            if each.judgement.outcome is Outcome.REGRESSION or (each.drift and each.drift_worse)
        ]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=part,
            tests=str(len(chosen) + (part in night.failures)),
            failures=str(len(failed)),
            errors=str(int(part in night.failures)),
        )
        for each in chosen:
            case = ElementTree.SubElement(suite, "testcase", classname=part, name=each.metric)
            if each.judgement.outcome is Outcome.REGRESSION:
                told = ElementTree.SubElement(case, "failure", type="regression")
                told.set("message", gate_sentence(each))
            if each.drift is not None and each.drift_worse:
                told = ElementTree.SubElement(case, "failure", type="drift")
                told.set("message", drift_sentence(each))
            if each.judgement.outcome is Outcome.UNJUDGED:
                ElementTree.SubElement(case, "skipped", message="too few pairs to judge")
        if part in night.failures:
            case = ElementTree.SubElement(suite, "testcase", classname=part, name="run")
            ElementTree.SubElement(case, "error", message=night.failures[part])
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def page(night: Night, past: Sequence[Row], shifts: Mapping[tuple[str, str], list[int]]) -> str:
    """One offline page: the night's table, and a trend of each figure over the nights. `past` holds
    tonight's rows too; `shifts` the nights (indices) at which each figure's level moved.
    """
    title = f"prfaas-bench nightly {night.stamp}"
    by_figure: dict[tuple[str, str], list[Row]] = {}
    for row in past:
        by_figure.setdefault((row.part, row.metric), []).append(row)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lede">{escape(headline(night))}. {escape(compared(night))}</p>',
        "<main>",
        _alerts(night),
        _table(night),
    ]
    for at, each in enumerate(shown(night)):
        rows = by_figure.get((each.part, each.metric), [])
        if len(rows) >= 2:
            drawn = trend_svg(
                rows[-SHOWN_NIGHTS:],
                [index - max(0, len(rows) - SHOWN_NIGHTS)
                 for index in shifts.get((each.part, each.metric), [])],
            )  # fmt: skip
            body.append(_trend(each, drawn, at, len(rows)))
    body.append("</main>")
    return document.whole(title, "".join(body))


def _alerts(night: Night) -> str:
    said = [f"{name} failed: {why}" for name, why in night.failures.items()]
    said += [gate_sentence(each) for each in night.regressions]
    said += [drift_sentence(each) for each in night.figures if each.drift is not None]
    if not said:
        return ""
    items = "".join(f'<li class="bad">{escape(text)}</li>' for text in said)
    return f"<ul>{items}</ul>"


def _table(night: Night) -> str:
    head = "".join(
        f'<th scope="col">{text}</th>'
        for text in ("figure", "baseline", "candidate", "unit", "worse by", "pairs", "verdict")
    )
    rows = []
    for each in shown(night):
        verdict = each.judgement
        kind = ' class="bad"' if verdict.outcome is Outcome.REGRESSION else ""
        cells = (
            number(each.base, 4),
            number(each.candidate, 4),
            each.unit,
            _percent(verdict.worse),
            str(verdict.pairs),
            verdict.outcome.value,
        )
        inner = "".join(f"<td{kind}>{escape(text)}</td>" for text in cells)
        rows.append(
            f'<tr><th scope="row">{escape(each.part)} {escape(each.metric)}</th>{inner}</tr>'
        )
    return (
        '<h2 id="tonight">Tonight</h2><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Figures of the night"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        + "".join(f"<p>{escape(line)}</p>" for line in unchanged(night))
    )


def _trend(each: FigureResult, drawn: tuple[str, str], at: int, nights: int) -> str:
    reading = f"{nights} nights; tonight {number(each.candidate, 4)} {each.unit}".rstrip()
    if each.drift is not None:
        reading += f"; {drift_sentence(each)}"
    title = f"{each.part} {each.metric}"
    wide, narrow = (theme.for_page(svg, f"t{at}-{i}") for i, svg in enumerate(drawn))
    return f"<h3>{escape(title)}</h3>{document.figure(title, reading, wide, narrow)}"
