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
        """Whether `name` now serves `role`. When it is lost on the way it takes no work until
        whoever watches it says that it is back, in the role that it had reached."""
        view, instance = self._view, self._instances[name]
        view.leave(self._cluster, name)
        try:
            await instance.convert(role)
        except ServingError:
            view.enter(self._cluster, name, _other(role))
            return False
        await asyncio.sleep(self._conversion_s)
        view.enter(self._cluster, name, role)
        return name not in view.lost


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
