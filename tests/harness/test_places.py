"""Where nothing can be written, a command says so in one line before it computes anything."""

import os
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.errors import BadInput
from harness.places import check_file, make_folder
from results.whole import check_whole, write_whole

SWEEP = ["sweep", "paper", "--mode", "plan", "--axis", "link.rate_gbps=5"]
#: In /proc nobody makes files, root neither.
NOWHERE = [
    ([*SWEEP, "--out", "/proc/x"], "/proc/x: the dataset cannot be put there"),
    (["plan", "paper", "--chart", "/proc/x.html"], "--chart /proc/x.html: cannot be wr"),
    (["plan", "paper", "--chart", "/nowhere/x.png"], "there is no folder /nowhere;"),
    (["profile", "--out", "/proc/x.toml"], "--out /proc/x.toml: cannot be written"),
    (["report", "RUN", "--out", "/proc/x.html"], "--out /proc/x.html: cannot be wr"),
    (["results", "export", "RUN", "--out", "/proc/x"], "--out /proc/x: cannot be wr"),
    (["certs", "a", "--out", "/proc/x"], "--out /proc/x: cannot make this folder"),
    (["nightly", "--out", "/proc/x"], "--out /proc/x: cannot make this folder"),
    (["load", "--out", "/proc/x"], "/proc/x: cannot make a run directory"),
    (
        ["load", "--save-result", "--result-filename", "..", "--out", "DIR"],
        "--result-filename '..': needs the name of a file",
    ),
]


@pytest.mark.parametrize(("arguments", "says"), NOWHERE)
def test_a_place_where_nothing_can_be_written_is_one_line(arguments, says, tmp_path, capsys):
    words = [{"DIR": str(tmp_path), "RUN": str(tmp_path)}.get(word, word) for word in arguments]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"prfaas {words[0]}: ") and says in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_sweep_into_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        assert main([*SWEEP, "--out", str(place)]) == 2
        assert f"{place}: the dataset cannot be put there: Not a dir" in capsys.readouterr().err


def test_a_file_that_can_be_written_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "held"
    path.write_text("before")
    check_file("--out", path)
    check_file("--out", tmp_path / "new")
    check_file("--out", Path("/dev/null"))
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("held", "before")]
    with pytest.raises(BadInput, match=f"^--out {tmp_path}: cannot be written: Is a directory$"):
        check_file("--out", tmp_path)
    make_folder("--out", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_place_for_pngs_is_made_before_a_page_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("harness.cli.report._extras", lambda path, options: None)
    monkeypatch.setattr("results.report.data.load", lambda path, extras: None)
    monkeypatch.setattr("results.report.page.draw", lambda run, prefix: None)
    assert main(["report", str(tmp_path), "--png", "/proc/x"]) == 2
    assert "--png /proc/x: cannot make this folder: No such file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    place = Path(f"/dev/fd/{write_fd}")
    check_whole(place)
    write_whole(place, "text")
    os.close(write_fd)
    with os.fdopen(read_fd) as reader:
        assert reader.read() == "text"
