"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes | str) -> None:
    """Put `data` (text as UTF-8) at `path`, which keeps what it held until then. What is no regular
    file, as /dev/stdout, is written to. Raises OSError that names `path`.
    """
    raw = data.encode() if isinstance(data, str) else data
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(raw)
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
