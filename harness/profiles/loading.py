"""Reads a profile from its TOML file; docs/profiles.md describes the format."""

from __future__ import annotations

import tomllib
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from harness.profiles.curves import Curve, Linear, LogLog, Quadratic
from harness.profiles.layers import Layer, cache_bytes
from harness.profiles.profile import DecodeStep, Origin, Profile, ProfileError, Provenance
from workloads.section import Table

Point = tuple[float, float]


class PrefillSection(Table):
    """Points (tokens, seconds), joined by `interpolation`. `coefficients` replace the fit of a
    quadratic: seconds, per token, per token squared."""

    interpolation: Literal["quadratic", "linear", "log-log"]
    points: tuple[Point, ...] = ()
    coefficients: tuple[float, float, float] | None = None

    @model_validator(mode="after")
    def _is_defined(self) -> PrefillSection:
        if self.coefficients is not None:
            if self.interpolation != "quadratic":
                raise ValueError("coefficients: only a quadratic has them; give points instead")
            if self.coefficients[0] < 0 or min(self.coefficients[1:]) < 0:
                raise ValueError("coefficients: must be >= 0, or longer prompts would be faster")
        else:
            needed = 3 if self.interpolation == "quadratic" else 2
            if len(self.points) < needed:
                raise ValueError(
                    f"points: found {len(self.points)}, {self.interpolation} needs {needed} or more"
                )
        for (low, before), (high, after) in pairwise(self.points):
            if high <= low or after < before:
                raise ValueError(
                    f"points: ({high:g}, {after:g}) follows ({low:g}, {before:g}); "
                    "tokens must rise and seconds must not fall"
                )
        if any(tokens < 1 or seconds <= 0 for tokens, seconds in self.points):
            raise ValueError("points: tokens must be at least 1 and seconds above 0")
        return self

    def curve(self) -> Curve:
        if self.interpolation == "linear":
            return Linear.through(self.points)
        if self.interpolation == "log-log":
            return LogLog.through(self.points)
        if self.coefficients is not None:
            return Quadratic(*self.coefficients)
        fitted = Quadratic.fit(self.points)
        if min(fitted.constant_s, fitted.linear_s, fitted.square_s) < 0:
            raise ValueError(
                "points: their least-squares quadratic has a negative coefficient; use "
                'interpolation = "linear" or "log-log"'
            )
        return fitted


class CacheSection(Table):
    """Layers, or the two sizes themselves."""

    layers: tuple[Layer, ...] = ()
    fixed_bytes: float | None = Field(None, ge=0)
    per_token_bytes: float | None = Field(None, ge=0)
    n_layers: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _is_one_of_both(self) -> CacheSection:
        sizes = (self.fixed_bytes, self.per_token_bytes, self.n_layers)
        if self.layers and any(size is not None for size in sizes):
            raise ValueError("give layers, or fixed_bytes, per_token_bytes and n_layers; not both")
        if not self.layers and any(size is None for size in sizes):
            raise ValueError("give layers, or all of fixed_bytes, per_token_bytes and n_layers")
        return self

    def sizes(self) -> tuple[float, float, int]:
        """(fixed bytes, bytes per token, layers)."""
        if self.layers:
            return (*cache_bytes(self.layers), sum(layer.count for layer in self.layers))
        assert self.fixed_bytes is not None
        assert self.per_token_bytes is not None
        assert self.n_layers is not None
        return self.fixed_bytes, self.per_token_bytes, self.n_layers


class DecodeSection(Table):
    """The coefficients of `DecodeStep`, or points (batch, context tokens in all, seconds) to which
    they are fitted by non-negative least squares on relative error."""

    max_batch: int = Field(ge=1)
    kv_memory_bytes: float | None = Field(None, gt=0)
    base_s: float | None = Field(None, ge=0)
    per_sequence_s: float = Field(0.0, ge=0)
    per_context_token_s: float = Field(0.0, ge=0)
    points: tuple[tuple[int, float, float], ...] = ()

    @model_validator(mode="after")
    def _is_one_of_both(self) -> DecodeSection:
        if (self.base_s is None) == (not self.points):
            raise ValueError("give base_s (with per_sequence_s, per_context_token_s), or points")
        if any(batch < 1 or context < 0 or step <= 0 for batch, context, step in self.points):
            raise ValueError("points: batch must be >= 1, context tokens >= 0, seconds > 0")
        return self

    def step(self) -> DecodeStep:
        if self.base_s is not None:
            return DecodeStep(self.base_s, self.per_sequence_s, self.per_context_token_s)
        # Slow to import, and only profiles with measured steps need it.
        from scipy.optimize import nnls

        table = np.asarray(self.points, dtype=np.float64)
        columns = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]])
        relative = columns / table[:, 2:]
        # Columns differ by many orders of magnitude; nnls wants them alike.
        size = np.linalg.norm(relative, axis=0)
        size[size == 0] = 1.0
        solution, _ = nnls(relative / size, np.ones(len(table)))
        return DecodeStep(*(float(value) for value in solution / size))


class ProvenanceSection(Table):
    """Where the numbers of a section come from."""

    origin: Origin
    note: str = Field(min_length=1)
    device: str = ""
    commit: str = ""
    date: str = ""

    @model_validator(mode="after")
    def _measured_is_traceable(self) -> ProvenanceSection:
        missing = [key for key in ("device", "commit", "date") if not getattr(self, key)]
        if self.origin is Origin.MEASURED and missing:
            raise ValueError(f"a measured number also needs {', '.join(missing)}")
        return self


class ProfileFile(Table):
    """The whole file."""

    schema_version: Literal[1]
    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    device: str = Field(min_length=1)
    model: str = Field(min_length=1)
    price_per_hour: float | None = Field(None, ge=0)
    prefill: PrefillSection
    cache: CacheSection
    decode: DecodeSection | None = None
    published: dict[str, tuple[Point, ...]] = Field(default_factory=dict)
    provenance: dict[str, ProvenanceSection]

    @model_validator(mode="after")
    def _has_provenance(self) -> ProfileFile:
        needed = {"prefill", "cache"}
        if self.decode is not None:
            needed.add("decode")
        if self.price_per_hour is not None:
            needed.add("price")
        missing = sorted(needed - self.provenance.keys())
        if missing:
            raise ValueError(
                f"provenance: {', '.join(missing)} is missing; say where it comes from"
            )
        return self


def profile_paths() -> dict[str, Path]:
    """Shipped profiles by name."""
    folder = Path(str(resources.files("harness") / "profiles" / "data"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or a TOML file by path.

    Raises ProfileError (exit code 2) with one line that names the file and the field.
    """
    shipped = profile_paths()
    path = shipped.get(name_or_path) or Path(name_or_path)
    if not path.is_file():
        raise ProfileError(
            f"{name_or_path}: no such profile or file (shipped: {', '.join(shipped)})"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return _assemble(ProfileFile.model_validate(data))
    except ValidationError as error:
        raise ProfileError(f"{path}: {_first_fault(error)}") from None
    except ValueError as error:
        raise ProfileError(f"{path}: prefill.{error}") from None


def _assemble(file: ProfileFile) -> Profile:
    fixed_bytes, per_token_bytes, n_layers = file.cache.sizes()
    decode = file.decode
    return Profile(
        name=file.name,
        device=file.device,
        model=file.model,
        curve=file.prefill.curve(),
        fixed_bytes=float(fixed_bytes),
        per_token_bytes=float(per_token_bytes),
        n_layers=n_layers,
        decode=None if decode is None else decode.step(),
        max_batch=0 if decode is None else decode.max_batch,
        kv_memory_bytes=None if decode is None else decode.kv_memory_bytes,
        price_per_hour=file.price_per_hour,
        prefill_points=file.prefill.points,
        published=file.published,
        provenance={
            of: Provenance(row.origin, row.note, row.device, row.commit, row.date)
            for of, row in file.provenance.items()
        },
    )


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"]) or "profile"
    found = fault.get("input")
    if fault["type"] == "extra_forbidden":
        return f"{field}: unknown key"
    if fault["type"] == "missing":
        return f"{field}: is missing"
    shown = "" if isinstance(found, (dict, list, tuple, bool)) else f" (found {found!r})"
    message = fault["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    return f"{field}: {message}{shown}"
