"""The experiment: one TOML file that every mode runs, validated before anything starts.

All values are in the units of the modelled system. Unknown keys and impossible values are refused
with the file, the field, what was found and what would do.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from harness.errors import BadInput
from harness.links.spec import LinkSpec
from workloads.section import Section
from workloads.spec import ArrivalSpec, WorkloadSpec, check

Mode = Literal["simulate", "emulate"]

#: Of one kind, in one configuration: more would not fit in a simulation's memory.
MOST_INSTANCES = 100_000


class SloSpec(Section):
    """What counts as good service; goodput is the share of all offered requests that met it."""

    ttft_s: float = Field(10.0, gt=0, description="TTFT from the scheduled arrival, seconds")
    tokens_per_s: float = Field(40.0, gt=0, description="1 / TPOT of a request")
    tolerance: float = Field(
        0.01, ge=0, lt=1, description="relative slack: the paper's decode step is exactly its SLO"
    )


class ProfileSpec(Section):
    """Device profiles by name or file, one per cluster."""

    prfaas: str = "1t-h200"
    pd: str = "1t-h20"


class QueueSpec(Section):
    """In which order a prefill instance takes its prompts."""

    discipline: Literal["fifo", "shortest-first", "least-slack"] = "fifo"
    ageing: float = Field(
        0.1, gt=0, description="shortest-first: seconds of work a second of waiting is worth"
    )
    chunk_tokens: int = Field(
        8192, ge=1, description="a better-ranked prompt takes over where a chunk of so many ends"
    )


class ConfigurationSpec(Section):
    """One column of the comparison: a policy on given instance counts."""

    name: str = Field(min_length=1)
    policy: str = Field(min_length=1)
    n_prfaas: int = Field(0, ge=0, le=MOST_INSTANCES, description="remote prefill instances")
    n_prefill: int = Field(0, ge=0, le=MOST_INSTANCES, description="local prefill instances (PD-P)")
    n_decode: int = Field(ge=1, le=MOST_INSTANCES, description="local decode instances (PD-D)")
    threshold_tokens: float | None = Field(
        None, ge=0, description="routing threshold; without one the planner's optimum is used"
    )
    parameters: dict[str, float | int | bool | str] = Field(
        default_factory=dict, description="further parameters of the policy, by name"
    )
    queue: QueueSpec = QueueSpec()

    @model_validator(mode="after")
    def _has_prefill(self) -> ConfigurationSpec:
        if self.n_prfaas + self.n_prefill == 0:
            raise ValueError("n_prfaas + n_prefill is 0: at least one instance must prefill")
        return self


class MeasureSpec(Section):
    """When and how long is measured. Seconds are the modelled system's."""

    overload: float = Field(1.2, gt=1, description="capacity phase: offered / planned capacity")
    capacity_rate: float | None = Field(
        None, gt=0, description="capacity phase: offered rate of all configurations, req/s, instead"
    )
    capacity_warmup_s: float = Field(90, gt=0)
    capacity_window_s: float = Field(240, gt=0)
    rate_fraction: float = Field(
        0.8, gt=0, lt=1, description="common rate of all configurations / homogeneous capacity"
    )
    request_rate: float | None = Field(None, gt=0, description="common rate, req/s, instead")
    latency_warmup_s: float = Field(60, ge=0)
    latency_window_s: float = Field(300, gt=0)
    max_window_requests: int | None = Field(
        None, gt=0, description="windows end once about so many requests were offered in them"
    )
    load_fractions: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="further phases at these shares of each configuration's own capacity"
    )
    unloaded: bool = Field(False, description="also measure TTFT of requests that meet no queue")
    slo_search: bool = Field(
        False, description="also search the highest rate at which the SLO holds"
    )
    drain_s: float = Field(600, gt=0, description="bound on the drain of a phase")
    sample_s: float = Field(1.0, ge=1e-3, description="interval of link and instance samples")
    flow_rates: bool = Field(
        False, description="simulate: also write the rate of each flow over time, flows.parquet"
    )


class CacheSpec(Section):
    """Prefix pools, one a cluster in `simulate`, one a worker in `emulate`. They matter to requests
    whose workload has prefix blocks."""

    enabled: bool = Field(True, description="false: every prompt is computed whole")
    blocks: int | None = Field(
        None, ge=1, description="attention blocks that a cluster's pool keeps; none: no bound"
    )
    states: int | None = Field(
        None, ge=1, description="recurrent states that a cluster's pool keeps; none: no bound"
    )
    interval_blocks: int = Field(
        32, ge=0, description="a state is kept at each multiple of so many blocks; 0: at none"
    )
    prompt_end: bool = Field(True, description="and at the last block boundary of a prompt")
    junction: bool = Field(True, description="and where an earlier prompt's blocks stop matching")
    directory_entries: int = Field(
        1_000_000, ge=2, description="keys that the prefix directory remembers"
    )


class EmulateSpec(Section):
    """How `emulate` scales and checks (see harness.scale)."""

    model: str = Field("bench", description="engine shape or checkpoint directory")
    device: Literal["cpu", "cuda"] = Field("cpu", description="what the workers compute on")
    token_scale: int = Field(64, ge=1, le=65_536)
    time_scale: float = Field(8.0, ge=0.01, le=1000)
    max_request_rate: float = Field(
        32.0, gt=0, description="req/s in real time; time_scale is lowered to keep it"
    )
    page_tokens: int = Field(8, ge=1, le=65_536)
    verify_share: float = Field(0.05, ge=0, le=1, description="share of requests decoded again")
    verify_least: int = Field(20, ge=0, description="and at least so many a configuration")
    overrun_limit: float = Field(0.01, ge=0, description="share of overruns that voids a run")


class Experiment(Section):
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(1, ge=0)
    mode: Mode = "simulate"
    workload: WorkloadSpec
    arrivals: ArrivalSpec = ArrivalSpec()
    link: LinkSpec = LinkSpec()
    slo: SloSpec = SloSpec()
    profiles: ProfileSpec = ProfileSpec()
    measure: MeasureSpec = MeasureSpec()
    cache: CacheSpec = CacheSpec()
    emulate: EmulateSpec = EmulateSpec()
    configurations: tuple[ConfigurationSpec, ...] = Field(min_length=1)

    @field_validator("mode", mode="before")
    @classmethod
    def _is_run_here(cls, value: Any) -> Any:
        if value == "live":
            raise ValueError(
                "must be 'simulate' or 'emulate'; a deployment there is, is driven by `prfaas load`"
            )
        return value

    @model_validator(mode="after")
    def _names_are_unique(self) -> Experiment:
        names = [configuration.name for configuration in self.configurations]
        if len(set(names)) != len(names):
            raise ValueError(f"configurations: names must be unique, found {names}")
        return self

    @model_validator(mode="after")
    def _arrivals_have_a_rate(self) -> Experiment:
        if self.arrivals.process == "trace":
            raise ValueError(
                "arrivals.process: 'trace' keeps the trace's own times, but a phase offers a rate; "
                "use 'poisson', 'constant' or 'gamma' (rows keep their order), or `prfaas load`"
            )
        check(self.workload, self.arrivals, request_rate=1.0, duration_s=1.0)
        return self

    @model_validator(mode="after")
    def _flows_are_modelled(self) -> Experiment:
        if self.measure.flow_rates and self.mode != "simulate":
            raise ValueError(
                f"measure.flow_rates: only simulate knows each flow's rate, mode is {self.mode}"
            )
        return self


def presets() -> dict[str, Path]:
    """Shipped experiments by name."""
    folder = Path(str(resources.files("harness") / "presets"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


#: Where overrides were given, unless something else is said of them.
COMMAND_LINE = "on the command line"


def load_experiment(
    name_or_path: str,
    overrides: dict[str, Any] | None = None,
    places: Mapping[str, str] | None = None,
) -> Experiment:
    """A preset by name or a TOML file by path; `overrides` are dotted keys over it. `places` says
    of some of them where they were given, other than on the command line.

    Raises BadInput with one line that names the file (or the place) and the field.
    """
    shipped = presets()
    path = shipped.get(name_or_path) or Path(name_or_path)
    if not path.is_file():
        if path.exists():
            raise BadInput(f"{name_or_path}: not a file; a TOML file or a preset would do")
        known = ", ".join(shipped)
        raise BadInput(f"{name_or_path}: no such preset or file (presets: {known})")
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    given = {key: (places or {}).get(key, COMMAND_LINE) for key in overrides or {}}
    for key, value in (overrides or {}).items():
        try:
            set_dotted(data, key, value)
        except BadInput as error:
            raise BadInput(f"{given[key]}: {error}") from None
    try:
        return Experiment.model_validate(data)
    except ValidationError as error:
        field, fault = first_fault(error, data)
        alone = bool(given) and _is_in(error, tomllib.loads(text))
        where = str(path) if alone else _blamed(path, field, given)
        raise BadInput(f"{where}: {field}: {fault}") from None


def _is_in(error: ValidationError, data: dict[str, Any]) -> bool:
    """Whether `data` has the first of these faults too."""
    try:
        Experiment.model_validate(data)
    except ValidationError as other:
        return _identity(_first(error)) in map(_identity, other.errors())
    return False


def _identity(fault: Any) -> tuple[Any, ...]:
    found = fault.get("input")
    # A table around the fault differs in what has nothing to do with it.
    return fault["loc"], fault["msg"], "" if isinstance(found, (dict, list)) else repr(found)


def _blamed(path: Path, field: str, given: Mapping[str, str]) -> str:
    """Where a fault came from that the file alone has not: the last override of that field, of what
    is in it or of what it is in, or else the overrides together."""
    for key, place in reversed(list(given.items())):
        if field == _WHOLE or f"{field}.".startswith(f"{key}.") or key.startswith(f"{field}."):
            return place
    return " with what is set ".join([str(path), *dict.fromkeys(given.values())])


def set_dotted(data: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` in nested tables; `configurations.NAME.key` addresses a configuration by name."""
    parts = key.split(".")
    table: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(table, list):
            rows = [row for row in table if row.get("name") == part]
            if not rows:
                names = ", ".join(str(row.get("name")) for row in table)
                raise BadInput(f"{key}: no configuration {part!r} (there are: {names})")
            table = rows[0]
        else:
            table = table.setdefault(part, {})
        if not isinstance(table, (dict, list)):
            raise BadInput(f"{key}: {'.'.join(parts[: depth + 1])} is a value, not a table")
    if isinstance(table, list):
        raise BadInput(f"{key}: name a key of a configuration, e.g. {key}.threshold_tokens")
    table[parts[-1]] = value


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` with a TOML value, or a bare string."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise BadInput(f"--set {text!r}: expected KEY=VALUE, e.g. --set link.rate_gbps=10")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def describe_validation(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault of a validation of `model` in one line."""
    return ": ".join(first_fault(error, None, model))


def first_fault(
    error: ValidationError, data: Any, model: type[BaseModel] = Experiment
) -> tuple[str, str]:
    """(field, fault) of the first fault, in one line: what was found and what would do."""
    first = _first(error)
    field = _field(first, data)
    found = first.get("input")
    shown = "" if isinstance(found, (dict, list, bool)) or found is None else f" (found {found!r})"
    if first["type"] == "extra_forbidden":
        near = _meant(field, found, model)
        if near == field:
            return field, "no key of this kind"
        return field, "unknown key" + (f"; did you mean {near}?" if near else "")
    if first["type"] == "union_tag_invalid":
        known = first["ctx"]["expected_tags"].replace("'", "")
        return f"{field}.kind", f"{first['ctx']['tag']!r} is unknown (there are: {known})"
    if first["type"] == "union_tag_not_found":
        return f"{field}.kind", "Field required"
    if first["type"] in ("model_type", "model_attributes_type"):
        return field, f"must be a table{shown}"
    message = first["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    if first["type"] == "int_parsing_size":  # pydantic speaks of a string, whatever it was
        message = "must be a whole number of a sane size"
    more = len({_field(each, data) for each in error.errors()}) - 1
    return field, f"{message}{shown}" + (f"; and {more} more" if more else "")


def _first(error: ValidationError) -> Any:
    """The first fault that helps: of a table that may also be a number, what is wrong in it."""
    faults = error.errors()
    inside = (
        each
        for each in faults
        if each["type"] not in ("int_type", "float_type") or not isinstance(each["input"], dict)
    )
    return next(inside, faults[0])


#: Stands for the field of a fault of the whole file.
_WHOLE = "experiment"


def _field(fault: Any, data: Any) -> str:
    """The dotted name of a fault's field as a user wrote it in `data`, where that is at hand:
    configurations by name, no kinds of a table or number.
    """
    location: tuple[int | str, ...] = fault["loc"]
    if data is None:
        return ".".join(map(str, location)) or "value"
    parts = []
    for part in location:
        if isinstance(data, dict) and part in data:
            parts.append(str(part))
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
            parts.append(str(data.get("name", part)) if isinstance(data, dict) else str(part))
    if fault["type"] == "missing":
        parts.append(str(location[-1]))
    return ".".join(parts) or _WHOLE


def _meant(field: str, found: Any, model: type[BaseModel]) -> str | None:
    """The key most like the unknown `field`, which holds `found`: beside it, or wherever it is."""
    *place, name = field.split(".")
    configuration = place[1] if place[:1] == ["configurations"] and place[1:] else _ANY
    every = {key.replace(_ANY, configuration): first for key, first in _keys(model)}
    beside = [key for key in every if key.split(".")[:-1] == place]
    for keys in (beside, sorted(every, key=len)):
        names = {key.rpartition(".")[2]: key for key in reversed(keys)}
        near = difflib.get_close_matches(name, names)
        if near:
            meant, first = names[near[0]], every[names[near[0]]]
            return f"{meant}.{first}" if first and not isinstance(found, (dict, list)) else meant
    return None


#: Stands for the name of a configuration.
_ANY = "NAME"


def _keys(annotation: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a model and of those in it, and for tables the first key in each."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        for each in get_args(annotation):
            yield from _keys(each, prefix)
        return
    for name, field in annotation.model_fields.items():
        below = f"{prefix}{name}." + (f"{_ANY}." if name == "configurations" else "")
        inside = list(_keys(field.annotation, below))
        yield f"{prefix}{name}", inside[0][0].removeprefix(f"{prefix}{name}.") if inside else ""
        yield from inside
