"""Timing on a device, and the ceilings that figures are put against, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often a call is timed: after `warm_ups`, at least `runs` times and for `seconds`."""

    warm_ups: int = 2
    runs: int = 5
    seconds: float = 0.3


def seconds_per_call(
    call: Callable[[], object], device: torch.device, repeats: Repeats | None = None
) -> float:
    """Median seconds of `call`: by events on CUDA, else by the clock."""
    repeats = repeats or Repeats()
    for _ in range(repeats.warm_ups):
        call()
    taken: list[float] = []
    end = time.perf_counter() + repeats.seconds
    while len(taken) < repeats.runs or (time.perf_counter() < end and len(taken) < 1000):
        if device.type == "cuda":
            begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            done.record()
            done.synchronize()
            taken.append(begin.elapsed_time(done) / 1e3)
        else:
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device does at best: a large matrix product, and a large copy (read and write)."""

    flops_per_s: float
    bytes_per_s: float


def measure_ceilings(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    copy_bytes: int,
    repeats: Repeats | None = None,
) -> Ceilings:
    """`width` is the size of the square product, `copy_bytes` that of the buffer copied."""
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    product_s = seconds_per_call(lambda: a @ b, device, repeats)
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_per_call(lambda: target.copy_(source), device, repeats)
    return Ceilings(2 * width**3 / product_s, 2 * copy_bytes / copy_s)
