"""`prfaas link` and `prfaas doctor` as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli.link import HOUR
from harness.cli.main import main
from harness.errors import ExitCode
from harness.links.state import all_states, find_state


def test_relay_up_show_down(capsys) -> None:
    up = ["link", "up", "--backend", "relay", "--rate-gbps", "0.5", "--rtt-ms", "3", "--json"]
    assert main([*up, "--forward", "pd=127.0.0.1:9"]) == ExitCode.OK
    link = json.loads(capsys.readouterr().out)
    token = link["token"]
    try:
        assert link["backend"] == "relay"
        assert list(link["forwards"]) == ["pd=127.0.0.1:9"]
        assert main(["link", "show", "--json"]) == ExitCode.OK
        shown = {entry["token"]: entry for entry in json.loads(capsys.readouterr().out)}
        assert shown[token]["status"] == "kept until down"
        assert shown[token]["shape"]["forward"]["rate_bps"] == 0.5e9
    finally:
        assert main(["link", "down", token, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {"removed": [token]}
    assert token not in [state.token for state in all_states()]


def test_up_stays_after_the_command_has_ended(offers) -> None:
    if not offers.available("tbf"):
        pytest.skip(offers.by_backend["tbf"].reason)
    words = ["link", "up", "--backend", "tbf", "--rate-gbps", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words], capture_output=True, text=True, check=True
    )
    link = json.loads(done.stdout)
    try:
        assert all(Path(path).exists() for path in link["netns"].values())
    finally:
        assert main(["link", "down", link["token"]]) == ExitCode.OK
    assert not any(Path(path).exists() for path in link["netns"].values())


def test_probe_measures_a_temporary_link(capsys) -> None:
    words = ["link", "probe", "--backend", "relay", "--rate-gbps", "0.2", "--rtt-ms", "4"]
    assert main([*words, "--seconds", "0.3", "--no-iperf3", "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    values = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert list(values) == ["rtt", "rate there", "rate back"]
    assert values["rtt"] > 0.003
    assert 0.02e9 < values["rate there"] < 0.25e9


def test_a_terminated_probe_leaves_nothing() -> None:
    words = ["link", "probe", "--rate-gbps", "0.2", "--rtt-ms", "4", "--seconds", "30"]
    process = subprocess.Popen([sys.executable, "-m", "harness", *words], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    state = None
    while state is None and time.monotonic() < deadline:
        time.sleep(0.05)
        mine = [each for each in all_states() if each.owner.pid == process.pid]
        state = next((each for each in mine if each.backend != "probe" and each.shape), None)
    assert state
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == ExitCode.INTERRUPTED
    assert not [each for each in all_states() if each.owner.pid == process.pid]
    left = list(Path("/run/netns").glob(f"prfaas-*-{process.pid}-*"))
    assert left == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up"], "give --preset, --rate-gbps or --spec"),
        (["up", "--rate-gbps", "0"], "link.rate_gbps: Input should be greater than 0 (found 0.0)"),
        (["up", "--spec", "/nowhere.toml"], "/nowhere.toml: No such file or directory"),
        (["down", "nosuch"], "no link 'nosuch' is up"),
        (["probe", "nosuch"], "no link 'nosuch' is up"),
        (
            ["up", "--backend", "relay", "--rate-gbps", "1", "--forward", "x"],
            "--forward x: must be",
        ),
    ],
)
def test_errors_are_one_line_and_exit_2(words: list[str], message: str, capsys) -> None:
    assert main(["link", *words]) == ExitCode.USAGE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_a_specification_file_is_read_and_errors_name_it(tmp_path, capsys) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('[link]\npreset = "metro"\nrate_gps = 1\n')
    assert main(["link", "up", "--spec", str(path)]) == ExitCode.USAGE
    assert f"{path}: link.rate_gps: Extra inputs" in capsys.readouterr().err
    for without in ("", "link = 3"):
        path.write_text(without)
        assert main(["link", "up", "--spec", str(path)]) == ExitCode.USAGE
        assert capsys.readouterr().err == f"prfaas link: {path}: has no [link] table\n"


def test_a_measurement_takes_some_time(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["link", "probe", "--seconds", "nan"])
    assert ended.value.code == ExitCode.USAGE
    assert "needs a finite number >= 0.1" in capsys.readouterr().err


def test_down_leaves_the_link_of_a_running_harness(capsys) -> None:
    from harness.links.state import LinkState, remove

    state = LinkState.new("relay", ("prfaas", "pd"), persistent=False)
    state.save()
    try:
        assert main(["link", "down", state.token]) == ExitCode.USAGE
        assert f"belongs to running process {os.getpid()}" in capsys.readouterr().err
        assert find_state(state.token)
    finally:
        remove(state)


def test_doctor_describes_the_host(capsys) -> None:
    assert main(["doctor", "--json"]) == ExitCode.OK
    host = json.loads(capsys.readouterr().out)
    assert host["machine"]["cores"] >= 1
    assert host["links"]["relay"]["available"] is True
    assert set(host["links"]) == {"netem", "tun", "tbf", "relay"}
    assert main(["doctor"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "link       relay  yes" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], "--seconds 0 must be above 0"),
        (["--time-scale", "0"], "--time-scale 0 must be above 0"),
        (["--spec", "HOUR"], "--seconds says how much"),
        (["--out", "FULL"], "is not empty"),
    ],
)
def test_bad_follow_options_are_one_line(words: list[str], message: str, tmp_path, capsys) -> None:
    (tmp_path / "something").touch()
    places = {"HOUR": str(HOUR), "FULL": str(tmp_path)}
    command = ["link", "follow", *(places.get(word, word) for word in words)]
    assert main(command) == ExitCode.USAGE
    assert message in capsys.readouterr().err
