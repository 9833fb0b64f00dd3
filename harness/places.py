"""Places that a command line names for what will be written: refused before it is measured."""

from __future__ import annotations

from pathlib import Path

from harness.errors import BadInput
from results.whole import check_whole


def check_file(flag: str, path: Path) -> None:
    """Raises BadInput, which names `flag`, where a file cannot be written. Leaves nothing there."""
    if not path.parent.is_dir():
        raise BadInput(f"{flag} {path}: there is no folder {path.parent}; make it first")
    try:
        check_whole(path)
    except OSError as error:
        raise BadInput(f"{flag} {path}: cannot be written: {error.strerror}") from None


def make_folder(flag: str, path: Path) -> None:
    """Makes the folder, and those it is in. Raises BadInput, which names `flag`, where it is not
    to be had."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{flag} {path}: cannot make this folder: {error.strerror}") from None
