"""Who may talk to a plane and what they may send: mutual TLS 1.3 and authorisation per grant.

An identity is the common name of a certificate that the shared authority signed. Every plane names
the tenants whose caches each identity may send to it. Keys stay in files; nothing here logs them.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.transport.tls import Stream, TlsSocket, Wrap
from engine.transport.tls_memory import MemoryTls

ANY = "*"


class SecurityError(ValueError):
    """Certificates or rules that cannot work; the message names the file or the rule."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Security:
    """Paths of PEM files, and rules.

    tenants: identity -> tenants it may send ("*": any; identity "*": every one with a certificate).
    """

    certificate: str
    key: str
    authority: str
    tenants: Mapping[str, Sequence[str]] = field(default_factory=lambda: {ANY: (ANY,)})

    def to_json(self) -> dict[str, Any]:
        return {
            "certificate": self.certificate,
            "key": self.key,
            "authority": self.authority,
            "tenants": {identity: list(names) for identity, names in self.tenants.items()},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Security:
        return cls(**value)


def server_context(security: Security) -> ssl.SSLContext:
    """For the listening side: asks for the peer's certificate and verifies it."""
    return _context(security, ssl.PROTOCOL_TLS_SERVER)


def client_context(security: Security) -> ssl.SSLContext:
    """For the dialling side. The peer's identity is checked by name (`peer_identity`), not its
    address: planes move between hosts, identities do not."""
    return _context(security, ssl.PROTOCOL_TLS_CLIENT)


def _context(security: Security, protocol: int) -> ssl.SSLContext:
    for path in (security.certificate, security.key, security.authority):
        if not Path(path).is_file():
            raise SecurityError(f"{path}: no such file; `prfaas certs` makes a test authority")
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(security.authority)
        context.load_cert_chain(security.certificate, security.key)
    except (ssl.SSLError, OSError) as error:
        raise SecurityError(f"{security.certificate}: {error}") from error
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # Connections are long-lived; a ticket would be one more thing that a reader must handle.
        context.num_tickets = 0
    return context


def tls_ends(security: Security, server_side: bool) -> Wrap:
    """What makes this side's end of connections: `tls_records` where it is to be had, else
    `tls_memory`. Raises SecurityError."""
    context = _context(
        security, ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
    )
    # Not before: it brings an X.509 parser and an OpenSSL, 9 MiB of no use to a plain data plane.
    try:
        from engine.transport.tls_records import RecordsContext
    except ImportError:
        return lambda raw: MemoryTls(raw, context, server_side)
    try:
        return RecordsContext(security.certificate, security.key, security.authority, server_side)
    except ssl.SSLError as error:
        raise SecurityError(f"{security.certificate}: {error}") from error


def tls_by() -> str:
    """What `tls_ends` uses here, in words."""
    try:
        from engine.transport.tls_records import VERSION
    except ImportError:
        return f"Python's ssl ({ssl.OPENSSL_VERSION})"
    return f"cryptography's {VERSION}, in C"


def peer_identity(sock: Stream) -> str:
    """Common name of the verified peer, or an empty string on a plain connection."""
    return sock.identity() if isinstance(sock, TlsSocket) else ""


def why_not_allowed(tenants: Mapping[str, Sequence[str]], identity: str, tenant: str) -> str:
    """Why `identity` may not send a cache of `tenant`; empty where it may."""
    allowed = [*tenants.get(identity, ()), *tenants.get(ANY, ())]
    if ANY in allowed or tenant in allowed:
        return ""
    return f"{identity or 'an unnamed peer'} may not send caches of tenant {tenant!r}"
