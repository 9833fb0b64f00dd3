"""What a fleet's workers say of each cache that crossed, collected, in names of instances.

A worker's transport keeps rows (`engine.transport.audit`) until it is asked. A worker that is
killed takes those with it that nobody had asked for; the other end of a cache still tells of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from harness.instances.remote import RemoteInstance
from harness.ports import Instance, InstanceLost, InstanceSpec
from results.rows import AuditRow


class AuditTrail:
    """Of all lives of a fleet's workers."""

    def __init__(self, instances: Mapping[str, Instance]) -> None:
        self._instances = instances
        self._by_incarnation: dict[int, InstanceSpec] = {}

    def joined(self, spec: InstanceSpec, incarnation: int) -> None:
        """A life of a worker began."""
        self._by_incarnation[incarnation] = spec

    async def collect(self) -> list[AuditRow]:
        """Rows since the last call, of every worker that answers."""
        asked = [
            each
            for each in self._instances.values()
            if isinstance(each, RemoteInstance) and not each.lost
        ]
        answers = await asyncio.gather(*(_rows_of(each) for each in asked))
        found = [
            self._row(instance.spec, row)
            for instance, rows in zip(asked, answers, strict=True)
            for row in rows
        ]
        return sorted(found, key=lambda row: row.unix_s)

    def _row(self, reporter: InstanceSpec, row: dict[str, Any]) -> AuditRow:
        own, peer = (reporter.name, reporter.cluster), self._peer(row)
        sent, refused = row["direction"] == "sent", row["direction"] == "refused"
        prefix, _, number = row["request_id"].rpartition(":")
        return AuditRow(
            row["unix_s"],
            reporter.name,
            "sent" if sent else "received",
            "refused" if refused else "committed",
            prefix or "request",
            int(number),
            row["attempt"],
            row["tenant"],
            *(own if sent else peer),
            *(peer if sent else own),
            row["peer"],
            row["n_tokens"],
            row["held_tokens"],
            row["bytes"],
            row["wire_bytes"],
            None if refused else row["digest"],
        )

    def _peer(self, row: dict[str, Any]) -> tuple[str, str]:
        """Name and cluster of the other end. What its certificate says comes before what it said of
        itself."""
        proven = self._instances.get(row["peer"])
        spec = proven.spec if proven else self._by_incarnation.get(row["peer_incarnation"])
        return ("", "") if spec is None else (spec.name, spec.cluster)


async def _rows_of(instance: RemoteInstance) -> list[dict[str, Any]]:
    try:
        return await instance.audit_rows()
    except (aiohttp.ClientError, TimeoutError, OSError, InstanceLost):
        return []
