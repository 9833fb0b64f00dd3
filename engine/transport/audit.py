"""One row for each cache that crossed or was denied: who, what, how many bytes, which digest.

Never contents, keys or tokens.
"""

from __future__ import annotations

from typing import Any

from engine.transport.messages import Key, Manifest


def audit_row(
    direction: str,
    identity: str,
    instance: int,
    key: Key,
    manifest: Manifest,
    digest: int,
    unix_s: float,
    wire_bytes: int | None = None,
) -> dict[str, Any]:
    """direction: `sent`, `received`, or `refused` (an offer that the peer was not authorised to
    make; nothing crossed, digest 0). Of the other end: identity, what its certificate says (empty
    without TLS), and instance, the incarnation that it gave itself. wire_bytes: given to the
    network, headers and resends included; only the sender counts them."""
    return {
        "unix_s": unix_s,
        "direction": direction,
        "peer": identity,
        "peer_incarnation": instance,
        "tenant": manifest.tenant,
        "request_id": key.request_id,
        "attempt": key.attempt,
        "n_tokens": manifest.n_tokens,
        "held_tokens": manifest.held_tokens,
        "bytes": manifest.total_bytes,
        "wire_bytes": wire_bytes,
        "digest": f"{digest:032x}",
    }
