"""What every command does when its input is missing, its reader leaves, or it is told to end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import execution
from harness.cli.main import COMMANDS, main
from harness.comparison import Comparison
from harness.errors import ExitCode
from harness.measure import run_phase
from results import reader, summary

PRFAAS = [sys.executable, "-m", "harness"]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_fits_a_terminal(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "examples:" in said
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report", "nodir"], "nodir: no such directory"),
        (["report", "empty"], "empty: not a run directory"),
        (["compare", "nodir", "nodir"], "nodir: no such directory"),
        (["results", "describe", "nodir"], "nodir: no such run directory"),
        (["results", "export", "nodir"], "nodir: no such run directory"),
        (["runs", "list", "--runs", "nodir"], "--runs nodir: no such directory"),
        (["runs", "diff", "nodir", "empty"], "nodir: no such directory"),
        (["explain", "nodir", "--request", "1"], "nodir: no such run directory"),
        (["run", "nofile"], "nofile"),
        (["chaos", "--seeds", "0"], "must be positive"),
        (["chaos", "--mode", "emulate", "--minutes", "nan"], "must be positive and finite"),
        (["chaos", "--mode", "emulate", "--minutes", "inf"], "must be positive and finite"),
        (["chaos", "--mode", "emulate", "--planted"], "--planted is for --mode virtual"),
        (["chaos", "--mode", "emulate", "--seed", "1", "--explain"], "--explain is for --mode"),
        (["chaos", "--mode", "emulate", "--seeds", "5"], "--seeds is for --mode virtual"),
        (["chaos", "--minutes", "5"], "--minutes is for --mode emulate"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "plan --trace x --rate-gbps nan",
        "plan --trace x --rtt-ms inf",
        "plan paper --price-remote -1",
        "report x --price-gb nan",
        "compare x y --min-effect -1",
        "trace describe x --threshold 1.5",
    ],
)
def test_a_number_that_is_none_is_refused_with_its_flag(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == ExitCode.USAGE
    flag, value = words.split()[-2:]
    assert f"argument {flag}: found {value}, needs a " in capsys.readouterr().err


def test_no_runs_yet_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "list"]) == 0
    assert "no runs in runs" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run paper --dry-run", "plan bench", "runs list"])
def test_a_reader_that_leaves_ends_the_command_quietly(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*PRFAAS, *command.split()], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("out", "name", "says"),
    [
        ("file", "run", "{out}: cannot make a run directory: File exists"),
        ("file/below", "run", "{out}: cannot make a run directory: Not a directory"),
        ("dangling", "run", "{out}: cannot make a run directory: File exists"),
        ("dangling/below", "run", "{out}: cannot make a run directory: File exists"),
        ("x" * 300, "run", "{out}: cannot make a run directory: File name too long"),
        ("new", ".hidden", "run name '.hidden': use letters"),
    ],
)
def test_a_dry_run_refuses_a_place_as_the_run_would(
    out: str, name: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    place = tmp_path / out
    words = ["run", "paper", "--out", str(place), "--set", f"name={name}"]
    assert main([*words, "--dry-run"]) == 2
    dry = capsys.readouterr()
    assert dry.out == ""
    assert dry.err.startswith(f"prfaas run: {says.format(out=place)}")
    assert main(words) == 2
    assert capsys.readouterr().err == dry.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new" / "below"
    assert main(["run", "paper", "--dry-run", "--out", str(out)]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_dry_run_refuses_a_place_that_it_may_not_write_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert main(["run", "paper", "--dry-run", "--out", str(tmp_path)]) == 2
    assert "Permission denied" in capsys.readouterr().err


HIDDEN = """
import importlib, os, signal, sys
from harness.cli.main import main

def hides(name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        [None for _ in range(1000)]
    except BaseException:
        raise SystemError("of the module's own") from None

importlib.import_module = hides
signal.signal(signal.SIGINT, signal.default_int_handler)
main(["run", "bench"])
"""


def test_ctrl_c_while_a_command_is_imported_is_one_line_whatever_the_module_makes_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "prfaas run: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_keeps_what_it_has(
    number: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [*PRFAAS, "run", "paper", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests under nohup has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()  # The run has begun.
        process.send_signal(number)
        said += process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in said
    (run,) = tmp_path.iterdir()
    assert not (run / "complete").exists()
    assert (run / "run.json").exists()


EARLY = """
import asyncio, os, signal, sys
from harness import clock, execution
from harness.cli.main import main

async def compare(*_):
    print("begun")
    await asyncio.sleep(1)
    print("done")

run = clock.run

def told_first(work):
    os.kill(os.getpid(), signal.SIGTERM)
    return run(work)

execution.compare, clock.run = compare, told_first
sys.exit(main(["run", "paper", "--out", sys.argv[1]]))
"""


def test_a_simulation_that_is_told_to_end_before_it_begins_is_marked_and_quiet(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.INTERRUPTED
    assert "done" not in done.stdout
    assert "never awaited" not in done.stderr and "Traceback" not in done.stderr
    (run,) = tmp_path.iterdir()
    assert reader.read(run, "requests").num_rows == 0


TWICE = """
import asyncio, os, signal, sys, weakref
from harness import execution
from harness.cli.main import main

async def compare(*_):
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(1)

class Closing(execution.Recorder):
    def close(self, complete):
        # As in the middle of it: where an exception would be told of and passed over.
        again = weakref.ref(Closing.__new__(Closing), lambda _: os.kill(os.getpid(), signal.SIGINT))
        print("still there", again)

execution.compare, execution.Recorder = compare, Closing
signal.signal(signal.SIGINT, signal.default_int_handler)
main(["run", "paper", "--out", sys.argv[1]])
"""


def test_a_second_ctrl_c_ends_a_simulation_at_once_and_quietly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (ExitCode.INTERRUPTED, "")
    planned, *said = done.stderr.splitlines()
    assert "configurations" in planned
    assert said == ["interrupted again: ended at once"]
    (run,) = tmp_path.iterdir()
    assert reader.read(run, "requests").num_rows == 0


ENDLESS = """
import asyncio, os, signal, sys
from harness import execution
from harness.cli.main import main

def ends_never():
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        pass

def many():
    for _ in range(100_000):
        asyncio.get_running_loop().call_soon(again)

def again():
    os.kill(os.getpid(), signal.SIGTERM) if not sent else None
    sent.append(1)
    sum(range(10_000))  # a pass of 10 s or more

def refused():
    os.kill(os.getpid(), signal.SIGTERM)
    asyncio.get_running_loop().create_task(refuses())

async def refuses():
    while True:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            pass

sent = []

async def compare(*_):
    asyncio.get_running_loop().call_soon(globals()[sys.argv[2]])
    await asyncio.sleep(1)

execution.compare, execution.ENDING_CPU_S = compare, 0.2
main(["run", "paper", "--out", sys.argv[1]])
"""


@pytest.mark.parametrize("what", ["ends_never", "many", "refused"])
def test_a_simulation_that_is_told_to_end_and_cannot_is_ended(what: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS, str(tmp_path), what],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (ExitCode.INTERRUPTED, "")
    _, *said = done.stderr.splitlines()
    assert said == ["interrupted, but there is no end to it: ended at once"]
    (run,) = tmp_path.iterdir()
    assert reader.read(run, "requests").num_rows == 0


NO_MEMORY = """
import asyncio, sys
from harness import execution
from harness.cli.main import main

def fails():
    raise MemoryError

async def compare(*_):
    loop = asyncio.get_running_loop()
    if sys.argv[2] == "callback":
        loop.call_soon(fails)
        await asyncio.sleep(1)
    fails()

execution.compare = compare
main(["run", "paper", "--out", sys.argv[1]])
"""


@pytest.mark.parametrize("where", ["callback", "comparison"])
def test_a_simulation_without_memory_says_so_and_ends(where: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY, str(tmp_path), where],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (ExitCode.INCOMPLETE, "")
    _, *said = done.stderr.splitlines()
    assert said == ["no memory left: ended at once, with what was written so far"]
    (run,) = tmp_path.iterdir()
    assert reader.read(run, "requests").num_rows == 0


async def test_a_second_ctrl_c_in_real_time_says_that_it_cuts_off() -> None:
    said: list[str] = []
    recorder: Any = None  # asked for nothing so soon

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for at_s in (0.0, 0.01):
            loop.call_later(at_s, os.kill, os.getpid(), signal.SIGINT)
        await asyncio.sleep(60.0)

    with pytest.raises(asyncio.CancelledError):
        await execution._supervised(work(), Comparison(), recorder, said.append)
    assert [line.split(":")[0] for line in said] == ["interrupted", "interrupted again"]


def test_kill_9_keeps_the_phases_that_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["capacity_warmup_s=20", "capacity_window_s=100", "latency_window_s=50000"]
    sets = [word for each in settings for word in ("--set", f"measure.{each}")]
    with subprocess.Popen(
        [*PRFAAS, "run", "paper", "--only", "prfaas", "--out", str(tmp_path), *sets],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        while "latency at" not in (line := process.stderr.readline()):
            assert line, "the run ended"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    (run,) = tmp_path.iterdir()
    for table in ("requests", "tokens", "decisions", "links", "instances"):
        found = reader.read(run, table)
        assert found["phase"].to_pylist().count("capacity") > 100, table
    rows = reader.read(run, "requests").to_pylist()
    ids = sorted(row["id"] for row in rows if row["phase"] == "capacity")
    assert ids == list(range(len(ids)))
    assert max(row["scheduled_us"] for row in rows) > 115e6
    kept = summary.read(run)
    assert not kept.complete
    (configuration,) = kept.configurations
    assert [phase.name for phase in configuration.phases] == ["capacity"]
    assert configuration.phases[0].counts.offered == len(ids)
    assert main(["report", str(run), "--no-png"]) == 0
    page = (run / "report.html").read_text()
    assert "INCOMPLETE" in page and "cut off: the run was killed" in page
    assert main(["compare", str(run), str(run)]) == 0
    assert "cut off" in capsys.readouterr().err
    assert main(["runs", "list", "--runs", str(tmp_path)]) == 0
    assert "INCOMPLETE" in capsys.readouterr().out


def test_a_run_that_an_error_ends_keeps_the_phases_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(experiment: Any, phase: Any, *others: Any) -> Any:
        if phase.name == "latency":
            raise OSError(errno.ENOSPC, "full")
        return await run_phase(experiment, phase, *others)

    monkeypatch.setattr("harness.comparison.run_phase", no_room)
    settings = ["capacity_warmup_s=20", "capacity_window_s=100"]
    sets = [word for each in settings for word in ("--set", f"measure.{each}")]
    assert main(["run", "paper", "--only", "prfaas", "--out", str(tmp_path), *sets]) == 4
    (run,) = tmp_path.iterdir()
    kept = summary.read(run)
    assert not kept.complete and kept.verdict == "ended by an error: [Errno 28] full"
    assert [phase.name for phase in kept.configurations[0].phases] == ["capacity"]


def test_every_exit_code_is_in_the_docs() -> None:
    docs = Path(__file__).parents[2] / "docs" / "results.md"
    table = docs.read_text().split("## Exit codes")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows[0] == "exit code"
    assert [int(row) for row in rows[1:]] == sorted({*map(int, ExitCode), 141})
