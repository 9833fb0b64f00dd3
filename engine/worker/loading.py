"""From worker options to a model and its cache memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache.storage import TORCH_DTYPE, CacheStorage
from engine.model.checkpoint import load_checkpoint
from engine.model.config import shape
from engine.model.layout import CacheLayout
from engine.model.model import Model
from engine.model.weights import random_weights
from engine.transport.arena import SharedArena
from engine.worker.options import InputError, WorkerOptions


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """`arena` is memory that the data plane maps too: that of `storage`, or, where `staged`, a
    staging area beside it.
    """

    model: Model
    storage: CacheStorage
    arena: SharedArena
    stop_tokens: frozenset[int]
    staged: bool = False

    @property
    def layout(self) -> CacheLayout:
        return self.storage.layout


def load_model(
    model: str,
    seed: int,
    device: str,
    threads: int,
    dtype_name: str = "auto",
    drawn_on: str = "cpu",
) -> tuple[Model, frozenset[int]]:
    """A shipped shape with seeded weights, or a checkpoint directory; and its end-of-text tokens.

    "auto" is bfloat16 on CUDA and float32 elsewhere. `drawn_on`: see `random_weights`. Raises
    errors with exit_code 2 for what the user can mend.
    """
    torch.set_num_threads(threads)
    if device not in ("cpu", "cuda"):
        raise InputError(
            f"--device {device}; cpu or cuda would do (CUDA_VISIBLE_DEVICES chooses a card)"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {device}: torch sees no CUDA device here; cpu would do")
    if dtype_name == "auto":
        dtype_name = "bfloat16" if device == "cuda" else "float32"
    dtype = TORCH_DTYPE[dtype_name]
    directory = Path(model)
    if directory.is_dir():
        config, weights = load_checkpoint(directory, device, dtype)
        return Model(config, weights), _end_of_text(directory)
    config = shape(model)
    return Model(config, random_weights(config, seed, device, dtype, drawn_on)), frozenset()


def load_engine(options: WorkerOptions) -> LoadedEngine:
    """Raises errors with exit_code 2 for what the user can mend."""
    model, stop_tokens = load_model(
        options.model, options.seed, options.device, options.threads, options.dtype
    )
    layout = CacheLayout(
        model.config,
        options.pages + 1,
        options.slots + 1,
        options.page_tokens,
        str(model.dtype).removeprefix("torch."),
    )
    if model.device.type == "cuda":
        arena = SharedArena.create(options.staging_mib << 20)
        return LoadedEngine(model, CacheStorage(layout, model.device), arena, stop_tokens, True)
    arena = SharedArena.create(layout.nbytes)
    return LoadedEngine(model, CacheStorage(layout, model.device, arena.buffer), arena, stop_tokens)


def _end_of_text(directory: Path) -> frozenset[int]:
    """`eos_token_id` of the checkpoint's config.json: a number, a list, or none."""
    value = json.loads((directory / "config.json").read_text()).get("eos_token_id")
    if isinstance(value, int):
        return frozenset((value,))
    return frozenset(value) if isinstance(value, list) else frozenset()
