"""Policies by the name that an experiment gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.errors import BadInput
from harness.policies.base import Policy
from harness.policies.static import Balanced, Homogeneous, Naive, PrfaasStatic

#: Checked by the policy's own signature.
Parameters = Mapping[str, Any]


def _plain(policy: type[Homogeneous] | type[Naive] | type[Balanced]) -> Callable[..., Policy]:
    def make(threshold_tokens: float, parameters: Parameters) -> Policy:
        return policy(**parameters)

    return make


def _threshold(threshold_tokens: float, parameters: Parameters) -> Policy:
    return PrfaasStatic(threshold_tokens, **parameters)


_MAKERS: dict[str, Callable[[float, Parameters], Policy]] = {
    "homogeneous": _plain(Homogeneous),
    "naive": _plain(Naive),
    "balanced": _plain(Balanced),
    "prfaas-static": _threshold,
}


def policy_names() -> list[str]:
    return sorted(_MAKERS)


def make_policy(name: str, threshold_tokens: float, parameters: Parameters) -> Policy:
    """Raises BadInput for an unknown policy or a parameter that it does not have."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise BadInput(f"policy {name!r} is unknown (there are: {', '.join(policy_names())})")
    try:
        return maker(threshold_tokens, parameters)
    except TypeError as error:
        raise BadInput(f"policy {name}: {error}") from None
