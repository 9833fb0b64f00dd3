"""The report: complete, self-contained, small, and right in a real browser."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import browser_page, chromium

from harness.cli.main import main
from results import metrics, rundir, summarise, summary
from results.recorder import Recorder
from results.records import RequestRecord, Status
from results.report import data, page, theme
from results.report.data import Curve, Extras
from results.rows import DecisionRow, InstanceRow, LinkRow
from results.rundir import Identity
from results.summary import (
    ConfigurationSummary,
    Latency,
    LinkSummary,
    Measured,
    RunSummary,
    SloSummary,
)

NAMES = ("homogeneous", "naive", "balanced", "prfaas")
PHASES = ("capacity", "latency", "load-0.5", "load-0.9")


def _records(at: int, phase: str, rng: np.random.Generator) -> list[RequestRecord]:
    made = []
    slow = 1.0 + 0.5 * (3 - at) + (0.8 if phase == "load-0.9" else 0.0)
    for i in range(120):
        record = RequestRecord(i, 0.5 * i, 4000, 64)
        record.sent_s, record.status, record.attempts = record.scheduled_s, Status.SUCCEEDED, 1
        record.prefill_cluster = "prfaas" if at and i % 2 else "pd"
        record.prefill_started_s = record.scheduled_s + float(rng.exponential(0.2 * slow))
        record.prefill_finished_s = record.prefill_started_s + float(rng.lognormal(0, 0.6)) * slow
        record.delivered_s = record.prefill_finished_s + 0.05
        record.admitted_s = record.first_token_s = record.delivered_s + 0.01
        record.token_runs = [(record.first_token_s, 0.025, 64)]
        record.last_token_s = record.ended_s = record.first_token_s + 63 * 0.025
        record.tokens_received = 64
        made.append(record)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose threshold and roles move, with a link that becomes busy."""
    rng = np.random.default_rng(4)
    made = rundir.create(
        tmp_path_factory.mktemp("runs"), Identity("bench", "emulate"), "seed = 1\n"
    )
    recorder = Recorder(made.path, {"seed": "1"})
    configurations = []
    for at, name in enumerate(NAMES):
        phases = []
        for phase in PHASES:
            records = _records(at, phase, rng)
            for record in records:
                recorder.request(record, name, phase)
            requests = metrics.from_records(records, remote=["prfaas"])
            phases.append(
                summarise.phase_summary(
                    phase,
                    requests,
                    window_s=metrics.steady_window(requests),
                    predicted={"ttft_mean": 2.0, "ttft_p90": 4.0},
                    slo=metrics.Slo(4.0, 0.026),
                )
            )
            for second in range(60):
                busy = "busy" if second > 30 and at else "free"
                sent = second * 10**8 * (at > 0)
                recorder.link(
                    LinkRow(second, "prfaas->pd", sent, 1e10, 8e8, 0.08, verdict=busy), name, phase
                )
                for i in range(8):
                    moved = name == "prfaas" and i == 3 and second > 40
                    role = "prefill" if i < 3 or moved else "decode"
                    recorder.instance(
                        InstanceRow(second, f"pd-{i}", "pd", role, queued=i, running=2), name, phase
                    )
                if name == "prfaas":
                    limit = 19_400.0 if second < 35 else 24_000.0
                    recorder.decision(
                        DecisionRow(second, 1, second, 99, 0, 0, limit, "pd", "pd-0", "pd-5", 1.0),
                        name,
                        phase,
                    )
        configurations.append(
            ConfigurationSummary(
                name,
                4 if at else None,
                9 - 2 * at,
                3,
                19_400.0 if at == 3 else None,
                capacity=Measured(
                    2.0 + 0.4 * at,
                    2.0 + 0.4 * at,
                    2.03 + 0.4 * at,
                    1.9 + 0.4 * at,
                    2.1 + 0.4 * at,
                    5,
                ),
                capacity_ratio=Measured(1 + 0.2 * at, 1 + 0.2 * at, 1 + 0.2 * at),
                zero_queue_ttft=Latency(),
                phases=tuple(phases),
            )
        )
    recorder.close()
    made.write_text(
        "summary.json",
        summary.to_json(
            RunSummary(
                "bench",
                "emulate",
                tuple(configurations),
                load_rate=2.0,
                seed=1,
                commit="0123abcd",
                link=LinkSummary("tbf", 10.0, 10.0, 0.004),
                slo=SloSummary(4.0, 40.0),
                workload="log-normal <script>alert(1)</script>",
                warnings=("one & only",),
            )
        ),
    )
    made.close(complete=True)
    return made.path


CURVE = Curve((1e4, 2e4, 3e4), (2.5, 3.2, 4.0), (9.0, 3.2, 1.9), (3.9, 3.9, 3.9))


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    extras = Extras(CURVE, {name: {"per 1,000 requests": 2.0} for name in NAMES})
    loaded = data.load(run, extras)
    return page.page([loaded], [page.draw(loaded, "r0")])


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: dict[str, int] = {}
        self.headings: list[str] = []
        self._heading = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self._heading = tag in ("h2", "h3")
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.links.append(value or "")

    def handle_data(self, text: str) -> None:
        if self._heading:
            self.headings.append(text)
            self._heading = False


def test_sections_in_order_and_the_table_first(html: str) -> None:
    parser = _Parser()
    parser.feed(html)
    assert parser.headings == [
        "Comparison",
        "Capacity against the model",
        "Time to first token at one offered rate",
        "Where the time to first token goes",
        "Time to first token over load",
        "Traffic on the link",
        "Utilisation of prefill instances at one offered rate",
        "Requests assigned for prefill",
        "Requests assigned to decode",
        "Routing threshold",
        "Roles of instances",
        "Threshold and capacity (Fig 5)",
        "Model and measurement",
        "Cost",
        "Definitions",
    ]
    assert html.index("<table>") < html.index("<svg")


def test_nothing_is_asked_from_outside_and_nothing_is_run(html: str) -> None:
    parser = _Parser()
    parser.feed(html)
    assert "script" not in parser.tags
    assert all(link.startswith("#") or link == "data:," for link in parser.links)
    assert "url(http" not in html and "@import" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert len(html.encode()) < 5_000_000


def test_ids_are_unique_and_links_lead_somewhere(html: str) -> None:
    parser = _Parser()
    parser.feed(html)
    assert len(parser.ids) == len(set(parser.ids))
    assert {link[1:] for link in parser.links if link.startswith("#")} <= set(parser.ids)
    for reference in re.findall(r"url\(#([^)]+)\)", html):
        assert reference in parser.ids


def test_every_drawn_colour_follows_the_scheme(html: str) -> None:
    for marker in theme.VARIABLES:
        assert marker not in html
    assert "var(--s4)" in html
    assert "prefers-color-scheme:dark" in html


def test_readings_say_what_the_charts_show(html: str) -> None:
    assert "prfaas sustains most, 3.20 requests/s, 1.60 times homogeneous" in html
    assert "The threshold moved between 19,400 and 24,000 tokens (1 change)" not in html
    assert "The threshold moved between 19,400 and 24,000 tokens (7 changes)" in html
    assert "threshold 19,400 -&gt; 24,000" in html
    assert "prefill instances 3 -&gt; 4" in html
    assert "link busy" in html


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(dark: bool) -> None:
    surface = theme.VARIABLES[theme.SURFACE][1 + dark]
    for marker in (theme.INK, theme.MUTED):
        assert _contrast(theme.VARIABLES[marker][1 + dark], surface) >= 4.5
    for marker in theme.SERIES:
        assert _contrast(theme.VARIABLES[marker][1 + dark], surface) >= 3.0


#: Linear RGB as people with each blindness see it (Machado et al. 2009, full severity).
_BLINDNESS = {
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


@pytest.mark.parametrize("kind", sorted(_BLINDNESS))
@pytest.mark.parametrize("dark", [False, True])
def test_the_four_configurations_differ_for_the_colour_blind(kind: str, dark: bool) -> None:
    seen = []
    for marker in theme.SERIES[:4]:
        colour = theme.VARIABLES[marker][1 + dark]
        srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        mixed = np.clip(np.array(_BLINDNESS[kind]) @ linear, 0, 1)
        seen.append(np.where(mixed <= 0.0031308, 12.92 * mixed, 1.055 * mixed ** (1 / 2.4) - 0.055))
    for i in range(4):
        for j in range(i):
            assert float(np.linalg.norm(seen[i] - seen[j])) > 0.1


def test_pngs(run: Path, tmp_path: Path) -> None:
    written = page.write_pngs(data.load(run), tmp_path)
    assert [path.name for path in written][:3] == ["capacity.png", "ttft.png", "split.png"]
    for path in written:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") >= 1600


def test_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "one.html"
    assert main(["report", str(run), "--out", str(out), "--no-png"]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert "no model curves" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "none")]) == 2


def test_two_runs_on_one_page_and_one_of_them_interrupted(run: Path) -> None:
    loaded = data.load(run)
    cut = replace(loaded, summary=replace(loaded.summary, complete=False))
    first, second = page.draw(loaded, "r0")[:2], page.draw(cut, "r1")[:2]
    text = page.page([loaded, cut], [first, second])
    parser = _Parser()
    parser.feed(text)
    assert len(parser.ids) == len(set(parser.ids))
    assert text.count("<h2") == 3
    assert text.count("INCOMPLETE") == 1


def test_a_run_that_was_interrupted_before_its_first_phase_has_a_page(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    found = summary.read(run)
    facts = {"scheduling": [[0.1, "pd-3 -> prefill"]], "phase_began_s": {"capacity": 0.0}}
    nothing = tuple(replace(each, phases=()) for each in found.configurations)
    cut = replace(
        found, configurations=nothing, complete=False, extra={"fleets": {"prfaas": facts}}
    )
    (copy / "summary.json").write_text(summary.to_json(cut))
    assert main(["report", str(copy), "--no-png"]) == 0
    assert "INCOMPLETE" in (copy / "report.html").read_text()


def test_emulate_and_simulate_of_one_experiment_are_held_against_each_other(run: Path) -> None:
    loaded = data.load(run)
    simulated = replace(loaded, summary=replace(loaded.summary, mode="simulate"))
    text = page.page([loaded, simulated], [[], []])
    assert '<h2 id="between">Emulate against simulate</h2>' in text
    assert "12 of the 12 figures with a limit are within it" in text
    other = replace(simulated, summary=replace(simulated.summary, workload="trace"))
    assert 'id="between"' not in page.page([loaded, other], [[], []])


def test_what_schedulers_did_is_told(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    told = [[30.0, "t 19400 -> 24000"], [40.0, "pd-3 -> prefill"], [9e9, "t 1 -> 2"]]
    found = replace(summary.read(run), extra={"fleets": {"prfaas": {"scheduling": told}}})
    phases = [
        replace(each, phases=tuple(replace(p, duration_s=60.0) for p in each.phases))
        for each in found.configurations
    ]
    found = replace(found, configurations=tuple(phases))
    (copy / "summary.json").write_text(summary.to_json(found))
    loaded = data.load(copy)
    told = [each.what for each in loaded.events["prfaas"] if each.phase == "capacity"]
    assert told == ["threshold 19,400 -> 24,000", "link busy", "pd-3 -> prefill"]
    # Phases of a minute, one after another.
    assert list(loaded.begins_s.values()) == [0.0, 60.0, 120.0, 180.0]


def test_what_schedulers_did_is_told_of_every_phase(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    began_s = {"capacity": 0.0, "latency": 100.0, "load-0.5": 160.0, "load-0.9": 230.0}
    told = [[30.0, "pd-3 -> prefill"], [130.0, "t 19400 -> 24000"], [240.0, "pd-3 -> decode"]]
    facts = {"scheduling": told, "phase_began_s": began_s}
    found = replace(summary.read(run), extra={"fleets": {"prfaas": facts}})
    (copy / "summary.json").write_text(summary.to_json(found))
    loaded = data.load(copy)
    events = [each for each in loaded.events["prfaas"] if not each.what.startswith("link")]
    assert [(each.phase, each.time_s) for each in events] == [
        ("capacity", 30.0), ("latency", 30.0), ("load-0.9", 10.0)
    ]  # fmt: skip
    assert loaded.begins_s["latency"] == 100.0
    line = loaded.thresholds["prfaas"]
    assert line.times_s[0] < 100.0 < line.times_s[-1]
    assert np.isnan(line.values).sum() == len(PHASES) - 1


def test_prefill_is_busy_once_however_many_prompts_it_computes() -> None:
    table = pa.table(
        {
            "scheduled_us": [0, 1_000_000, 10_000_000],
            "prefill_started_us": [0, 1_000_000, 5_000_000],
            "prefill_finished_us": [2_000_000, 3_000_000, 10_000_000],
            "prefill_instance": ["a", "a", "b"],
        }
    )
    busy = data.prefill_busy(table, 1.0)
    # a computes from 0 to 3 s, b from 5 to 10 s, of 10 s each; bins of 10 / 3 s.
    assert busy.values == pytest.approx([3 / (20 / 3), (20 / 3 - 5) / (20 / 3), 0.5])


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(360, True), (820, False), (1400, False)])
async def test_in_a_real_browser(html: str, tmp_path: Path, width: int, dark: bool) -> None:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium on this machine")
    file = tmp_path / "report.html"
    file.write_text(html)
    async with browser_page(program) as tab:
        await tab.open(file.as_uri(), width, dark)
        assert tab.problems == []
        outside = [url for url in tab.requests if not url.startswith(("file:", "data:"))]
        assert outside == []
        # Nothing but the table's own scrolling region is wider than the page.
        assert await tab.value("document.documentElement.scrollWidth") <= width
        shown = await tab.value(
            "[...document.querySelectorAll('figure svg')]"
            ".filter(e => e.getBoundingClientRect().width > 0).length"
        )
        assert shown == 13
        background = await tab.value("getComputedStyle(document.documentElement).backgroundColor")
        assert background == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
        fills = await tab.value(
            "[...new Set([...document.querySelectorAll('#r0-capacity ~ figure path')]"
            ".slice(0, 400).map(e => getComputedStyle(e).fill))].join(';')"
        )
        assert ("rgb(90, 180, 232)" if dark else "rgb(0, 114, 178)") in fills
        await tab.press_tab()
        assert await tab.value("document.activeElement.className") == "skip"
        await tab.press_tab()
        assert await tab.value("document.activeElement.tagName") == "A"
        small = await tab.value(
            "Math.min(...[...document.querySelectorAll('figure svg text')]"
            ".filter(e => e.getBoundingClientRect().width > 0)"
            ".map(e => e.getBoundingClientRect().height))"
        )
        assert small >= 9
