"""The oracle of engine tests: one engine without a loop, which does everything step by step."""

from __future__ import annotations

import torch

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.figures import Group
from engine.cache.pool import HybridPool
from engine.cache.storage import CacheStorage
from engine.model.config import shape
from engine.model.layout import CacheLayout
from engine.model.model import Model
from engine.model.weights import random_weights
from engine.runner import Runner
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sampling, Sequence

PAGE = 16


class Engine:
    """Model, pool and scheduler without a loop: one engine that does everything, step by step.

    With `poison`, whatever is freed is filled with NaN, so that any read of it shows. `logits` are
    those of each forward pass.
    """

    def __init__(
        self,
        model: str = "tiny",
        pages: int = 64,
        slots: int = 16,
        limits: Limits = Limits(),
        interval_blocks: int = 2,
        poison: bool = True,
        forward_tokens: int = 8192,
    ) -> None:
        torch.set_num_threads(1)
        config = shape(model)
        layout = CacheLayout(config, pages + 1, slots + 1, PAGE)
        self.storage = CacheStorage(layout)
        self.pool = HybridPool(
            pages,
            slots,
            PAGE,
            policy=CheckpointPolicy(interval_blocks),
            first_page=1,
            first_slot=1,
            on_freed=self._poison if poison else None,
        )
        self.scheduler = Scheduler(self.pool, limits)
        self.model = Model(config, random_weights(config, 0))
        self.runner = Runner(self.model, self.storage, forward_tokens)
        self.logits: list[torch.Tensor] = []
        forward = self.model.forward

        def recorded(*arguments: object) -> torch.Tensor:
            self.logits.append(forward(*arguments))
            return self.logits[-1]

        self.model.forward = recorded
        if poison:
            self.storage.poison(tuple(range(1, slots + 1)), tuple(range(1, pages + 1)))

    def _poison(self, group: Group, number: int) -> None:
        if group is Group.KV:
            self.storage.poison(pages=(number,))
        else:
            self.storage.poison(slots=(number,))

    def step(self) -> list[Sequence]:
        step = self.scheduler.schedule()
        return self.scheduler.complete(step, self.runner.execute(step))

    def generate(
        self, prompt: list[int], count: int, sampling: Sampling = Sampling(), tenant: str = ""
    ) -> list[int]:
        """The `count` tokens after `prompt`."""
        sequence = Sequence("r", list(prompt), count, tenant=tenant, sampling=sampling)
        self.scheduler.add(sequence)
        while not sequence.finish:
            self.step()
        return sequence.tokens[len(prompt) :]
