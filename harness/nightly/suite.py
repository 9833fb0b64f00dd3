"""The nightly suite as data: named parts, their commands, and which of their figures count."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import BadInput
from results.figures import Better

_STRICT = ConfigDict(extra="forbid", frozen=True)


class FigureSpec(BaseModel):
    """One figure: `path` leads into the command's JSON by keys and list indices, dotted. A list at
    its end stands for its median.
    """

    model_config = _STRICT
    path: str
    unit: str = ""
    better: Better = Better.LOWER


class PartSpec(BaseModel):
    """One part. `{python}` in `command` is the interpreter, `{scratch}` an empty directory; other
    braces stay as they are.

    reads: `json` takes `figures` from the JSON on standard output; `summary` takes the figures of a
    `prfaas run --json`, those whose metric is in `only` when that is given; `none` only times the
    command. exact: figures do not vary from run to run (virtual time), so they are compared
    exactly. timed: the command's CPU seconds are a figure, too. gate = false: only the history is
    watched.
    """

    model_config = _STRICT
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    command: list[str] = Field(min_length=1)
    reads: Literal["json", "summary", "none"] = "json"
    figures: dict[str, FigureSpec] = Field(default_factory=dict)
    only: list[str] = Field(default_factory=list)
    pairs: int = Field(8, ge=1)
    confirm_pairs: int = Field(16, ge=0)
    exact: bool = False
    timed: bool = False
    gate: bool = True
    timeout_s: float = Field(1800, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> PartSpec:
        if (self.reads == "json") != bool(self.figures):
            raise ValueError("figures are given exactly when reads = 'json'")
        if self.reads == "none" and not self.timed:
            raise ValueError("a part that reads nothing must be timed")
        return self


class GateSpec(BaseModel):
    """See `results.gate.GateRules`."""

    model_config = _STRICT
    least: float = Field(0.025, gt=0)
    family_p: float = Field(0.01, gt=0, lt=1)
    screen_p: float = Field(0.1, gt=0, lt=1)


class DriftSpec(BaseModel):
    """See `results.drift.DriftRules`."""

    model_config = _STRICT
    before: int = Field(12, ge=4)
    after: int = Field(3, ge=2)
    least: float = Field(0.025, gt=0)
    z: float = Field(5.0, gt=0)


class Suite(BaseModel):
    """The whole file. `baseline` is the git revision that nights are compared with."""

    model_config = _STRICT
    baseline: str = "HEAD~1"
    gate: GateSpec = GateSpec()
    drift: DriftSpec = DriftSpec()
    part: list[PartSpec] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self) -> Suite:
        names = [each.name for each in self.part]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two parts named {', '.join(sorted(twice))}")
        return self


def load_suite(path: Path | None = None) -> Suite:
    """The shipped suite, or a file of the same form. Raises BadInput with file and field."""
    where = str(path) if path else "the shipped suite"
    try:
        text = (
            path.read_text()
            if path
            else files("harness.nightly").joinpath("suite.toml").read_text()
        )
        return Suite.model_validate(tomllib.loads(text))
    except OSError as error:
        raise BadInput(f"{where}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"]) or "suite"
        raise BadInput(f"{where}: {place}: {first['msg']}") from error


def pick(data: Any, path: str) -> float:
    """The number at `path` in parsed JSON. Raises KeyError that names the step that failed."""
    here = data
    for step in path.split("."):
        try:
            here = here[int(step)] if isinstance(here, list) else here[step]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise KeyError(f"no {step!r} on the way to {path!r}") from error
    if isinstance(here, list) and here and all(isinstance(each, int | float) for each in here):
        ordered = sorted(here)
        middle = len(ordered) // 2
        return float(
            ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2
        )
    if isinstance(here, bool) or not isinstance(here, int | float):
        raise KeyError(f"{path!r} is no number")
    return float(here)
