"""The worker's command line: what it accepts, and what it says about the rest."""

from __future__ import annotations

import argparse

import pytest

from engine.worker.options import InputError, add_arguments, from_namespace


def parse(*argv: str):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_namespace(parser.parse_args(argv))


def test_defaults_and_addresses():
    options = parse("--listen", "[::1]:80")
    assert options.listen == ("::1", 80)
    assert (options.role, options.model, options.pacing) == ("both", "tiny", None)
    assert str(parse("--socket", "/s", "--pacing", "p.json").pacing) == "p.json"


def test_certificates_and_rules():
    tls = ["--certificate", "c", "--key", "k", "--authority", "a"]
    options = parse(
        "--listen", "10.0.0.1:80", *tls, "--tenants", "p0=acme,beta", "--tenants", "p1=*"
    )
    assert options.security is not None
    assert options.security.tenants == {"p0": ("acme", "beta"), "p1": ("*",)}
    assert parse("--socket", "/s", *tls).security.tenants == {"*": ("*",)}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--listen", "80"], "HOST:PORT would do"),
        (["--listen", "0.0.0.0:80"], "--listen 0.0.0.0:80 without TLS"),
        (["--socket", "/s", "--slots", "0"], "--slots 0; 1 or more would do"),
        (["--socket", "/s", "--step-tokens", "8"], "--step-tokens 8 is less than a page of 64"),
        (["--socket", "/s", "--key", "k"], "--certificate, --key and --authority go together"),
        (["--socket", "/s", "--tenants", "a=b"], "--tenants needs TLS"),
    ],
)
def test_one_line_for_what_cannot_be(argv, message):
    with pytest.raises(InputError, match=message):
        parse(*argv)
