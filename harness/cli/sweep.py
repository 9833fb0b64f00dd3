"""`prfaas sweep`: many variations of an experiment, on all cores, into one Parquet dataset."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.errors import BadInput, ExitCode
from harness.experiment import parse_override
from harness.sweep.study import (
    OWN,
    Study,
    is_experiment,
    load_study,
    parse_axis,
    studies,
    study_over,
)

#: Longer tables are for a data frame.
MOST_ROWS = 80

EXAMPLES = """examples:
  prfaas sweep --list                     the studies that come with this program
  prfaas sweep rtt                        one of them; run again after Ctrl-C, it goes on
  prfaas sweep rtt --mode plan            the same variations by the throughput model only
  prfaas sweep paper --mode plan --axis configurations.prfaas.threshold_tokens=10000,20000,30000
  prfaas sweep paper --axis link.rate_gbps=5,10,20 --axis arrivals.burstiness=0.25,1 \\
               --set arrivals.process=gamma --set measure.load_fractions=[]
  prfaas sweep paper \\
               --axis profiles.prfaas,profiles.pd=1t-h200:1t-h20,ring-2.5-1t-h200:ring-2.5-1t-h20

An axis is a dotted field of the experiment, or one of the sweep's own parameters:
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = "\n".join(f"  {name:24}{meaning}" for name, meaning in OWN.items())
    parser.epilog = f"{EXAMPLES}{own}\n"
    parser.add_argument("study", nargs="?", help="study, preset, or the file of either")
    parser.add_argument("--list", action="store_true", help="list the shipped studies")
    parser.add_argument("--mode", choices=("plan", "simulate"), help="instead of the study's")
    parser.add_argument(
        "--axis",
        action="append",
        default=[],
        metavar="KEY=V1,V2,...",
        help="vary KEY; repeated: the product. K1,K2=A:B,C:D varies both together",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set in every variation"
    )
    parser.add_argument(
        "--best", action="store_true", help="search threshold and split anew for each variation"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="configuration")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument(
        "--on",
        choices=("processes", "ray"),
        default="processes",
        help="this host, or a Ray cluster",
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="with --on ray: the cluster (default: this machine)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="directory of the dataset (default: runs/sweep-NAME)",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON only")


def run(options: argparse.Namespace) -> int:
    if options.list:
        _print_studies()
        return int(ExitCode.OK)
    if options.study is None:
        raise BadInput("give a study (`prfaas sweep --list`), or a preset with --axis KEY=V1,V2")
    if options.jobs is not None and options.jobs < 1:
        raise BadInput(f"--jobs {options.jobs}: must be at least 1")
    if options.address is not None and options.on != "ray":
        raise BadInput("--address needs --on ray")
    study = _study(options)
    from harness.sweep.execute import Evaluated, cores, execute

    evaluated: Evaluated | None = None
    if options.on == "ray":
        from harness.ray.sweep import on_ray

        evaluated = on_ray(options.address)

    directory = options.out or Path("runs") / f"sweep-{study.name}"
    jobs = options.jobs or cores()
    where = "on Ray" if evaluated is not None else f"{jobs} processes"
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(f"{study.name} ({study.mode}, {where})", total=None)

        def progress(done: int, total: int, index: int, resumed: bool) -> None:
            bar.update(task, completed=done, total=total)

        try:
            outcome = execute(study, directory, jobs, progress, evaluated)
        except KeyboardInterrupt:
            print(
                f"prfaas sweep: interrupted; what is done is in {directory / 'points'}, and the "
                "same command goes on from there",
                file=sys.stderr,
            )
            return int(ExitCode.INTERRUPTED)
    for line in outcome.notes:
        print(f"prfaas sweep: {line}", file=sys.stderr)
    if options.json:
        _print_json(outcome.records)
        return int(ExitCode.OK)
    _print_table(study, outcome.records)
    print(f"computed {outcome.computed} points, took {outcome.resumed} as done")
    print(f"wrote {outcome.dataset} ({len(outcome.records)} rows)")
    return int(ExitCode.OK)


def _study(options: argparse.Namespace) -> Study:
    axes = tuple(parse_axis(text) for text in options.axis)
    settings = dict(parse_override(text) for text in options.set)
    if is_experiment(options.study):
        if not axes:
            raise BadInput(f"{options.study} is an experiment: name what varies, --axis KEY=V1,V2")
        study = study_over(options.study, axes)
    else:
        study = load_study(options.study)
        if axes:
            study = study.over(axes)
    update: dict[str, Any] = {}
    if options.mode:
        update["mode"] = options.mode
    if options.best:
        update["best"] = True
    if options.only:
        update["configurations"] = tuple(options.only)
    return study.setting(settings).model_copy(update=update)


def _print_studies() -> None:
    for name in studies():
        study = load_study(name)
        count = math.prod(len(axis.settings()) for axis in study.axis)
        print(f"{name:12} {study.mode:8} {count:4} points  {study.about}")


def _print_json(records: list[dict[str, Any]]) -> None:
    import json

    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    rows = [{key: plain(value) for key, value in record.items()} for record in records]
    print(json.dumps(rows, indent=2))


def _print_table(study: Study, records: list[dict[str, Any]]) -> None:
    shown = study.show or ("phase", "threshold_tokens", "capacity_per_s", "ttft_p90_s")
    columns = (*study.axis_names(), "configuration", *shown)
    chosen = [row for row in records if not study.phases or row["phase"] in study.phases]
    rows = list(dict.fromkeys(tuple(_cell(row[name]) for name in columns) for row in chosen))
    table = Table(title=f"{study.name}: {study.about}" if study.about else study.name)
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows[:MOST_ROWS]:
        table.add_row(*row)
    Console().print(table)
    if len(rows) > MOST_ROWS:
        print(f"{len(rows) - MOST_ROWS} more rows are in the dataset")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
