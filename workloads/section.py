"""What tables of TOML files are held to: known keys, numbers that are numbers, of a sane size."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

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


_NO_NUMBER = PydanticCustomError("no_number", "must be a number, not true or false")


class Table(BaseModel):
    """Immutable, without unknown keys; numbers are finite, and `true` is none. Tables in it check
    their own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Of the whole table, not "*" of its fields: one that tells kinds apart may have no validator.
    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, data: Any) -> Any:
        faults: list[InitErrorDetails] = [
            {"type": _NO_NUMBER, "loc": (name,), "input": data[name]}
            for name, field in cls.model_fields.items()
            if isinstance(data, dict)
            and _holds_boolean(data.get(name))
            and bool not in (kinds := set(_leaves(field.annotation)))
            and kinds & {int, float}
        ]
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return data


class Section(Table):
    """A table whose numbers are bounded by the unit that their names end in, whatever else their
    fields say."""

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


def _leaves(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation is made of, without the containers around them."""
    inner = get_args(annotation)
    return sum(map(_leaves, inner), ()) if inner else (annotation,)


def _holds_boolean(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_boolean, value))
    if isinstance(value, dict):
        return any(map(_holds_boolean, value.values()))
    return isinstance(value, bool)
