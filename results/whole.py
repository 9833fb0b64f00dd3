"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def check_whole(path: Path) -> None:
    """Raises the OSError, which names `path`, that `write_whole` would meet there before its first
    byte; leaves nothing."""
    try:
        if path.exists() and not path.is_file():
            path.open("wb").close()
            return
        draft = _draft(path.resolve())
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.part")


def write_whole(path: Path, data: bytes | str) -> None:
    """Put `data` (text as UTF-8) at `path`, which keeps what it held until then. What is no regular
    file, as /dev/stdout, is written to. Raises OSError that names `path`.
    """
    raw = data.encode() if isinstance(data, str) else data
    target = path.resolve()
    draft = _draft(target)
    try:
        # Of `path`: where that is a pipe, /dev/stdout resolves to what is not there.
        if path.exists() and not path.is_file():
            path.write_bytes(raw)
            return
        try:
            with draft.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
