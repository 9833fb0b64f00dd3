"""The worker's command line: what it accepts, and what it says about the rest."""

from __future__ import annotations

import argparse

import pytest

from engine.worker.errors import BadRequest
from engine.worker.messages import parse_prefill
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
        (["--socket", "/s", "--queue-ageing", "0"], "--queue-ageing 0.0; a number above 0 would"),
        (["--socket", "/s", "--slo-ttft-s", "nan"], "--slo-ttft-s nan; a number above 0 would do"),
        (["--socket", "/s", "--key", "k"], "--certificate, --key and --authority go together"),
        (["--socket", "/s", "--tenants", "a=b"], "--tenants needs TLS"),
    ],
)
def test_one_line_for_what_cannot_be(argv, message):
    with pytest.raises(InputError, match=message):
        parse(*argv)


def test_how_long_a_request_has_waited_is_seconds():
    body = {"request_id": "r", "prompt": [1, 2]}
    assert parse_prefill(body, 8).waited_s == 0.0
    assert parse_prefill(body | {"waited_s": 2.5}, 8).waited_s == 2.5
    for wrong in (-1, "1", True, float("nan"), float("inf")):
        with pytest.raises(BadRequest, match=r"waited_s: .*; seconds >= 0"):
            parse_prefill(body | {"waited_s": wrong}, 8)
