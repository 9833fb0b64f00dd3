"""Without ray, or without a choice about encryption: one clear line."""

import sys

import pytest

from harness.cli.main import main


def test_without_ray_there_is_one_clear_error(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    code = main(["sweep", "paper", "--axis", "link.rate_gbps=5,10", "--on", "ray"])
    assert code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "prfaas-bench[ray]" in line


def test_plain_traffic_between_hosts_must_be_asked_for(capsys):
    assert main(["run", "bench", "--fleet", "ray"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--certs" in line and "--allow-plain" in line


@pytest.mark.parametrize("words", [["--address", "auto"], ["--allow-plain"]])
def test_options_of_a_ray_fleet_need_one(words, capsys):
    assert main(["run", "bench", *words]) == 2
    assert "needs --fleet ray" in capsys.readouterr().err


def test_a_simulation_has_no_workers_to_place(capsys):
    words = ["run", "paper", "--mode", "simulate", "--fleet", "ray", "--allow-plain"]
    assert main(words) == 2
    assert "real workers" in capsys.readouterr().err
