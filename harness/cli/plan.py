"""`prfaas plan`: threshold and split from the throughput model, in milliseconds."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.cli.numbers import finite
from harness.control import check_control
from harness.errors import BadInput, ExitCode
from harness.experiment import MOST_INSTANCES, load_experiment, parse_override
from harness.passed_over import passed_over
from harness.planner.charts import check_chart, save_chart, text_chart
from harness.planner.cost import Prices
from harness.planner.experiment import arrival_cv, deployment_of
from harness.planner.link import LinkModel
from harness.planner.model import Capacity, Deployment, Reading
from harness.planner.paper import Row, reproduce
from harness.planner.report import (
    ConfigurationPlan,
    SearchPlan,
    capacity_json,
    default_configurations,
    describe_link,
    plan_all,
    search_plan,
    to_json,
)
from harness.planner.search import threshold_curves, threshold_grid
from harness.profiles import load_profile
from workloads.kinds import TraceWorkload
from workloads.spec import length_distribution

EXAMPLES = """examples:
  prfaas plan paper                       every published figure beside ours, and the best plan
  prfaas plan paper --chart fig5.html     the same, with both panels of Fig 5 as a chart
  prfaas plan bench --set link.rate_gbps=10
  prfaas plan my-experiment.toml --json
  prfaas plan --trace trace.jsonl --remote 1t-h200 --local 1t-h20 --n-remote 4 --n-local 8 \\
              --price-remote 40 --price-local 20 --price-egress 0.02

readings: `published` takes T_prefill at the mean length, as the paper does; `work` takes the mean
of T_prefill, which a queue needs and a run converges to. docs/plan.md explains every figure.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("experiment", nargs="?", help="preset or experiment file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override the experiment"
    )
    trace = parser.add_argument_group("without an experiment")
    trace.add_argument("--trace", metavar="FILE", help="plan for the lengths of this trace")
    trace.add_argument("--format", default="auto", help="trace format (default: auto)")
    trace.add_argument("--remote", default="1t-h200", metavar="PROFILE", help="name or file")
    trace.add_argument("--local", default="1t-h20", metavar="PROFILE", help="name or file")
    trace.add_argument("--n-remote", type=int, default=4, metavar="N", help="remote instances")
    trace.add_argument("--n-local", type=int, default=8, metavar="N", help="local instances")
    trace.add_argument(
        "--rate-gbps", type=finite(1e-9), default=100.0, help="link rate (default: 100)"
    )
    trace.add_argument("--rtt-ms", type=finite(0), default=0.0, help="link RTT (default: 0)")
    trace.add_argument(
        "--ttft-slo-s", type=finite(1e-9), default=10.0, help="TTFT SLO (default: 10)"
    )
    trace.add_argument(
        "--tokens-per-s", type=finite(1e-9), default=40.0, help="SLO on 1 / TPOT (default: 40)"
    )
    prices = parser.add_argument_group("prices, in one currency")
    prices.add_argument("--price-remote", type=finite(0), metavar="X", help="per instance-hour")
    prices.add_argument("--price-local", type=finite(0), metavar="X", help="per instance-hour")
    prices.add_argument("--price-egress", type=finite(0), default=0.0, metavar="X", help="per GB")
    parser.add_argument(
        "--reading",
        choices=[reading.value for reading in Reading],
        default=Reading.WORK.value,
        help="reading that the search maximises (default: work)",
    )
    parser.add_argument("--step-tokens", type=int, default=100, help="grid of t (default: 100)")
    parser.add_argument("--load", type=float, default=0.8, help="load of the TTFT estimate")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument(
        "--chart",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="write the curves to FILE (.html, .png or .svg); may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    if (options.experiment is None) == (options.trace is None):
        raise BadInput("give an experiment (e.g. `prfaas plan paper`) or --trace FILE, not both")
    _check(options)
    for path in options.chart:
        check_chart(path)
    reading = Reading(options.reading)
    cv = 1.0
    if options.trace is None:
        experiment = load_experiment(
            options.experiment, dict(parse_override(text) for text in options.set)
        )
        check_control(experiment)
        for line in passed_over(experiment, "plan"):
            print(f"prfaas plan: {line}", file=sys.stderr)
        title = experiment.name
        deployment = deployment_of(experiment)
        configurations = experiment.configurations
        ttft_slo_s, cv = experiment.slo.ttft_s, arrival_cv(experiment)
        n_prfaas = max(row.n_prfaas for row in configurations)
        n_local = max(
            row.n_prefill + row.n_decode for row in configurations if row.n_prfaas == n_prfaas
        )
    else:
        title = options.trace
        deployment = _trace_deployment(options)
        n_prfaas, n_local, ttft_slo_s = options.n_remote, options.n_local, options.ttft_slo_s
        configurations = ()
    prices = Prices(options.price_remote, options.price_local, options.price_egress)
    deployment = replace(deployment, prices=prices)
    step = options.step_tokens
    if not configurations:
        configurations = default_configurations(deployment, n_prfaas, n_local, reading, step)
    plans = plan_all(
        deployment,
        configurations,
        ttft_slo_s=ttft_slo_s,
        arrival_cv=cv,
        load_fraction=options.load,
        step_tokens=step,
    )
    curves = bool(options.chart) or options.json
    found = search_plan(deployment, n_prfaas, n_local, reading, step, curves) if n_prfaas else None
    rows = reproduce() if options.experiment == "paper" else ()
    failed = [row for row in rows if row.verdict == "off"]
    _charts(options, deployment, found, title)
    if options.json:
        print(json.dumps(_as_json(title, deployment, rows, plans, found), indent=2))
    else:
        console = Console()
        if rows:
            _print_rows(console, rows)
        _print_plans(console, title, deployment, plans, ttft_slo_s)
        if found is not None:
            _print_search(console, deployment, found)
        for path in options.chart:
            console.print(f"wrote {path}", highlight=False)
    if failed:
        cells = "; ".join(f"{row.table} {row.cell}" for row in failed)
        print(f"prfaas plan: outside the promised difference: {cells}", file=sys.stderr)
        return int(ExitCode.REGRESSION)
    return int(ExitCode.OK)


def _check(options: argparse.Namespace) -> None:
    if options.set and options.experiment is None:
        raise BadInput("--set changes an experiment; with --trace use --rate-gbps, --remote, ...")
    if options.n_remote < 1 or options.n_local < 1:
        raise BadInput("--n-remote, --n-local: at least one instance of each is needed")
    if max(options.n_remote, options.n_local) > MOST_INSTANCES:
        raise BadInput(f"--n-remote, --n-local: must be at most {MOST_INSTANCES:,}")
    if options.step_tokens < 1:
        raise BadInput(f"--step-tokens {options.step_tokens}: must be at least 1")
    if not 0 < options.load < 1:
        raise BadInput(f"--load {options.load:g}: must lie between 0 and 1")


def _trace_deployment(options: argparse.Namespace) -> Deployment:
    import numpy as np

    from workloads.traces.readers import open_trace

    if not Path(options.trace).is_file():
        known = Path(options.trace).exists()
        raise BadInput(f"--trace {options.trace}: {'not a file' if known else 'no such file'}")
    workload = TraceWorkload(path=options.trace, format=options.format)
    output = [row.output_tokens for row in open_trace(options.trace, options.format)]
    return Deployment(
        lengths=length_distribution(workload, uncached=True),
        output_tokens=float(np.mean(output)),
        local=load_profile(options.local),
        remote=load_profile(options.remote),
        link=LinkModel(options.rate_gbps, options.rtt_ms / 1000),
        slo_tokens_per_s=options.tokens_per_s,
        slo_tolerance=0.01,
    )


#: A curve of a chart has about so many points at most.
CHART_POINTS = 1000


def _charts(
    options: argparse.Namespace, deployment: Deployment, found: SearchPlan | None, title: str
) -> None:
    if not options.chart:
        return
    if found is None:
        raise BadInput("--chart: no configuration has remote instances; there is no threshold")
    best = found.bounded
    assert best.threshold_tokens is not None
    step = max(10 * options.step_tokens, int(deployment.lengths.quantile(1.0) / CHART_POINTS))
    grid = {*threshold_grid(deployment, step), best.threshold_tokens}
    curves = threshold_curves(deployment, best.split, sorted(grid), found.reading)
    name = f"{title}: {found.bounded.split} instances, {found.reading.value} reading"
    for path in options.chart:
        save_chart(path, curves, found.splits, name)


def _print_rows(console: Console, rows: tuple[Row, ...]) -> None:
    for name in dict.fromkeys(row.table for row in rows):
        table = Table(
            title=f"{name} of arXiv:2604.15039",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        table.add_column("figure", no_wrap=True)
        for heading in ("paper", "ours", "diff", "limit", ""):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("unit", style="dim", no_wrap=True)
        remarks = list(dict.fromkeys(row.note for row in rows if row.table == name and row.note))
        for row in rows:
            if row.table == name:
                shown, limit = _differences(row)
                style = {"ok": "green", "off": "bold red"}.get(row.verdict, "")
                table.add_row(
                    row.cell,
                    f"{row.paper:,.5g}",
                    f"{row.ours:,.5g}",
                    shown,
                    limit,
                    f"[{style}]{row.verdict}[/]" if style else "",
                    row.unit + (f" ({remarks.index(row.note) + 1})" if row.note else ""),
                )
        console.print(table)
        for number, remark in enumerate(remarks, 1):
            console.print(f"({number}) {remark}", style="dim", highlight=False)


def _differences(row: Row) -> tuple[str, str]:
    if row.absolute:
        return f"{row.difference:+.2f}", "" if row.limit is None else f"{row.limit:g}"
    return (
        f"{round(100 * row.difference, 2) + 0.0:+.2f} %",
        "" if row.limit is None else "exact" if row.limit == 0 else f"{100 * row.limit:g} %",
    )


def _print_plans(
    console: Console,
    title: str,
    deployment: Deployment,
    plans: tuple[ConfigurationPlan, ...],
    ttft_slo_s: float,
) -> None:
    remote = deployment.remote.name if deployment.remote else "none"
    console.print(
        f"\n[bold]{title}[/]: remote {remote}, local {deployment.local.name}, link "
        f"{describe_link(deployment.link)}; mean prompt {deployment.lengths.mean():,.0f} tokens to "
        f"compute, mean output {deployment.output_tokens:,.0f}",
        highlight=False,
    )
    table = Table(title="Configurations (N_prfaas/N_p/N_d)", title_justify="left")
    table.add_column("figure")
    for plan in plans:
        table.add_column(f"{plan.name}\n{plan.work.split}", justify="right")
    load = f"{plans[0].load_fraction:g}"
    lines: list[tuple[str, list[str]]] = [
        ("t, tokens (work)", [_number(p.work.threshold_tokens, ",.0f") for p in plans]),
        ("t, tokens (published)", [_number(p.published.threshold_tokens, ",.0f") for p in plans]),
        ("capacity, req/s (work)", [f"{p.work.requests_per_s:.3f}" for p in plans]),
        ("capacity, req/s (published)", [f"{p.published.requests_per_s:.3f}" for p in plans]),
        ("first stage to fill", [p.work.bottleneck for p in plans]),
        ("offloaded, %", [f"{100 * p.work.offloaded_share:.1f}" for p in plans]),
        ("egress at capacity, Gbit/s", [f"{p.work.egress_gbps:.2f}" for p in plans]),
        ("  share of the link, %", [_number(p.work.egress_share, ".1f", 100) for p in plans]),
        ("TTFT without queue: mean, s", [f"{p.unloaded.mean_s:.2f}" for p in plans]),
        ("  P90, s", [f"{p.unloaded.p90_s:.2f}" for p in plans]),
        (f"TTFT at {load} of own capacity: mean, s", [_number(p.loaded.mean_s) for p in plans]),
        ("  P90, s (estimate)", [_number(p.loaded.p90_s) for p in plans]),
        ("  P99, s (estimate)", [_number(p.loaded.p99_s) for p in plans]),
        (
            f"highest req/s with P90 <= {ttft_slo_s:g} s (est.)",
            [f"{p.slo_rate_per_s:.2f}" for p in plans],
        ),
    ]
    if any(plan.work.cost_per_request is not None for plan in plans):
        lines += [
            ("cost per hour", [_number(p.work.cost_per_hour) for p in plans]),
            (
                "cost per 1,000 requests",
                [_number(p.work.cost_per_request, ".3f", 1000) for p in plans],
            ),
            ("requests per unit of money", [_per_money(p.work) for p in plans]),
        ]
    for name, cells in lines:
        table.add_row(name, *cells)
    console.print(table)


def _per_money(result: Capacity) -> str:
    return "-" if not result.cost_per_request else f"{1 / result.cost_per_request:,.1f}"


def _number(value: float | None, form: str = ".2f", factor: float = 1.0) -> str:
    if value is None:
        return "-"
    return format(value * factor, form) if math.isfinite(value) else "unbounded"


def _print_search(console: Console, deployment: Deployment, found: SearchPlan) -> None:
    best = found.bounded
    table = Table(title=f"Search, {found.reading.value} reading", title_justify="left")
    table.add_column("link")
    for heading in ("t, tokens", "N_p/N_d", "req/s", "offloaded, %", "egress, Gbit/s", "limit"):
        table.add_column(heading, justify="right")
    for name, result in ((describe_link(deployment.link), best), ("unbounded", found.unbounded)):
        table.add_row(
            name,
            _number(result.threshold_tokens, ",.0f"),
            f"{result.split.n_prefill}/{result.split.n_decode}",
            f"{result.requests_per_s:.3f}",
            f"{100 * result.offloaded_share:.1f}",
            f"{result.egress_gbps:.2f}",
            result.bottleneck,
        )
    console.print(table)
    curves = threshold_curves(
        deployment,
        best.split,
        threshold_grid(deployment, max(1, int(deployment.lengths.quantile(0.97) / 64)))[1:65],
        found.reading,
    )
    console.print(text_chart(curves), highlight=False, markup=False)


def _as_json(
    title: str,
    deployment: Deployment,
    rows: tuple[Row, ...],
    plans: tuple[ConfigurationPlan, ...],
    found: SearchPlan | None,
) -> dict[str, Any]:
    return {
        "name": title,
        "profiles": {
            "remote": deployment.remote.name if deployment.remote else None,
            "local": deployment.local.name,
        },
        "link": to_json(deployment.link),
        "mean_input_tokens": deployment.lengths.mean(),
        "mean_output_tokens": deployment.output_tokens,
        "paper": [
            {**to_json(row), "difference": row.difference, "verdict": row.verdict} for row in rows
        ],
        "configurations": [
            {
                "name": plan.name,
                "work": capacity_json(plan.work),
                "published": capacity_json(plan.published),
                "ttft_unloaded": to_json(plan.unloaded),
                "load_fraction": plan.load_fraction,
                "ttft_loaded_estimate": to_json(plan.loaded),
                "slo_rate_per_s_estimate": plan.slo_rate_per_s,
            }
            for plan in plans
        ],
        "search": None
        if found is None
        else {
            "reading": found.reading.value,
            "bounded": capacity_json(found.bounded),
            "unbounded": capacity_json(found.unbounded),
            "splits": [to_json(point) for point in found.splits],
        },
    }
