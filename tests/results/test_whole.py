"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from harness.cli.main import main
from results.whole import write_whole


def test_a_failure_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_whole(path, "before")

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full") as caught:
        write_whole(path, "after")
    assert caught.value.filename == str(path)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["before"]


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    write_whole(link, b"after")
    assert link.is_symlink() and target.read_text() == "after"
    write_whole(Path(os.devnull), b"after")
    assert not Path(os.devnull).is_file()


def test_a_full_disk_is_said_with_the_file_and_is_no_bad_input(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(__file__).parent / "fixtures" / "v1"
    assert main(["results", "export", str(run), "--out", "/dev/full"]) == 4
    assert capsys.readouterr().err == "prfaas results: /dev/full: No space left on device\n"
