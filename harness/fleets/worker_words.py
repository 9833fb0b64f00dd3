"""What the worker of an instance is told at its start, on whichever host it stands."""

from __future__ import annotations

from typing import Any

from engine.disciplines import FIFO
from harness.experiment import ConfigurationSpec, Experiment, QueueSpec
from harness.ports import InstanceSpec
from harness.profiles import Profile
from harness.scale import Scale

#: The engine that computes requests again, alone.
ORACLE = "oracle"
#: Admission to a paced decode batch is possible this many times a (scaled) step.
DECODE_PHASES = 32
#: TCP connections between two workers: the scaled link is slow, and each costs a thread.
LANES = 2
SLOTS = 512
#: On every device: in bfloat16 the rounding depends on the batch, so the tokens of two engines
#: differ now and then; and the scaled model's fixed and per-token bytes keep their proportion.
DTYPE = "float32"


def worker_words(
    experiment: Experiment,
    configuration: ConfigurationSpec,
    spec: InstanceSpec,
    scale: Scale,
    pages: int,
    pacing: str,
) -> dict[str, str]:
    """Arguments by name. `pages`: of its cache; `pacing`: where it finds what `pacing_of` says, or
    "none"."""
    emulate = experiment.emulate
    oracle = spec.name == ORACLE
    words = {
        "name": spec.name,
        "cluster": spec.cluster,
        "role": "both" if oracle else spec.role.value,
        "model": emulate.model,
        "device": emulate.device,
        "dtype": DTYPE,
        "seed": str(experiment.seed),
        "page-tokens": str(emulate.page_tokens),
        "pages": str(pages),
        "slots": str(SLOTS),
        "checkpoint-interval": str(experiment.cache.interval_blocks),
        "pacing": pacing,
        "lanes": str(LANES),
    }
    return words if oracle else words | queue_words(experiment, configuration.queue, scale)


def pacing_of(profile: Profile, scale: Scale) -> dict[str, Any]:
    """The worker's pacing file: real seconds, by modelled prompt tokens and engine decode steps."""
    real = profile.scaled(scale.time_scale)
    table = real.to_pacing()
    steps = scale.token_scale
    max_batch = max(1, real.max_batch)
    if real.decode is None:
        step_s: list[list[float]] = [[1, 1.0]]
        context_s = 0.0
    else:
        step_s = [[n, real.decode_step_s(n, 0) * steps] for n in range(1, max_batch + 1)]
        context_s = real.decode.per_context_token_s * steps * scale.token_scale
    return {
        "prefill": {
            "points": [
                list(point)
                for point in zip(table["prefill_tokens"], table["prefill_s"], strict=True)
            ]
        },
        "decode": {
            "step_s": step_s,
            "max_batch": max_batch,
            "context_s_per_token": context_s,
            "phases": min(DECODE_PHASES, steps),
        },
    }


def queue_words(experiment: Experiment, queue: QueueSpec, scale: Scale) -> dict[str, str]:
    """Arguments by name of a worker that takes its prompts by `queue`: chunks in whole pages of
    engine tokens, the objective in real seconds."""
    if queue.discipline == FIFO.name:
        return {}
    page_tokens = experiment.emulate.page_tokens
    chunk_pages = max(1, queue.chunk_tokens // (page_tokens * scale.token_scale))
    return {
        "queue-discipline": queue.discipline,
        "queue-ageing": str(queue.ageing),
        "slo-ttft-s": str(experiment.slo.ttft_s / scale.time_scale),
        "step-tokens": str(chunk_pages * page_tokens),
    }
