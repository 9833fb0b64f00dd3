"""The fleet that a configuration becomes, whatever stands behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from harness.experiment import ConfigurationSpec, Experiment
from harness.ports import Instance, Link
from harness.scale import Scale
from harness.view import View


class Fleet(Protocol):
    """Running instances and links of one configuration, ready for a router."""

    scale: Scale
    instances: Mapping[str, Instance]
    links: Mapping[tuple[str, str], Link]
    view: View

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
