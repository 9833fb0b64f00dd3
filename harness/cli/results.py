"""`prfaas results`: describe, query or export what a run recorded."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

from harness.errors import BadInput, ExitCode
from harness.places import check_file

_EXAMPLES = """\
examples:
  prfaas results describe runs/bench-20260501T120000Z
  prfaas results query runs/bench-* "select configuration, phase, count(*) n,
      quantile_cont(ttft_s, 0.9) p90 from requests group by all order by 1, 2"
  prfaas results export RUN --format csv --out requests.csv
  prfaas results export RUN --format vllm --configuration prfaas --phase latency

tables of a query: requests (with ttft_s, tpot_s, e2e_s, queue_s, prefill_s, transfer_s and
decode_admission_s as columns, in run seconds), tokens, gaps, links, instances, decisions; of
emulated runs audit, of those with measure.flow_rates flows; each has a column `run`.
`prfaas results describe RUN --schema` says what every column means.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    describe = actions.add_parser("describe", help="files, rows, versions, whether complete")
    describe.add_argument(
        "run_dir", type=Path, metavar="RUN", help="a run directory or one of its Parquet files"
    )
    describe.add_argument("--schema", action="store_true", help="every column, unit, definition")
    describe.add_argument("--json", action="store_true", help="for machines")

    query = actions.add_parser("query", help="SQL over the tables of one or more runs")
    query.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="run directories")
    query.add_argument("sql", help="one statement")
    query.add_argument("--format", choices=("table", "csv", "json"), default="table")

    export = actions.add_parser("export", help="requests as CSV, or vLLM's result JSON")
    export.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    export.add_argument("--format", choices=("csv", "vllm"), default="csv")
    export.add_argument("--configuration", help="only this one (vllm: needed when several)")
    export.add_argument("--phase", help="only this one (vllm: needed when several)")
    export.add_argument("--detailed", action="store_true", help="vllm: with per-request lists")
    export.add_argument("--out", type=Path, metavar="FILE", help="instead of standard output")


def run(options: argparse.Namespace) -> int:
    action = {"describe": _describe, "query": _query, "export": _export}[options.action]
    return action(options)


def _describe(options: argparse.Namespace) -> int:
    from results import reader
    from results.schemas import SCHEMAS

    path: Path = options.run_dir
    if path.is_dir():
        files = [path / f"{name}.parquet" for name in SCHEMAS]
        files = [each for each in files if each.exists()]
        if not files:
            raise BadInput(f"{path}: no results files in it; is it a run directory?")
    elif path.exists():
        files = [path]
    else:
        raise BadInput(f"{path}: no such run directory or Parquet file")
    found = [reader.describe(each) for each in files]
    if options.json:
        print(json.dumps([_as_json(info) for info in found], indent=2))
        return ExitCode.OK
    from results.table import grid

    rows = [
        [
            info.path.name,
            f"{info.rows:,}",
            str(info.row_groups),
            f"{info.size_bytes / 1e6:.2f} MB",
            str(info.schema_version),
            "complete" if info.complete else "INCOMPLETE",
        ]
        for info in found
    ]
    print("\n".join(grid(["file", "rows", "row groups", "size", "schema", "state"], rows)))
    for info in found:
        if info.torn_bytes:
            print(f"{info.path.name}: {info.torn_bytes:,} bytes of an unfinished row group ignored")
    for key, value in found[0].metadata.items():
        if key not in ("prfaas.table", "prfaas.complete", "prfaas.schema_version"):
            print(f"{key.removeprefix('prfaas.')}: {value}")
    if options.schema:
        _print_schemas([info.path.stem for info in found])
    return ExitCode.OK


def _as_json(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__slots__ if name != "path"} | {
        "path": str(info.path)
    }


def _print_schemas(names: list[str]) -> None:
    from results.metrics import DEFINITIONS
    from results.schemas import SCHEMAS

    for name in names:
        if name not in SCHEMAS:
            continue
        print(f"\n{name}")
        for field in SCHEMAS[name]:
            unit = field.metadata[b"unit"].decode()
            definition = field.metadata[b"definition"].decode()
            print(f"  {field.name:<20} {unit:<9} {definition}")
    print("\nmetrics")
    for metric, (unit, definition) in DEFINITIONS.items():
        print(f"  {metric:<20} {unit:<11} {definition}")


def _query(options: argparse.Namespace) -> int:
    from results.query import query

    columns, rows = query(options.run_dirs, options.sql)
    if options.format == "json":
        made = [dict(zip(columns, map(_plain, row), strict=True)) for row in rows]
        print(json.dumps(made, default=str, allow_nan=False))
    elif options.format == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    elif columns:
        from results.table import grid

        print("\n".join(grid(columns, [[_cell(value) for value in row] for row in rows])))
    return ExitCode.OK


def _plain(value: Any) -> Any:
    """JSON has neither infinities nor NaN."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _export(options: argparse.Namespace) -> int:
    from results import export, reader
    from results.whole import write_whole

    if options.out is not None:
        check_file("--out", options.out)
    if not options.run_dir.is_dir():
        raise BadInput(f"{options.run_dir}: no such run directory")
    requests = reader.where(
        reader.read(options.run_dir, "requests"), options.configuration, options.phase
    )
    if not requests.num_rows:
        raise BadInput(f"{options.run_dir}: no requests of that configuration and phase")
    if options.format == "csv":
        text = export.to_csv(requests)
    else:
        pairs = reader.parts(requests)
        if len(pairs) > 1:
            known = ", ".join(f"{configuration}/{phase}" for configuration, phase in pairs)
            raise BadInput(f"vLLM's result is of one phase; choose one with --configuration and "
                           f"--phase: {known}")  # fmt: skip
        tokens = reader.where(reader.read(options.run_dir, "tokens"), *pairs[0])
        date, model = _identity(options.run_dir)
        made = export.to_vllm(requests, tokens, model=model, date=date, detailed=options.detailed)
        text = json.dumps(made, indent=2, allow_nan=False) + "\n"
    if options.out is None:
        sys.stdout.write(text)
    else:
        write_whole(options.out, text)
        print(f"wrote {options.out}")
    return ExitCode.OK


def _identity(run_directory: Path) -> tuple[str, str]:
    """(when it was made, model) as far as the run says."""
    from results import summary
    from results.rundir import RunDir, RunDirError

    date = model = ""
    with contextlib.suppress(RunDirError):
        date = RunDir(run_directory).identity().created_utc
    with contextlib.suppress(summary.SummaryError):
        model = summary.read(run_directory).model
    return date, model
