"""The fleet that a configuration becomes, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from harness.experiment import ConfigurationSpec, Experiment
from harness.ports import Instance, Link
from harness.prefixes import PrefixKeeper
from harness.router import Copier
from harness.scale import Scale
from harness.stalls import Timeout
from harness.view import View
from results.rows import AuditRow
from workloads.request import Request

#: Whether one monolithic engine generates the same tokens for the request.
Verify = Callable[[Request, list[int]], Awaitable[bool]]


class Fleet(Protocol):
    """Running instances and links of one configuration, ready for a router."""

    @property
    def scale(self) -> Scale: ...

    @property
    def instances(self) -> Mapping[str, Instance]: ...

    @property
    def links(self) -> Mapping[tuple[str, str], Link]: ...

    @property
    def view(self) -> View: ...

    @property
    def verify(self) -> Verify | None:
        """None where instances are modelled and make no tokens."""
        ...

    @property
    def prefixes(self) -> PrefixKeeper | None:
        """Who is told what was cached where; None: prefixes are not reused."""
        ...

    @property
    def copier(self) -> Copier | None:
        """Fetches a prefix from another cluster; None where that is not possible."""
        ...

    @property
    def patience_s(self) -> float:
        """How long a request may wait for lost instances to come back when no other can take it,
        loop seconds; 0 where nobody starts them again."""
        ...

    @property
    def timeout(self) -> Timeout:
        """Bounds a wait for what runs here, loop seconds: none of them are time in which this
        process itself stood still."""
        ...

    async def audit(self) -> list[AuditRow]:
        """Of the caches that crossed since the last call, or were refused, as far as the ends say;
        none where no real cache does."""
        ...

    def facts(self) -> dict[str, Any]:
        """What really ran, for the summary: link backend, model, versions, start-up time."""
        ...

    async def close(self) -> None:
        """Stop everything that the fleet started. Idempotent; also after a failed start."""
        ...


class OpenFleet(Protocol):
    async def __call__(self, experiment: Experiment, configuration: ConfigurationSpec) -> Fleet:
        """Raises NotReady when an instance or link does not come up; nothing is left then."""
        ...
