"""Run directories: `runs/<name>-<utc>/`, made whole or not at all, marked when complete.

Files: run.json (identity), experiment.toml as resolved, a Parquet file a table of `schemas`,
summary.json, report.html, log.jsonl, and an empty `complete`, written last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from results.whole import write_whole

MARKER = "complete"
IDENTITY = "run.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class RunDirError(ValueError):
    """A run directory cannot be made or is not one. Says what would do."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Identity:
    """run.json: who made the run and when. `clock` is virtual or monotonic."""

    name: str
    mode: str = ""
    created_utc: str = ""
    seed: int | None = None
    commit: str = ""
    clock: str = ""
    command: str = ""
    extra: dict[str, str] = field(default_factory=dict)


class RunDir:
    """One run directory. Files are replaced whole, so a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log: IO[str] | None = None

    @property
    def complete(self) -> bool:
        return (self.path / MARKER).exists()

    def write_text(self, name: str, text: str) -> Path:
        """Write file `name` atomically. Returns its path."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, text)
        return target

    def log(self, event: str, time_s: float | None = None, **fields: Any) -> None:
        """One line in log.jsonl; `time_s` is of the run's loop clock."""
        if self._log is None:
            self._log = (self.path / "log.jsonl").open("a", buffering=1)
        line = {"event": event} | ({} if time_s is None else {"time_s": time_s}) | fields
        self._log.write(json.dumps(line, default=str) + "\n")

    def close(self, complete: bool) -> None:
        """Close the log; write the marker when the run is whole. Idempotent."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if complete:
            (self.path / MARKER).touch()

    def identity(self) -> Identity:
        """What run.json says. Raises RunDirError."""
        path = self.path / IDENTITY
        try:
            data = json.loads(path.read_text())
            known = {name: data[name] for name in Identity.__slots__ if name in data}
            identity = Identity(**known)
            if not all(isinstance(each, str) for each in (identity.name, identity.created_utc)):
                raise ValueError("name and created_utc are no strings")
            return identity
        except OSError as error:
            raise RunDirError(f"{self.path}: not a run directory (no {IDENTITY})") from error
        except (ValueError, TypeError, KeyError) as error:
            raise RunDirError(f"{path}: not readable: {error}") from error


def create(
    root: Path,
    identity: Identity,
    experiment_toml: str,
    now: datetime | None = None,
) -> RunDir:
    """A new directory under `root`, with identity and experiment in it from the first moment.

    Two runs of one second get different names. Raises RunDirError.
    """
    _check_name(identity.name)
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    stamp = moment.strftime("%Y%m%dT%H%M%SZ")
    made = Identity(**(asdict(identity) | {"created_utc": identity.created_utc or stamp}))
    try:
        root.mkdir(parents=True, exist_ok=True)
        staging = root / f".{identity.name}-{stamp}.{os.getpid()}"
        staging.mkdir()
        staged = RunDir(staging)
        staged.write_text(IDENTITY, json.dumps(asdict(made), indent=2) + "\n")
        staged.write_text("experiment.toml", experiment_toml)
        for attempt in range(1, 1000):
            suffix = "" if attempt == 1 else f"-{attempt}"
            target = root / f"{identity.name}-{stamp}{suffix}"
            try:
                # Renaming onto a directory that is not empty fails, so no run is ever overwritten.
                staging.rename(target)
            except OSError:
                if not target.exists():
                    raise
            else:
                return RunDir(target)
    except OSError as error:
        raise _not_made(root, error.errno or 0) from error
    raise RunDirError(f"{root}: a thousand runs of {identity.name} in one second")


def check(root: Path, name: str) -> None:
    """Whether `create` could make a directory of this name there; writes nothing. Raises what it
    would raise."""
    _check_name(name)
    place = root
    while True:
        try:
            place.lstat()
            break
        except FileNotFoundError as error:
            if place == place.parent:
                raise _not_made(root, errno.ENOENT) from error
            place = place.parent
        except OSError as error:
            raise _not_made(root, error.errno or 0) from error
    if not place.is_dir():
        raise _not_made(root, errno.EEXIST)
    if not os.access(place, os.W_OK | os.X_OK):
        read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        raise _not_made(root, errno.EROFS if read_only else errno.EACCES)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise RunDirError(
            f"run name {name!r}: use letters, digits, and . _ + - only, no leading dot"
        )


def _not_made(root: Path, number: int) -> RunDirError:
    return RunDirError(f"{root}: cannot make a run directory: {os.strerror(number)}")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One line of `prfaas runs list`."""

    path: Path
    identity: Identity
    complete: bool
    size_bytes: int


def is_run(path: Path) -> bool:
    return (path / IDENTITY).is_file()


def list_runs(root: Path) -> list[RunInfo]:
    """The runs directly under `root`, oldest first. A missing root has none. A run whose identity
    is damaged has its directory's name, mode "unreadable" and no date.
    """
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_dir() and not path.name.startswith(".") and is_run(path):
            run = RunDir(path)
            try:
                identity = run.identity()
            except RunDirError:
                identity = Identity(path.name, mode="unreadable")
            found.append(RunInfo(path, identity, run.complete, _size_bytes(path)))
    return sorted(found, key=lambda info: (info.identity.created_utc, info.path.name))


def _size_bytes(directory: Path) -> int:
    size = 0
    for each in directory.rglob("*"):
        with contextlib.suppress(OSError):  # A run under way replaces its files.
            size += each.lstat().st_size if each.is_file() else 0
    return size


def choose_for_pruning(
    runs: list[RunInfo],
    *,
    keep: int | None = None,
    before: datetime | None = None,
    incomplete: bool = False,
) -> list[RunInfo]:
    """Those of `runs` that any given rule drops: all but the newest `keep` of each name, those made
    before a time, those not complete. Without a rule none.
    """
    dropped: dict[Path, RunInfo] = {}
    if keep is not None:
        by_name: dict[str, list[RunInfo]] = {}
        for info in runs:
            by_name.setdefault(info.identity.name, []).append(info)
        for same in by_name.values():
            for info in same[: max(0, len(same) - keep)]:
                dropped[info.path] = info
    for info in runs:
        made = created(info)
        if (incomplete and not info.complete) or (before and made and made < before):
            dropped[info.path] = info
    return [info for info in runs if info.path in dropped]


def created(info: RunInfo) -> datetime | None:
    """When the run was made; None when its identity does not say."""
    try:
        return datetime.strptime(info.identity.created_utc, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def remove(info: RunInfo) -> None:
    """Delete a run directory; only ever one that carries a run's identity."""
    if not is_run(info.path):
        raise RunDirError(f"{info.path}: not a run directory; nothing removed")
    shutil.rmtree(info.path)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested tables and arrays of tables, as in a TOML file."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(e, Mapping) for e in value):
            for at, each in enumerate(value):
                name = each.get("name", at)
                yield from flatten(each, f"{prefix}{key}[{name}].")
        else:
            yield f"{prefix}{key}", value


def settings(run: Path) -> dict[str, Any]:
    """What a run was asked to do, by dotted key, without what repeats of it differ in (name and
    seed); {} where that cannot be read.
    """
    try:
        tree = tomllib.loads((run / "experiment.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError):
        return {}
    return {key: value for key, value in flatten(tree) if key not in ("name", "seed")}


def differing(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of flattened settings in which any differs from the first."""
    keys = dict.fromkeys(key for each in every for key in each)
    return [key for key in keys if any(each.get(key) != every[0].get(key) for each in every[1:])]


def listed(items: Sequence[str], shown: int = 6) -> str:
    """The first of `items` in a line, and how many more there are."""
    more = len(items) - shown
    text = "; ".join(items[:shown])
    return f"{text}; and {more} more (`prfaas runs diff`)" if more > 0 else text


def diff(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> list[tuple[str, Any | None, Any | None]]:
    """(key, left value, right value) where two resolved experiments differ; None is absent."""
    a, b = dict(flatten(left)), dict(flatten(right))
    keys = list(dict.fromkeys([*a, *b]))
    return [(key, a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)]
