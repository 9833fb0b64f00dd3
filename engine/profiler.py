"""Measures an engine on its device: prefill, decode, packing, and the ceilings beside them.

Times are medians over repeats (`engine.measuring`). Utilisation compares them with
what the same device reached in the same run on a matrix product and on a large copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engine.cache.storage import CacheStorage
from engine.measuring import Ceilings, Repeats, measure_ceilings, seconds_per_call
from engine.model.batch import ForwardBatch, Piece
from engine.model.config import ModelConfig
from engine.model.layout import CacheLayout
from engine.model.model import Model
from engine.ops.pack import pack, unpack

#: Tokens of one forward pass; longer prompts take several, as in a worker.
PASS_TOKENS = 8192

#: How often one measured figure is taken.
REPEATS = Repeats(warm_ups=1, runs=3, seconds=0.5)


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """`mfu`: model work per second over the measured matrix-product ceiling."""

    tokens: int
    seconds: float
    mfu: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A step of `batch` sequences with `context_tokens` each. `bandwidth`: model bytes per second
    over the measured copy ceiling. `roofline`: least possible time by both ceilings / measured.
    """

    batch: int
    context_tokens: int
    seconds: float
    bandwidth: float
    roofline: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything measured of one model on one device. Cache sizes are exact, not measured."""

    config: ModelConfig
    dtype: str
    ceilings: Ceilings
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    fixed_bytes: int
    per_token_bytes: int
    pack_bytes_per_s: float
    unpack_bytes_per_s: float


def measure(
    model: Model,
    lengths: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    page_tokens: int = 64,
    on_point: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure prefill at `lengths` and decode at every batch and context.

    `on_point` hears of each figure as it is taken.
    """
    config, device = model.config, model.device
    dtype = str(model.dtype).removeprefix("torch.")
    deepest = max(*lengths, *(batch * (context + 1) for batch in batches for context in contexts))
    layout = CacheLayout(
        config,
        -(-deepest // page_tokens) + max(batches) + 2,
        max(batches) + 2,
        page_tokens,
        dtype,
    )
    storage = CacheStorage(layout, device)
    on_gpu = device.type == "cuda"
    ceilings = measure_ceilings(
        device, model.dtype, 8192 if on_gpu else 512, 1 << 30 if on_gpu else 64 << 20, REPEATS
    )
    on_point(
        f"ceilings {ceilings.flops_per_s / 1e9:.1f} GFLOP/s, {ceilings.bytes_per_s / 1e9:.1f} GB/s"
    )
    prefill = []
    for tokens in sorted(lengths):
        seconds = seconds_per_call(partial(_prefill, model, storage, tokens), device, REPEATS)
        mfu = config.prefill_flops(tokens) / seconds / ceilings.flops_per_s
        prefill.append(PrefillPoint(tokens, seconds, mfu))
        on_point(f"prefill {tokens} tokens {seconds * 1e3:.2f} ms")
    decode = []
    for batch in sorted(batches):
        for context in sorted(contexts):
            step = _decode_step(model, storage, batch, context)
            seconds = seconds_per_call(step, device, REPEATS)
            moved = config.decode_bytes(batch, context, dtype)
            least_s = max(
                batch * config.decode_flops(context) / ceilings.flops_per_s,
                moved / ceilings.bytes_per_s,
            )
            decode.append(
                DecodePoint(
                    batch,
                    context,
                    seconds,
                    moved / seconds / ceilings.bytes_per_s,
                    least_s / seconds,
                )
            )
            on_point(f"decode batch {batch} context {context} {seconds * 1e3:.2f} ms")
    pack_rate, unpack_rate = _pack_rates(storage, max(lengths))
    return Measurement(
        config=config,
        dtype=dtype,
        ceilings=ceilings,
        prefill=tuple(prefill),
        decode=tuple(decode),
        fixed_bytes=config.state_bytes(dtype),
        per_token_bytes=config.kv_bytes_per_token(dtype),
        pack_bytes_per_s=pack_rate,
        unpack_bytes_per_s=unpack_rate,
    )


def _prefill(model: Model, storage: CacheStorage, tokens: int) -> Tensor:
    page = storage.layout.page_tokens
    pages = list(range(1, storage.layout.pages_for(tokens) + 1))
    ids = [i % model.config.vocab for i in range(tokens)]
    start = 0
    while True:
        stop = min(tokens, start + PASS_TOKENS // page * page)
        piece = Piece(ids[start:stop], start, 1, pages)
        logits = model.forward(ForwardBatch.build([piece], page, model.device), storage)
        if stop == tokens:
            return logits
        start = stop


def _decode_step(
    model: Model, storage: CacheStorage, batch: int, context: int
) -> Callable[[], Tensor]:
    """One step of `batch` sequences, each with pages of its own; captured as a graph on CUDA."""
    page = storage.layout.page_tokens
    per_sequence = storage.layout.pages_for(context + 1)
    pieces = [
        Piece([7], context, row + 1, range(1 + row * per_sequence, 1 + (row + 1) * per_sequence))
        for row in range(batch)
    ]
    if model.device.type == "cuda":
        from engine.model.decode_graph import DecodeGraph

        graph = DecodeGraph(model, storage, per_sequence, (batch,))
        return lambda: graph.forward(pieces)
    return lambda: model.forward(ForwardBatch.build(pieces, page, model.device), storage)


def _pack_rates(storage: CacheStorage, tokens: int) -> tuple[float, float]:
    """Bytes per second of packing a whole request into wire buffers, and of unpacking it."""
    layout = storage.layout
    pages = list(range(1, layout.pages_for(tokens) + 1))
    layers = range(layout.config.layers)
    size = layout.request_bytes(tokens)
    wires = [pack(storage, layer, pages, 1, tokens) for layer in layers]

    def pack_all() -> None:
        for layer in layers:
            pack(storage, layer, pages, 1, tokens)

    def unpack_all() -> None:
        for layer in layers:
            unpack(storage, layer, pages, 1, tokens, wires[layer])

    device = storage.device
    pack_s, unpack_s = (seconds_per_call(each, device, REPEATS) for each in (pack_all, unpack_all))
    return size / pack_s, size / unpack_s


def profile_toml(
    measurement: Measurement,
    name: str,
    device: str,
    commit: str,
    date: str,
    max_batch: int,
    kv_memory_bytes: float | None = None,
) -> str:
    """A profile file as `simulate` and paced workers read it (docs/profiles.md)."""
    config = measurement.config
    # Noise may make a longer prompt seem faster; a profile must not fall.
    points: list[tuple[int, float]] = []
    for point in measurement.prefill:
        floor = points[-1][1] if points else 0.0
        points.append((point.tokens, max(point.seconds, floor)))
    lines = [
        "schema_version = 1",
        f'name = "{name}"',
        f'device = "{device}"',
        f'model = "{config.name} ({measurement.dtype})"',
        "",
        "[prefill]",
        'interpolation = "linear"',
        f"points = [{', '.join(f'[{n}, {s:.6g}]' for n, s in points)}]",
        "",
        "[cache]",
        f"fixed_bytes = {measurement.fixed_bytes}",
        f"per_token_bytes = {measurement.per_token_bytes}",
        f"n_layers = {config.layers}",
        "",
        "[decode]",
        f"max_batch = {max_batch}",
    ]
    if kv_memory_bytes is not None:
        lines.append(f"kv_memory_bytes = {kv_memory_bytes:.0f}")
    rows = [
        f"[{p.batch}, {p.batch * p.context_tokens}, {p.seconds:.6g}]" for p in measurement.decode
    ]
    lines.append(f"points = [{', '.join(rows)}]")
    notes = {
        "prefill": "median of repeats, nothing cached; not falling by construction",
        "cache": "exact sizes of the engine's cache layout",
        "decode": "median of repeats; context tokens are those of the whole batch",
    }
    for part, note in notes.items():
        lines += [
            "",
            f"[provenance.{part}]",
            'origin = "measured"',
            f'note = "prfaas profile: {note}"',
            f'device = "{device}"',
            f'commit = "{commit}"',
            f'date = "{date}"',
        ]
    return "\n".join(lines) + "\n"
