"""A study: an experiment, what is varied, and how each variation is evaluated.

Keys are dotted fields of the experiment file, or one of the sweep's own parameters (`OWN`), which
an experiment file does not have.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from harness.errors import BadInput
from harness.experiment import (
    COMMAND_LINE,
    Experiment,
    describe_validation,
    load_experiment,
    presets,
)
from workloads.section import Table

SweepMode = Literal["plan", "simulate"]

#: The sweep's own parameters -> what they mean.
OWN = {
    "price.remote_per_hour": "currency per remote instance-hour",
    "price.local_per_hour": "currency per local instance-hour",
    "price.egress_per_gb": "currency per GB that leaves the remote cluster",
    "tcp.window_mib": "send window of one TCP connection, MiB (inf: no bound)",
    "tcp.connections": "TCP connections of one transfer",
}

Value = float | int | bool | str


class AxisSpec(Table):
    """`key` takes each of `values`; or `keys` together take each row of `rows` (a zip)."""

    # A window may be unbounded.
    model_config = ConfigDict(allow_inf_nan=True)

    key: str | None = None
    values: tuple[Value, ...] = ()
    keys: tuple[str, ...] = ()
    rows: tuple[tuple[Value, ...], ...] = ()

    @model_validator(mode="after")
    def _is_one_of_both(self) -> AxisSpec:
        single = self.key is not None and bool(self.values)
        zipped = bool(self.keys) and bool(self.rows)
        if single == zipped or (single and (self.keys or self.rows)) or (zipped and self.values):
            raise ValueError("give key and values, or keys and rows")
        for row in self.rows:
            if len(row) != len(self.keys):
                raise ValueError(
                    f"rows: {list(row)} has {len(row)} values for {len(self.keys)} keys"
                )
        return self

    def settings(self) -> list[dict[str, Value]]:
        """What this axis sets, one value after the other."""
        if self.key is not None:
            return [{self.key: value} for value in self.values]
        return [dict(zip(self.keys, row, strict=True)) for row in self.rows]

    def names(self) -> tuple[str, ...]:
        return self.keys if self.key is None else (self.key,)


class Study(Table):
    """The file of a study; also what the command line builds."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    about: str = ""
    base: str = "paper"
    mode: SweepMode = "plan"
    configurations: tuple[str, ...] = Field(
        (), description="only these of the base's configurations; none: all"
    )
    best: bool = Field(
        False, description="add `best`: threshold and split searched anew for each point"
    )
    set: dict[str, Any] = Field(default_factory=dict)
    axis: tuple[AxisSpec, ...] = Field(min_length=1)
    show: tuple[str, ...] = Field((), description="columns of the terminal's table")
    phases: tuple[str, ...] = Field((), description="phases in that table; none: all")

    # Where in the study's file a key was given; others were on the command line.
    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("set", mode="before")
    @classmethod
    def _of_dotted_keys(cls, value: Any) -> Any:
        return dict(_dotted(value)) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _keys_are_unique(self) -> Study:
        names = self.axis_names()
        if len(set(names)) != len(names):
            raise ValueError(f"axis: each key can vary once only, found {list(names)}")
        if "mode" in names:
            raise ValueError("axis: mode cannot vary; a sweep has one, plan or simulate (--mode)")
        return self

    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for axis in self.axis for name in axis.names())

    @property
    def places(self) -> Mapping[str, str]:
        """Keys that a file gives -> the file and what in it, for messages."""
        return self._places

    def over(self, axes: tuple[AxisSpec, ...]) -> Study:
        """This study over other axes, which the command line gives. Raises BadInput where they do
        not go together."""
        made = with_axes(self.model_dump(), axes)
        made._places = {key: self._places[key] for key in self.set if key in self._places}
        for key in made.axis_names():
            made._places.pop(key, None)
        return made

    def setting(self, settings: Mapping[str, Any]) -> Study:
        """This study with what the command line sets. Axes go before it."""
        made = self.model_copy(update={"set": {**self.set, **settings}})
        varied = self.axis_names()
        made._places = {
            key: place
            for key, place in self._places.items()
            if key not in settings or key in varied
        }
        return made


def _dotted(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a table by dotted keys, for TOML reads `link.rtt_ms` without quotes as a table
    with one key, which is not to take the place of all of the base's. One with a `kind` is."""
    for key, value in table.items():
        if isinstance(value, dict) and "kind" not in value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True, slots=True)
class Point:
    """One variation: `settings` are the axes' values, `own` what is set of `OWN`."""

    index: int
    settings: tuple[tuple[str, Value], ...]
    experiment: Experiment
    own: tuple[tuple[str, float], ...]
    mode: SweepMode


def studies() -> dict[str, Path]:
    """Shipped studies by name."""
    folder = Path(str(resources.files("harness") / "studies"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_study(name_or_path: str) -> Study:
    """A shipped study by name, or a study's TOML file. Raises BadInput."""
    shipped = studies()
    path = shipped.get(name_or_path) or Path(name_or_path)
    if not path.is_file():
        raise BadInput(
            f"{name_or_path}: no such study or file (studies: {', '.join(shipped)}; presets, with "
            f"--axis: {', '.join(presets())})"
        )
    try:
        study = Study.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise BadInput(f"{path}: {describe_validation(error, Study)}") from None
    study._places = dict.fromkeys(study.set, f"{path}: [set]")
    study._places |= dict.fromkeys(study.axis_names(), f"{path}: [[axis]]")
    return study


def study_over(base: str, axes: tuple[AxisSpec, ...]) -> Study:
    """A study of an experiment (preset or file), named after it. Raises BadInput as `with_axes`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(base).stem)
    return with_axes({"name": name, "base": base}, axes)


def with_axes(study: dict[str, Any], axes: tuple[AxisSpec, ...]) -> Study:
    """The study of these fields over these axes. Raises BadInput where they do not go together."""
    try:
        return Study.model_validate({**study, "axis": axes})
    except ValidationError as error:
        raise BadInput(f"--axis: {describe_validation(error, Study)}") from None


def is_experiment(name_or_path: str) -> bool:
    """Whether the name is a preset, or a file that describes an experiment and not a study."""
    if name_or_path in presets():
        return True
    path = Path(name_or_path)
    if not path.is_file():
        return False
    try:
        return "axis" not in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return False


def points(study: Study) -> list[Point]:
    """All variations: the product of the axes, the last varying fastest. Raises BadInput."""
    made = []
    for index, parts in enumerate(itertools.product(*(axis.settings() for axis in study.axis))):
        settings = {key: value for part in parts for key, value in part.items()}
        made.append(_point(study, index, settings))
    return made


def _point(study: Study, index: int, settings: dict[str, Value]) -> Point:
    merged = {**study.set, **settings}
    own, overrides = {}, {}
    for key, value in merged.items():
        table = key.split(".")[0]
        place = study.places.get(key, COMMAND_LINE)
        if key in OWN:
            own[key] = _own_value(place, key, value)
        elif table in {name.split(".")[0] for name in OWN}:
            raise BadInput(f"{place}: {key}: unknown; there are {', '.join(OWN)}")
        else:
            overrides[key] = value
    experiment = load_experiment(study.base, overrides, study.places)
    if study.configurations:
        experiment = _only(study, experiment)
    return Point(index, tuple(settings.items()), experiment, tuple(sorted(own.items())), study.mode)


def _own_value(place: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInput(f"{place}: {key}: found {value!r}, needs a number ({OWN[key]})")
    if not value >= 0 or (math.isinf(value) and key != "tcp.window_mib"):
        raise BadInput(f"{place}: {key}: found {value!r}, needs a number >= 0 ({OWN[key]})")
    if key.startswith("tcp.") and value == 0:
        raise BadInput(f"{place}: {key}: found 0, needs a number above 0 ({OWN[key]})")
    if key == "tcp.connections" and value != int(value):
        raise BadInput(f"{place}: {key}: found {value!r}, needs a whole number ({OWN[key]})")
    return float(value)


def _only(study: Study, experiment: Experiment) -> Experiment:
    by_name = {row.name: row for row in experiment.configurations}
    unknown = [name for name in study.configurations if name not in by_name]
    if unknown:
        raise BadInput(
            f"{study.name}: configurations: no {unknown[0]!r} in {study.base} "
            f"(there are: {', '.join(by_name)})"
        )
    kept = tuple(by_name[name] for name in study.configurations)
    return experiment.model_copy(update={"configurations": kept})


def parse_axis(text: str) -> AxisSpec:
    """`KEY=V1,V2,...`, or a zip `KEY1,KEY2=V1:V2,V1:V2,...`; values are TOML, or bare strings."""
    left, separator, right = text.partition("=")
    keys = tuple(key.strip() for key in left.split(","))
    if not separator or not right or not all(keys):
        raise BadInput(f"--axis {text!r}: expected KEY=V1,V2,... or KEY1,KEY2=V1:V2,V1:V2,...")
    values: Sequence[str] = right.split(",")
    try:
        if len(keys) == 1:
            return AxisSpec(key=keys[0], values=tuple(map(_value, values)))
        rows = tuple(tuple(map(_value, value.split(":"))) for value in values)
        return AxisSpec(keys=keys, rows=rows)
    except ValidationError as error:
        raise BadInput(f"--axis {text!r}: {describe_validation(error, AxisSpec)}") from None


def _value(text: str) -> Value:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, (bool, int, float, str)) else text
