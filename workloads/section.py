"""What every table of an experiment file is held to: known keys, and numbers of a sane size."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

#: The last part of a name is its unit, and the unit bounds its values: (name's end, most). The
#: first that fits holds. Token counts are 32 bits wide in the results and in traces.
_MOST: tuple[tuple[str, float], ...] = (
    ("seed", 2**63 - 1),
    ("tokens", 2**31 - 1),
    ("bytes", 2**53),
    ("_per_s", 1e9),
    ("_s", 1e8),
    ("_ms", 1e8),
    ("", 1e9),
)
#: Nothing but 0 is nearer to 0: quotients of such numbers would overflow.
LEAST_SIZE = 1e-15


def size_fault(name: str, value: float) -> str | None:
    """What is wrong with the size of a number called `name`, as "must be ..."; None if nothing."""
    most = next(bound for end, bound in _MOST if name.endswith(end))
    if not abs(value) <= most:
        return f"must be at most {most:,.0f} in size"
    if 0 < abs(value) < LEAST_SIZE:
        return f"must be 0 or at least {LEAST_SIZE:g} in size"
    return None


class Section(BaseModel):
    """Immutable, without unknown keys; every number is finite and bounded by the unit that its
    name ends in, whatever else its field says. Tables in it check their own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _sizes(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        named = value.items() if isinstance(value, dict) else [(name, each) for each in _all(value)]
        for inner, each in named:
            if isinstance(each, (int, float)) and not isinstance(each, bool):
                fault = size_fault(inner, each)
                if fault is not None:
                    raise ValueError(fault if inner == name else f"{inner} {fault}")
        return value


def _all(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
