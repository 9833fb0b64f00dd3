"""One row for each cache that crossed or was denied: who, what, how many bytes, which digest.

Never contents, keys or tokens.
"""

from __future__ import annotations

from typing import Any

from engine.transport.messages import Key, Manifest


def audit_row(
    direction: str, identity: str, key: Key, manifest: Manifest, digest: int, unix_s: float
) -> dict[str, Any]:
    """direction: `sent`, `received`, or `refused` (an offer that the peer was not authorised to
    make; nothing crossed, digest 0). identity: of the other end, empty without TLS."""
    return {
        "unix_s": unix_s,
        "direction": direction,
        "peer": identity,
        "tenant": manifest.tenant,
        "request_id": key.request_id,
        "attempt": key.attempt,
        "n_tokens": manifest.n_tokens,
        "held_tokens": manifest.held_tokens,
        "bytes": manifest.total_bytes,
        "digest": f"{digest:032x}",
    }
