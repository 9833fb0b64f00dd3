"""`prfaas runs`: list, prune or diff run directories."""

from __future__ import annotations

import argparse
import json
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness.errors import BadInput, ExitCode

_DEFAULT = Path("runs")

_EXAMPLES = """\
examples:
  prfaas runs list
  prfaas runs prune --keep 5                  all but the newest five of each name, after asking
  prfaas runs prune --incomplete --older-than 7 --yes
  prfaas runs diff runs/bench-A runs/bench-B  what was set differently, and what came out
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="every run, oldest first")
    listing.add_argument("--json", action="store_true", help="for machines")
    prune = actions.add_parser("prune", help="delete runs that a rule names")
    prune.add_argument("--keep", type=int, metavar="N", help="keep the newest N of each name")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="delete older ones")
    prune.add_argument("--incomplete", action="store_true", help="delete interrupted ones")
    prune.add_argument("--yes", action="store_true", help="delete without asking")
    for each in (listing, prune):
        each.add_argument("--runs", type=Path, default=_DEFAULT, metavar="DIR",
                          help="default: runs")  # fmt: skip
    diff = actions.add_parser("diff", help="settings and headline figures of two runs")
    diff.add_argument("left", type=Path, help="a run directory")
    diff.add_argument("right", type=Path, help="another")
    diff.add_argument("--json", action="store_true", help="for machines")


def run(options: argparse.Namespace) -> int:
    root = getattr(options, "runs", _DEFAULT)
    # Before the first run there is no such directory yet; one that was asked for should be there.
    if root != _DEFAULT and not root.is_dir():
        raise BadInput(f"--runs {root}: {'not a' if root.exists() else 'no such'} directory")
    return {"list": _list, "prune": _prune, "diff": _diff}[options.action](options)


def _list(options: argparse.Namespace) -> int:
    from results import rundir
    from results.table import grid

    runs = rundir.list_runs(options.runs)
    if options.json:
        rows = [
            {
                "path": str(info.path),
                "name": info.identity.name,
                "mode": info.identity.mode,
                "created_utc": info.identity.created_utc,
                "complete": info.complete,
                "size_bytes": info.size_bytes,
            }
            for info in runs
        ]
        print(json.dumps(rows, indent=2))
        return ExitCode.OK
    if not runs:
        print(f"no runs in {options.runs}")
        return ExitCode.OK
    lines = [
        [
            str(info.path),
            info.identity.mode,
            "complete" if info.complete else "INCOMPLETE",
            f"{info.size_bytes / 1e6:.1f} MB",
        ]
        for info in runs
    ]
    print("\n".join(grid(["run", "mode", "state", "size"], lines)))
    return ExitCode.OK


def _prune(options: argparse.Namespace) -> int:
    from results import rundir

    if options.keep is None and options.older_than is None and not options.incomplete:
        raise BadInput("nothing to prune: give --keep N, --older-than DAYS or --incomplete")
    if options.keep is not None and options.keep < 0:
        raise BadInput(f"--keep {options.keep}: a number of runs, 0 or more")
    if options.older_than is not None and options.older_than < 0:
        raise BadInput(f"--older-than {options.older_than:g}: a number of days, 0 or more")
    before = None
    if options.older_than is not None:
        before = datetime.now(UTC) - timedelta(days=options.older_than)
    chosen = rundir.choose_for_pruning(
        rundir.list_runs(options.runs),
        keep=options.keep,
        before=before,
        incomplete=options.incomplete,
    )
    if not chosen:
        print("nothing to prune")
        return ExitCode.OK
    for info in chosen:
        print(f"{info.path}  {info.size_bytes / 1e6:.1f} MB")
    if not options.yes:
        try:
            answer = input(f"delete these {len(chosen)} runs? [y/N] ")
        except EOFError as error:
            raise BadInput("nobody answers: give --yes to delete without asking") from error
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing deleted")
            return ExitCode.OK
    for info in chosen:
        rundir.remove(info)
    print(f"deleted {len(chosen)} runs")
    return ExitCode.OK


def _settings(path: Path) -> dict[str, Any]:
    file = path / "experiment.toml"
    if not path.is_dir():
        raise BadInput(f"{path}: {'not a' if path.exists() else 'no such'} directory; name a run's")
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{file}: {error}") from error


def _diff(options: argparse.Namespace) -> int:
    from results import rundir, summary
    from results.figures import figures
    from results.table import grid, number

    settings = rundir.diff(_settings(options.left), _settings(options.right))
    left, right = (
        {figure.key: figure.value for figure in figures(summary.read(path))}
        for path in (options.left, options.right)
    )
    keys = list(dict.fromkeys([*left, *right]))
    changed = [
        (key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)
    ]
    if options.json:
        print(
            json.dumps(
                {
                    "settings": [
                        dict(zip(("key", "left", "right"), row, strict=True)) for row in settings
                    ],
                    "figures": [
                        {"figure": "/".join(k), "left": a, "right": b} for k, a, b in changed
                    ],
                },
                indent=2,
                default=str,
            )
        )
        return ExitCode.OK
    header = ["", options.left.name, options.right.name]
    if settings:
        print("\n".join(grid(header, [[key, str(a), str(b)] for key, a, b in settings])))
    else:
        print("the settings are the same")
    print()
    if changed:
        rows = [
            [" ".join(part for part in key if part), number(a, 4), number(b, 4)]
            for key, a, b in changed
        ]
        print("\n".join(grid(header, rows)))
    else:
        print("the figures are the same")
    return ExitCode.OK
