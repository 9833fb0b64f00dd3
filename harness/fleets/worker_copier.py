"""Fetches prefixes from the workers of one cluster into those of another, across the link."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.cache.keys import keys_of_ids
from harness.directory import PrefixDirectory
from harness.instances.remote import PrefixGone, RemoteInstance
from harness.ports import Instance, ServingError, TransferFailed
from harness.router import PrefixCopy
from harness.stalls import Timeout
from harness.view import View
from workloads.request import Request

#: Workers with the wanted prefix that are looked at for one which is alive.
SOURCES_LOOKED_AT = 4
#: A fetch may take so long at the least: connections are made with the first.
LEAST_S = 1.0


@dataclass(slots=True)
class Fetched:
    """Since the start. `shared`: requests that waited for another's fetch. bytes: as they crossed;
    tokens: of the modelled system."""

    fetched: int = 0
    shared: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0


class WorkerCopier:
    """Implements harness.router.Copier. A fetch is given up once it has taken as long as the
    prefill that it saves: beyond that it costs more than it is worth. `timeout` bounds it.
    """

    def __init__(
        self,
        view: View,
        directory: PrefixDirectory,
        instances: Mapping[str, Instance],
        timeout: Timeout = asyncio.timeout,
    ) -> None:
        self.figures = Fetched()
        self._view = view
        self._directory = directory
        self._instances = instances
        self._timeout = timeout
        self._under_way: dict[tuple[str, int], asyncio.Task[int]] = {}

    async def __call__(self, copy: PrefixCopy) -> int:
        """Raises TransferFailed. A fetch that somebody else waits for goes on if this caller is
        cancelled."""
        size = copy.request.block_tokens
        end = keys_of_ids(copy.request.block_ids, copy.request.tenant)[copy.tokens // size - 1]
        place = copy.sink.spec.name, end
        task = self._under_way.get(place)
        if task is not None:
            self.figures.shared += 1
            await asyncio.shield(task)
            return 0
        task = asyncio.get_running_loop().create_task(self._fetch(copy))
        self._under_way[place] = task

        def ended(task: asyncio.Task[int]) -> None:
            del self._under_way[place]
            if not task.cancelled():
                task.exception()  # known now, even if every caller has left

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    def facts(self) -> dict[str, Any]:
        return {"prefix_copies": asdict(self.figures)}

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, copy: PrefixCopy) -> int:
        request, tokens, sink = copy.request, copy.tokens, copy.sink
        assert isinstance(sink, RemoteInstance)
        source = self._source(request, copy.source, tokens)
        held_tokens = self._directory.instance_held_tokens(sink.spec.name, request)
        try:
            if source is None:
                raise TransferFailed(f"nobody in {copy.source} holds the prefix any more")
            async with self._timeout(self._worth_s(request, sink, tokens)):
                n_bytes = await source.send_prefix(
                    request, copy.attempt, tokens, min(tokens, held_tokens), sink
                )
        except (ServingError, TimeoutError) as error:
            self.figures.failed += 1
            if isinstance(error, PrefixGone):
                assert source is not None
                self._directory.correct(source.spec.name, request, tokens - request.block_tokens)
            raise TransferFailed(f"{type(error).__name__}: {error}") from error
        self.figures.fetched += 1
        self.figures.tokens += tokens
        self.figures.bytes += n_bytes
        return n_bytes

    def _source(self, request: Request, cluster: str, tokens: int) -> RemoteInstance | None:
        for name, held in self._directory.holders(cluster, request, SOURCES_LOOKED_AT):
            instance = self._instances[name]
            assert isinstance(instance, RemoteInstance)
            if held == tokens and not instance.lost:
                return instance
        return None

    def _worth_s(self, request: Request, sink: RemoteInstance, tokens: int) -> float:
        profile = self._view.prefill[sink.spec.cluster].profile
        saved_s = profile.prefill_s(request.input_tokens) - profile.prefill_s(
            request.input_tokens, tokens
        )
        return max(LEAST_S, saved_s)
