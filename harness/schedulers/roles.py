"""Changes the role of an instance: out of one pool, drained, converted, into the other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from harness.ports import Instance, Role, ServingError
from harness.view import View


class Roles:
    """`conversion_s` (loop seconds) is what a change of role costs after the drain."""

    def __init__(
        self, view: View, instances: Mapping[str, Instance], cluster: str, conversion_s: float
    ) -> None:
        self._view = view
        self._instances = instances
        self._cluster = cluster
        self._conversion_s = conversion_s

    def counts(self) -> tuple[int, int]:
        """Usable instances that (prefill, decode)."""
        prefill = self._view.prefill.get(self._cluster)
        decode = self._view.decode.get(self._cluster)
        return (
            0 if prefill is None else prefill.n_usable(),
            0 if decode is None else decode.n_usable(),
        )

    def least_busy(self, role: Role) -> str | None:
        """The instance of `role` that drains soonest; None when it is the last one."""
        prefill, decode = self._view.prefill[self._cluster], self._view.decode[self._cluster]
        pool = prefill if role is Role.PREFILL else decode
        return pool.names[pool.least()] if pool.n_usable() > 1 else None

    async def convert(self, name: str, role: Role) -> bool:
        """Whether `name` now serves `role`. When it is lost on the way it stays out of both pools
        until whoever watches it says that it is back."""
        prefill, decode = self._view.prefill[self._cluster], self._view.decode[self._cluster]
        source, sink = (decode, prefill) if role is Role.PREFILL else (prefill, decode)
        source.set_usable(source.key_of[name], False)
        source.away.add(source.key_of[name])
        try:
            await self._instances[name].convert(role)
            await asyncio.sleep(self._conversion_s)
        except ServingError:
            source.away.discard(source.key_of[name])
            return False
        key = sink.key_of.get(name)
        if key is None:
            sink.add(name)
        else:
            sink.away.discard(key)
            sink.set_usable(key, True)
        return True
