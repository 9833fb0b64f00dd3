"""Policies by the name that an experiment gives them, with their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.errors import BadInput
from harness.policies.base import Policy
from harness.policies.operators import LeastLoaded, UncachedThreshold
from harness.policies.parameters import (
    Value,
    build,
    check,
    parameters_of,
    refuse_others,
)
from harness.policies.prfaas import Controls, Prfaas
from harness.policies.priced import Eft, Priced, Prices
from harness.policies.static import Balanced, Homogeneous, Naive, PrfaasStatic
from harness.scale import UNSCALED, Scale
from harness.schedulers.long_term import LongTermRules
from harness.schedulers.short_term import ShortTermRules

#: Checked when a policy is made: names against the policy's kinds, values against their bounds.
Parameters = Mapping[str, Value]
_Maker = Callable[[Controls, Parameters, Scale], Policy]


def _plain(kind: type[Any]) -> tuple[tuple[type, ...], _Maker]:
    return (kind,), lambda controls, given, scale: build(kind, given, scale)


def _static(controls: Controls, given: Parameters, scale: Scale) -> Policy:
    return PrfaasStatic(controls.threshold_tokens)


def _priced(controls: Controls, given: Parameters, scale: Scale) -> Policy:
    return build(Priced, given, scale, prices=build(Prices, given, scale))


def _prfaas(controls: Controls, given: Parameters, scale: Scale) -> Policy:
    prices = build(Prices, given, scale)
    return build(Prfaas, given, scale, controls=controls, prices=prices)


#: Policy -> the dataclasses that its parameters are fields of, and how it is made.
_CATALOG: dict[str, tuple[tuple[type, ...], _Maker]] = {
    "homogeneous": _plain(Homogeneous),
    "naive": _plain(Naive),
    "balanced": _plain(Balanced),
    "prfaas-static": ((), _static),
    "prfaas": ((Prfaas, Prices, ShortTermRules, LongTermRules), _prfaas),
    "least-loaded": _plain(LeastLoaded),
    "uncached-threshold": _plain(UncachedThreshold),
    "eft": _plain(Eft),
    "priced": ((Priced, Prices), _priced),
}

#: Policies whose threshold and roles the schedulers move.
SCHEDULED = frozenset({"prfaas"})
#: Policies that weigh predicted times: a threshold is only what the model plans their split with.
WEIGHING = frozenset({"priced", "eft"})
#: Policies that a `threshold_tokens` says nothing to.
UNTHRESHOLDED = frozenset(
    {"homogeneous", "naive", "balanced", "least-loaded", "uncached-threshold"}
)


def policy_names() -> list[str]:
    return sorted(_CATALOG)


def parameter_names(policy: str) -> set[str]:
    """What parameters the policy of this name has."""
    kinds, _ = _CATALOG[policy]
    return {each.name for kind in kinds for each in parameters_of(kind)}


def make_policy(
    name: str,
    threshold_tokens: float,
    parameters: Parameters,
    scale: Scale = UNSCALED,
    controls: Controls | None = None,
) -> Policy:
    """Raises BadInput for an unknown policy, or a parameter that it does not have or take.

    `controls` is what schedulers will move; without it the threshold stays as given. Parameters in
    seconds are converted to the loop's.
    """
    entry = _CATALOG.get(name)
    if entry is None:
        raise BadInput(f"policy {name!r} is unknown (there are: {', '.join(policy_names())})")
    kinds, maker = entry
    refuse_others(parameters, kinds, f"policy {name}")
    try:
        check(parameters, kinds)
        return maker(controls or Controls(threshold_tokens), parameters, scale)
    except BadInput as error:
        raise BadInput(f"policy {name}: {error}") from None
