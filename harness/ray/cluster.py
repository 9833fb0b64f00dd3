"""Joining a Ray cluster, with one clear line where that is not possible."""

from __future__ import annotations

import logging
import os
from typing import Any

from harness.errors import BadInput, NotReady
from harness.topology import PD, PRFAAS

#: What `ray.init` offers where no cluster is given: this machine is both clusters.
LOCAL_RESOURCES = {PRFAAS: 64.0, PD: 64.0}


#: Ray starts its workers at niceness 15, and on a busy host they feel it. `ray start` reads this.
NICENESS = "RAY_worker_niceness"


def join(address: str | None) -> Any:
    """The module `ray`, connected: to the cluster at `address`, or to one of this machine alone.

    Raises BadInput without ray, NotReady where nothing answers.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise BadInput(
            "this needs Ray, which is not installed: pip install 'prfaas-bench[ray]'"
        ) from error
    if ray.is_initialized():
        return ray
    quiet: dict[str, Any] = {
        "logging_level": logging.WARNING,
        "log_to_driver": False,
        "include_dashboard": None if address else False,
    }
    try:
        if address is None:
            os.environ.setdefault(NICENESS, "0")
            ray.init(resources=LOCAL_RESOURCES, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise NotReady(
            f"--address {address or 'local'}: no Ray cluster answers: {first}"
        ) from error
    return ray


def check_offers(ray: Any, wanted: dict[str, int]) -> None:
    """Raises NotReady unless the cluster's nodes offer so much of each custom resource."""
    offered = ray.cluster_resources()
    for name, count in wanted.items():
        if count and offered.get(name, 0.0) < count:
            raise NotReady(
                f"the Ray cluster offers {offered.get(name, 0.0):g} of resource {name!r}, {count} "
                f"workers want one each: start nodes with --resources='{{\"{name}\": {count}}}'"
            )
