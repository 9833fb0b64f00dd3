"""Faults on the real processes and the real link of a fleet, one after the other, each healed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from harness.errors import NotReady
from harness.links.base import ShapedLink

#: Between the end of a fault and the beginning of the next, seconds: at least, and at most.
CALM_S = (3.0, 9.0)
#: A worker that was lost stands again within so long, and its end is noticed.
SETTLE_S = 30.0
POLL_S = 0.02


class Fleet(Protocol):
    """What faults need of `harness.fleets.local.LocalFleet`."""

    @property
    def link(self) -> ShapedLink | None: ...

    def pid(self, name: str) -> int: ...

    def exit_status(self, name: str) -> int | None: ...

    def lost(self, name: str) -> bool: ...

    async def restart(self, name: str) -> None: ...


class Faults:
    """Kills and stops the workers called `names`, cuts the link, has `cancel` cancel requests.

    `done` counts the faults of each kind, and `violations` has what should not have been.
    """

    def __init__(
        self,
        fleet: Fleet,
        names: Sequence[str],
        cancel: Callable[[], None],
        dice: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self.done: dict[str, int] = {}
        self.violations: list[str] = []
        self._fleet = fleet
        self._names = names
        self._cancel_requests = cancel
        self._dice = dice
        self._say = say
        #: Whom a fault may end now.
        self._victims = names

    async def inflict(self, until_s: float, calm_s: tuple[float, float] = CALM_S) -> None:
        """Until the loop's time is `until_s`.

        Processes end in one half of the time only, every second worker in the first: each has a
        life that is long enough to tell whether its memory is flat.
        """
        loop = asyncio.get_running_loop()
        kinds = [self._kill, self._stop, self._cut, self._cancel]
        half_s = (loop.time() + until_s) / 2
        self._victims = self._names[::2]
        while loop.time() < until_s:
            await asyncio.sleep(self._dice.uniform(*calm_s))
            if loop.time() >= half_s and len(self._names) > 1:
                self._victims = self._names[1::2]
            await self._mend()
            kind = self._dice.choice(kinds)
            name = kind.__name__.strip("_")
            self.done[name] = self.done.get(name, 0) + 1
            await kind()

    async def recover(self, name: str) -> None:
        """Start it again if it is lost; a start that fails is tried again."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SETTLE_S
        while self._fleet.lost(name):
            try:
                await self._fleet.restart(name)
            except NotReady as error:
                if loop.time() > end_s:
                    self.violations.append(f"{name} did not come back: {error}")
                    return

    async def _mend(self) -> None:
        """Between two faults nobody should be lost. One that fell silent had too little of the
        machine, and is started again; one that ended is a finding."""
        for name in self._names:
            status = self._fleet.exit_status(name)
            if status is not None:
                self.violations.append(f"{name} ended by itself, with status {status}")
            await self.recover(name)

    async def _kill(self) -> None:
        name = self._dice.choice(self._victims)
        self._say(f"kill {name}")
        with suppress(ProcessLookupError):
            os.kill(self._fleet.pid(name), signal.SIGKILL)
        await asyncio.sleep(self._dice.uniform(0.2, 1.5))
        # On a busy machine that may take longer.
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SETTLE_S
        while not self._fleet.lost(name) and loop.time() < end_s:  # noqa: ASYNC110 - polled
            await asyncio.sleep(POLL_S)
        if not self._fleet.lost(name):
            self.violations.append(f"{name}: its end was not noticed for {SETTLE_S:.0f} s")
        await self.recover(name)

    async def _stop(self) -> None:
        name = self._dice.choice(self._victims)
        pid = self._fleet.pid(name)
        self._say(f"stop {name}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._dice.uniform(0.2, 4.0))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        # Whoever watches may have given it up meanwhile, or be about to.
        await asyncio.sleep(0.5)
        await self.recover(name)

    async def _cut(self) -> None:
        link = self._fleet.link
        if link is None:
            return
        whole = link.shape
        down = replace(
            whole,
            forward=replace(whole.forward, down=True),
            reverse=replace(whole.reverse, down=True),
        )
        self._say("cut the link")
        await link.apply(down)
        await asyncio.sleep(self._dice.uniform(0.2, 3.0))
        await link.apply(whole)

    async def _cancel(self) -> None:
        self._say("cancel two requests")
        self._cancel_requests()
