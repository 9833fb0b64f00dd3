"""`prfaas load`: drive any OpenAI-compatible deployment and measure it."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import BadInput
from harness.load.flags import add_load_options
from harness.load.options import load_spec, search_of

if TYPE_CHECKING:
    from harness.load.execute import LoadDone
    from harness.load.spec import LoadSpec
    from results.summary import RunSummary

_EXAMPLES = """\
examples:
  prfaas load --base-url http://127.0.0.1:8000 --request-rate 10 --num-prompts 1000
  prfaas load --base-url http://127.0.0.1:8000 --max-concurrency 64 --duration 60   closed loop
  prfaas load --trace conversation.jsonl --goodput ttft:2000 tpot:25             a trace's times
  prfaas load --trace conversation.jsonl --arrival slow_down=4 --arrival dequantise_s=3
  prfaas load --workload sessions --request-rate 2 --sessions closed --duration 600
  prfaas load --request-rate 1 --duration 30 --search --goodput ttft:2000           highest rate
  prfaas load --target vllm-pair --prefill-url http://p:8100 --decode-url http://d:8200 ...
  prfaas load --trace conversation.jsonl --dry-run                              check, send nothing

keys are read from OPENAI_API_KEY (or the variable that --api-key-env names) and never written down.
exit codes: 0 ok, 2 bad input, 3 endpoint not ready, 4 incomplete, 5 the client was the limit (the
numbers are not the server's), 6 SLO missed, 130 interrupted (Ctrl-C drains and keeps what there is)
"""

_RESULT = "result.json"
#: Of a run directory, which a result must not replace.
_OWN_FILES = frozenset(
    ("summary.json", "run.json", "log.jsonl", "experiment.toml", "report.html", "complete")
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_load_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--name", "--label", default="load", help="of the run (default: load)")
    output.add_argument("--out", "--result-dir", type=Path, default=Path("runs"), metavar="DIR")
    output.add_argument(
        "--save-result", action="store_true", help="also write vLLM's result JSON into the run"
    )
    output.add_argument(
        "--save-detailed", action="store_true", help="with each request's lengths and times in it"
    )
    output.add_argument("--result-filename", default=_RESULT, metavar="NAME")
    output.add_argument("--json", action="store_true", help="print summary.json, no report")
    output.add_argument("--explain", action="store_true", help="print what each figure means")
    output.add_argument("--quiet", action="store_true", help="no progress")
    output.add_argument(
        "--link-interface",
        default="",
        metavar="NAME",
        help="show the use of this network interface while the run goes",
    )
    output.add_argument("--dry-run", action="store_true", help="resolve, print, send nothing")


def run(options: argparse.Namespace) -> int:
    """Returns the exit code of the run; bad input raises an error with exit code 2."""
    spec = load_spec(options)
    search = search_of(options, spec)
    _check(options)
    from harness.load.compare import compare
    from harness.load.execute import dry_run, execute

    if options.dry_run:
        from harness.load.preview import check_target, preview

        check_target(spec)
        sys.stdout.write(dry_run(spec))
        print("\n".join(f"# {line}" for line in preview(spec)))
        return 0
    from harness.load.live import LiveView
    from harness.load.report import definitions, lines
    from harness.load.vllm_result import save_results
    from harness.screen import Screen
    from harness.targets.secrets import clean_command
    from results import summary

    command = shlex.join(["prfaas", *clean_command(sys.argv[1:])])
    with Screen() as screen:

        def one(spec: LoadSpec) -> LoadDone:
            # Rates are of the progress since the last update, so a run has a view of its own.
            view = LiveView(
                screen,
                interface=options.link_interface,
                name=spec.name if options.compare else "",
            )
            done = execute(
                spec,
                options.out,
                command,
                ready_timeout_s=options.ready_check_timeout_sec,
                search=search,
                min_goodput=options.min_goodput,
                on_progress=(lambda phase, progress: None) if options.quiet else view.update,
            )
            if options.save_result or options.save_detailed:
                save_results(done, options.result_filename, detailed=options.save_detailed)
            return done

        if options.compare:
            return _compared(options, *compare(spec, one))
        done = one(spec)
    if options.json:
        sys.stdout.write(summary.to_json(done.summary))
        return done.exit_code
    print("\n".join(lines(done)))
    if options.explain:
        print("\n".join(["", *definitions()]))
    print(f"command   {command}")
    print(f"duration  {done.summary.duration_s:.0f} s")
    for path in sorted(done.directory.iterdir()):
        print(f"wrote     {path}")
    return done.exit_code


def _check(options: argparse.Namespace) -> None:
    """What a run would find out at its end. Raises BadInput."""
    ready_s = options.ready_check_timeout_sec
    if not 0 <= ready_s < math.inf:
        raise BadInput(f"--ready-check-timeout-sec {ready_s:g}: needs a number of at least 0")
    name = options.result_filename
    if Path(name).name in ("", "..") or Path(name).name != name:
        raise BadInput(f"--result-filename {name!r}: needs the name of a file in the run directory")
    if name in _OWN_FILES or name.endswith(".parquet"):
        raise BadInput(f"--result-filename {name!r}: a file of every run; give another name")
    if name != _RESULT and not (options.save_result or options.save_detailed):
        raise BadInput("--result-filename: has no effect without --save-result")
    if options.link_interface and options.quiet:
        raise BadInput("--link-interface: has no effect with --quiet, which shows no progress")
    if options.link_interface:
        from harness.load.live import interface_bytes

        try:
            interface_bytes(options.link_interface)
        except OSError as error:
            raise BadInput(f"--link-interface {options.link_interface}: {error}") from None
    if options.json and options.explain:
        raise BadInput("--explain: has no effect with --json; `prfaas results describe` explains")


def _compared(options: argparse.Namespace, runs: list[LoadDone], summary: RunSummary) -> int:
    """Print the comparison. The exit code is the first of the runs that is not 0."""
    from harness.load.report import definitions
    from results import table
    from results.summary import to_json

    if options.json:
        sys.stdout.write(to_json(summary))
    else:
        table.show(summary)
        if options.explain:
            print("\n".join(["", *definitions()]))
        for run in runs:
            print(f"wrote     {run.directory}")
    return next((int(run.exit_code) for run in runs if run.exit_code), 0)
