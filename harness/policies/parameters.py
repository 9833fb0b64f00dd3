"""Parameters of a policy or scheduler: named, documented, bounded, and in modelled units.

A parameter is a field of a frozen dataclass made with `parameter`. Its name ends in its unit where
it has one: `_s` seconds, `_per_s` something a second, `_bytes`. An experiment gives all of them in
units of the modelled system; `build` converts seconds to those of the running loop, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from harness.errors import BadInput
from harness.scale import UNSCALED, Scale
from workloads.section import size_fault

T = TypeVar("T")
Value = float | int | bool | str


def parameter(
    default: Any, about: str, *, least: float | None = None, most: float | None = None
) -> Any:
    """A dataclass field that an experiment can set, within [least, most]."""
    return field(default=default, metadata={"about": about, "least": least, "most": most})


def parameters_of(kind: type) -> list[Field[Any]]:
    """The fields of `kind` that an experiment can set."""
    return [each for each in fields(kind) if "about" in each.metadata]


def build(
    kind: type[T],
    given: Mapping[str, Value],
    scale: Scale = UNSCALED,
    **fixed: Any,
) -> T:
    """An instance of the dataclass `kind` from `given`; names it does not have are not looked at
    (see `refuse_others`).

    Raises BadInput for a value of the wrong type or out of bounds.
    """
    values = dict(fixed)
    for each in parameters_of(kind):
        value = _checked(each, given[each.name]) if each.name in given else each.default
        assert value is not MISSING
        values[each.name] = _in_loop_units(each.name, value, scale)
    return kind(**values)


def refuse_others(given: Iterable[str], kinds: Iterable[type], whose: str) -> None:
    """Raises BadInput for a name in `given` that is a parameter of none of `kinds`."""
    known = sorted({each.name for kind in kinds for each in parameters_of(kind)})
    for name in given:
        if name not in known:
            has = f"it has: {', '.join(known)}" if known else "it has none"
            raise BadInput(f"{whose}: parameter {name!r} is unknown ({has})")


def check(given: Mapping[str, Value], kinds: Iterable[type]) -> None:
    """Raises BadInput for a value that a parameter of `kinds` does not take."""
    for kind in kinds:
        for each in parameters_of(kind):
            if each.name in given:
                _checked(each, given[each.name])


def _checked(spec: Field[Any], value: Value) -> Value:
    default, name = spec.default, spec.name
    if isinstance(default, bool) or isinstance(value, bool):
        good = isinstance(default, bool) and isinstance(value, bool)
        wanted = "true or false" if isinstance(default, bool) else "a number"
    elif isinstance(default, str):
        good, wanted = isinstance(value, str), "a text"
    elif isinstance(default, int):
        good, wanted = isinstance(value, int), "a whole number"
    else:
        good, wanted = isinstance(value, (int, float)) and value == value, "a number"
    if not good:
        raise BadInput(f"parameter {name}: found {value!r}, needs {wanted}")
    least, most = spec.metadata["least"], spec.metadata["most"]
    if not isinstance(value, (str, bool)):
        fault = size_fault(name, value)
        if fault is not None:
            raise BadInput(f"parameter {name}: found {value!r}, {fault}")
        if least is not None and value < least:
            raise BadInput(f"parameter {name}: found {value}, needs at least {least:g}")
        if most is not None and value > most:
            raise BadInput(f"parameter {name}: found {value}, needs at most {most:g}")
    return value


def _in_loop_units(name: str, value: Any, scale: Scale) -> Any:
    if isinstance(value, str):
        return value
    if name.endswith("_per_s"):
        return scale.loop_rate(value)
    return scale.loop_s(value) if name.endswith("_s") else value
