"""Mutual TLS 1.3, authorisation at the offer, and the audit trail, on real planes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from engine.transport.certificates import make_authority, make_certificate
from engine.transport.errors import PlaneLost, TransferFailed, TransferRefused
from engine.transport.messages import Key
from engine.transport.outbound import Peer
from engine.transport.security import (
    Security,
    SecurityError,
    client_context,
    server_context,
    why_not_allowed,
)
from engine.transport.timing import Deadlines


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    make_authority(directory)
    for name in ("prefill", "decode"):
        make_certificate(directory, name)
    return directory


def identity(directory: Path, name: str, **rules: Any) -> Security:
    return Security(
        str(directory / f"{name}.pem"),
        str(directory / f"{name}.key"),
        str(directory / "ca.pem"),
        **rules,
    )


async def test_encrypted_transfer_names_both_ends(bench: Any, certs: Path) -> None:
    decoder, receiver = await bench.decoder(security=identity(certs, "decode"))
    sender = await bench.sender(security=identity(certs, "prefill"))
    manifest = bench.manifest()
    await bench.send(sender, Peer(*receiver.address), Key("r"), manifest)
    bench.assert_arrived(decoder, Key("r"), manifest)
    assert decoder.committed[Key("r")].identity == "prefill"
    (sent,) = sender.audit_rows()
    assert sent["peer"] == "decode"


async def test_tenant_that_the_peer_may_not_send_is_refused(bench: Any, certs: Path) -> None:
    rules = {"prefill": ("b", "c")}
    decoder, receiver = await bench.decoder(security=identity(certs, "decode", tenants=rules))
    sender = await bench.sender(security=identity(certs, "prefill"))
    with pytest.raises(
        TransferRefused, match="prefill may not send caches of tenant 'a'"
    ) as caught:
        await sender.open(Peer(*receiver.address), Key("r"), bench.manifest())
    assert not caught.value.retryable
    assert decoder.held == {}
    rows: list[dict] = []
    await bench.until(lambda: rows.extend(receiver.audit_rows()) or rows)
    assert (rows[0]["direction"], rows[0]["peer"], rows[0]["tenant"]) == ("refused", "prefill", "a")


async def test_receiver_with_another_name_is_refused(bench: Any, certs: Path) -> None:
    decoder, receiver = await bench.decoder(security=identity(certs, "decode"))
    sender = await bench.sender(security=identity(certs, "prefill"))
    with pytest.raises(TransferRefused, match="the peer is decode, expected other"):
        peer = Peer(*receiver.address, identity="other")
        await sender.open(peer, Key("r"), bench.manifest())
    peer = Peer(*receiver.address, identity="decode")
    await bench.send(sender, peer, Key("r"), bench.manifest(2))
    assert Key("r") in decoder.committed


async def test_strangers_do_not_get_in(bench: Any, certs: Path, tmp_path: Path) -> None:
    make_authority(tmp_path)
    make_certificate(tmp_path, "prefill")
    decoder, receiver = await bench.decoder(security=identity(certs, "decode"))
    quick = Deadlines(peer_silence_s=0.4, give_up_s=0.6)
    plain = await bench.sender(deadlines=quick)
    foreign = await bench.sender(deadlines=quick, security=identity(tmp_path, "prefill"))
    for sender in (plain, foreign):
        with pytest.raises(TransferFailed, match="not heard"):
            await sender.open(Peer(*receiver.address), Key("r"), bench.manifest())
    assert decoder.held == {}


async def test_missing_files_are_named(bench: Any, certs: Path) -> None:
    broken = Security(str(certs / "nobody.pem"), str(certs / "decode.key"), str(certs / "ca.pem"))
    with pytest.raises(PlaneLost, match=r"nobody\.pem: no such file; `prfaas certs`"):
        await bench.plane(bench.source, security=broken)


def test_certificates_pass_the_strict_check(certs: Path) -> None:
    # Python's own contexts make it from 3.13 on.
    server, client = (c(identity(certs, "decode")) for c in (server_context, client_context))
    for context in (server, client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(3):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert [side.getpeercert()["subject"][0][0][1] for side in sides] == ["decode", "decode"]


def test_only_tls_1_3_is_spoken(certs: Path) -> None:
    server, client = (c(identity(certs, "decode")) for c in (server_context, client_context))
    for context in (server, client):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    ours, theirs = socket.socketpair()
    loop = asyncio.new_event_loop()
    accepting = loop.run_in_executor(None, lambda: _handshake(server, theirs))
    with pytest.raises((ssl.SSLError, OSError)):
        old.wrap_socket(ours)
    assert isinstance(loop.run_until_complete(accepting), ssl.SSLError)
    loop.close()
    ours.close()


def _handshake(context: ssl.SSLContext, sock: socket.socket) -> Exception | None:
    try:
        context.wrap_socket(sock, server_side=True)
    except (ssl.SSLError, OSError) as error:
        return error
    finally:
        sock.close()
    return None


@pytest.mark.parametrize(
    ("rules", "identity_", "tenant", "allowed"),
    [
        ({"*": ("*",)}, "x", "t", True),
        ({"x": ("t",)}, "x", "t", True),
        ({"x": ("t",)}, "x", "u", False),
        ({"x": ("t",)}, "y", "t", False),
        ({"x": ("*",)}, "x", "u", True),
        ({"*": ("t",)}, "y", "t", True),
        ({}, "x", "t", False),
        ({"x": ()}, "x", "", False),
    ],
)
def test_rules(rules: dict, identity_: str, tenant: str, allowed: bool) -> None:
    assert (why_not_allowed(rules, identity_, tenant) == "") is allowed


def test_keys_are_private_and_names_are_checked(certs: Path) -> None:
    assert (certs / "decode.key").stat().st_mode & 0o077 == 0
    assert (certs / "ca.key").stat().st_mode & 0o077 == 0
    for name in ("ca", "../x", "", "a" * 64):
        with pytest.raises(SecurityError, match="identity"):
            make_certificate(certs, name)
    with pytest.raises(SecurityError, match="validity of 0 days"):
        make_certificate(certs, "x", days=0)


def test_authority_is_made_once(certs: Path) -> None:
    before = (certs / "ca.pem").read_bytes()
    make_authority(certs)
    assert (certs / "ca.pem").read_bytes() == before
