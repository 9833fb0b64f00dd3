"""Where a forward pass spends its time, operator by operator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from engine.bench.cases import Sequences
from engine.model.batch import Piece
from engine.model.config import ModelConfig
from engine.model.model import Model
from engine.model.weights import ModelWeights
from engine.ops.backend import Operators, operators_for


class TimedOperators:
    """Passes every call on to `inner` and adds up the seconds by operator (synchronous devices)."""

    def __init__(self, inner: Operators) -> None:
        self._inner = inner
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(self._inner, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = operator(*args)
            self.seconds[name] += time.perf_counter() - begin
            return result

        return timed


def stage_seconds(
    config: ModelConfig,
    weights: ModelWeights,
    sequences: Sequences,
    pieces: list[Piece],
    repeats: int = 5,
) -> dict[str, float]:
    """Seconds of one pass by stage, best of `repeats`; `rest` is projections, norms, dense blocks
    and the output head."""
    operators = TimedOperators(operators_for(weights.embed.device))
    model = Model(config, weights, operators)
    batch = sequences.build(pieces)
    model.forward(batch, sequences.storage)
    best: dict[str, float] = {}
    for _ in range(repeats):
        operators.seconds.clear()
        begin = time.perf_counter()
        model.forward(batch, sequences.storage)
        total = time.perf_counter() - begin
        if not best or total < best["total"]:
            rest = total - sum(operators.seconds.values())
            best = {**operators.seconds, "rest": rest, "total": total}
    return best
