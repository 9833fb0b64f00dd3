"""A test certificate authority in a directory: `ca.pem`, `ca.key`, and NAME.pem, NAME.key."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from engine.transport.security import SecurityError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def make_authority(directory: Path, days: int = 30) -> Path:
    """The authority's certificate, made if `directory` has none yet."""
    _check_days(days)
    certificate_path, key_path = directory / "ca.pem", directory / "ca.key"
    if certificate_path.is_file() and key_path.is_file():
        return certificate_path
    directory.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "prfaas test authority")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(key_path, _private_pem(key), 0o600)
    _write(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return certificate_path


def make_certificate(directory: Path, name: str, days: int = 30) -> tuple[Path, Path]:
    """(certificate, key) of the identity `name`, signed by the directory's authority; replaces an
    earlier one. Raises SecurityError for a name that cannot be a file or an identity."""
    _check_days(days)
    if not _NAME.fullmatch(name) or name == "ca":
        raise SecurityError(
            f"identity {name!r}: letters, digits, dot, dash and underscore, at most 63, not 'ca'"
        )
    try:
        authority = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        signer = serialization.load_pem_private_key(
            (directory / "ca.key").read_bytes(), password=None
        )
    except (OSError, ValueError) as error:
        raise SecurityError(f"{directory}/ca.pem, ca.key: {error}") from error
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.ExtendedKeyUsage(
        [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    certificate = (
        _builder(subject, authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(usage, critical=False)
        # RFC 5280, 4.2.1.1: not to be left out, and Python from 3.13 on refuses a chain without.
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    paths = directory / f"{name}.pem", directory / f"{name}.key"
    _write(paths[1], _private_pem(key), 0o600)
    _write(paths[0], certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return paths


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        # Hosts' clocks differ; an hour back keeps a fresh certificate valid on all of them.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _check_days(days: int) -> None:
    if not 1 <= days <= 3650:
        raise SecurityError(f"validity of {days} days; 1 to 3650 would do")


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Written under another name first: a reader never sees half a file, and a key is never
    readable by others, not even for a moment."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
    fresh.replace(path)
