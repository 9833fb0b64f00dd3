"""The directory and the fetches of a fleet of workers, without the workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from engine.cache.checkpoints import CheckpointPolicy
from engine.cache.figures import CacheEvent, Group
from engine.cache.keys import block_keys
from engine.cache.pool import HybridPool
from harness.directory import PrefixDirectory
from harness.fleets.page_names import PageNames
from harness.fleets.worker_copier import WorkerCopier
from harness.fleets.worker_keeper import WorkerEvent, WorkerKeeper
from harness.instances.remote import DataAddress, PrefixGone, RemoteInstance, Timeout
from harness.ports import InstanceLost, InstanceSpec, Role, TransferFailed
from harness.profiles import load_profile
from harness.router import PrefixCopy
from harness.stalls import BEAT_S, STALL_S, OwnStalls
from harness.topology import PD, PRFAAS, build_view
from workloads.prompts import prompt_tokens
from workloads.request import Request
from workloads.scaling import TokenScale

TOKEN_SCALE, PAGE = 64, 8
SPECS = [
    InstanceSpec("prfaas-0", PRFAAS, Role.PREFILL, ""),
    InstanceSpec("prfaas-1", PRFAAS, Role.PREFILL, ""),
    InstanceSpec("pd-0", PD, Role.PREFILL, ""),
    InstanceSpec("pd-1", PD, Role.DECODE, ""),
]
CHAIN = tuple(range(1, 401))


def request_of(number: int, blocks: int, size: int = 512, tenant: str = "") -> Request:
    """`blocks` shared blocks of `size` tokens, and 100 tokens of its own."""
    ids = (*CHAIN[:blocks], 1000 + number)
    return Request(number, 0.0, blocks * size + 100, 8, ids, size, tenant=tenant)


def engine_prompt(request: Request) -> list[int]:
    return prompt_tokens(TokenScale(TOKEN_SCALE).request(request), 512, 1).tolist()


class Worker:
    """A worker's pool and the events nobody has asked for yet."""

    def __init__(self, pages: int = 4096, interval: int = 4) -> None:
        self.events: list[CacheEvent] = []
        policy = CheckpointPolicy(interval)
        self.pool = HybridPool(pages, 512, PAGE, policy=policy, on_event=self.events.append)

    def prefill(self, request: Request) -> int:
        """Returns the system tokens that needed no computing."""
        prompt = engine_prompt(request)
        lease = self.pool.acquire(block_keys(prompt, PAGE, request.tenant), len(prompt))
        hit = lease.hit
        for boundary in self.pool.policy.boundaries(hit.tokens, hit.kv_tokens, len(prompt), PAGE):
            lease.reserve_checkpoint(boundary)
        lease.copied()
        lease.commit(len(prompt))
        lease.release()
        return hit.tokens * TOKEN_SCALE

    def read(self) -> list[list[object]]:
        rows = [[str(each.group), each.stored, f"{each.key:x}"] for each in self.events]
        self.events.clear()
        return rows


class Told:
    """A directory fed by workers' events."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers
        self.questions: list[str] = []
        self.directory = PrefixDirectory()
        for spec in SPECS:
            self.directory.add_instance(spec.name, spec.cluster)
        self.names = PageNames(PAGE, PAGE * TOKEN_SCALE, 10_000)
        self.keeper = WorkerKeeper(self.directory, self.names, self.read)

    async def read(self, name: str) -> list[WorkerEvent]:
        self.questions.append(name)
        await asyncio.sleep(0)
        return list(self.workers[name].read())

    async def serve(self, request: Request, worker: InstanceSpec, expected: int = 0) -> int:
        self.names.learn(request, engine_prompt(request))
        reused = self.workers[worker.name].prefill(request)
        self.keeper.prefilled(request, worker, SPECS[3], expected, reused)
        await self.settled()
        return reused

    async def settled(self) -> None:
        while self.keeper._asking:  # noqa: ASYNC110 - polled
            await asyncio.sleep(0.005)


def told(**workers: Worker) -> Told:
    given = {name.replace("_", "-"): worker for name, worker in workers.items()}
    return Told({spec.name: Worker() for spec in SPECS} | given)


@pytest.mark.parametrize("size", [128, 256, 512, 1024, 1536])
async def test_a_directory_fed_by_events_knows_what_a_worker_would_reuse(size: int) -> None:
    fleet = told()
    await fleet.serve(request_of(1, 48, size), SPECS[0])
    for number, blocks in enumerate((48, 49, 40, 12, 3), 10):
        asked = request_of(number, blocks, size)
        prompt = engine_prompt(asked)
        keys, pool = block_keys(prompt, PAGE), fleet.workers["prfaas-0"].pool
        # The deepest state at the end of a block: one inside a block has no name.
        ends = [n * size for n in range(1, blocks + 1) if n * size % (PAGE * TOKEN_SCALE) == 0]
        depths = [end // TOKEN_SCALE for end in ends if end < asked.input_tokens]
        usable = [n for n in depths if pool.match(keys[: n // PAGE], n + 1).tokens == n]
        known = fleet.directory.instance_tokens("prfaas-0", asked)
        assert known == max(usable, default=0) * TOKEN_SCALE
        held = fleet.directory.instance_held_tokens("prfaas-0", asked)
        assert held == min(blocks, 48) * size
        assert fleet.directory.instance_tokens("pd-0", asked) == 0
    await fleet.keeper.close()


async def test_evictions_reach_the_directory_and_tenants_stay_apart() -> None:
    fleet = told(prfaas_0=Worker(pages=60))
    await fleet.serve(request_of(1, 40, tenant="a"), SPECS[0])
    assert fleet.directory.hit_tokens(PRFAAS, request_of(2, 40, tenant="a")) == 40 * 512
    assert fleet.directory.hit_tokens(PRFAAS, request_of(2, 40, tenant="b")) == 0
    await fleet.serve(Request(3, 0.0, 50 * 512, 8, tuple(range(9000, 9050)), 512), SPECS[0])
    assert fleet.directory.held_tokens(PRFAAS, request_of(2, 40, tenant="a")) <= 10 * 512
    assert fleet.directory.hit_tokens(PRFAAS, request_of(2, 40, tenant="a")) <= 8 * 512
    await fleet.keeper.close()


async def test_events_that_come_together_cost_one_question() -> None:
    fleet = told()
    for number in range(10):
        fleet.keeper.prefilled(request_of(number, 4), SPECS[0], SPECS[3], 0, 0)
    await fleet.settled()
    assert sorted(fleet.questions) == ["pd-1", "prfaas-0"]
    await fleet.keeper.close()


async def test_a_lost_eviction_is_put_right_by_what_was_reused() -> None:
    fleet = told(prfaas_0=Worker(pages=60))
    await fleet.serve(request_of(1, 40), SPECS[0])
    worker = fleet.workers["prfaas-0"]
    worker.prefill(Request(3, 0.0, 50 * 512, 8, tuple(range(9000, 9050)), 512))
    worker.read()  # nobody hears of it
    asked = request_of(4, 45)
    expected = fleet.directory.instance_tokens("prfaas-0", asked)
    assert expected == 40 * 512
    reused = await fleet.serve(asked, SPECS[0], expected)
    assert reused < expected
    for number, blocks in enumerate((46, 44, 41, 30), 20):
        again = request_of(number, blocks)
        prompt = engine_prompt(again)
        found = worker.pool.match(block_keys(prompt, PAGE), len(prompt)).tokens
        assert fleet.directory.instance_tokens("prfaas-0", again) == found * TOKEN_SCALE
    await fleet.keeper.close()


async def test_a_worker_that_does_not_answer_is_forgotten() -> None:
    fleet = told()
    await fleet.serve(request_of(1, 40), SPECS[0])

    async def silent(name: str) -> list[WorkerEvent]:
        raise TimeoutError

    fleet.keeper._read = silent
    fleet.keeper.prefilled(request_of(2, 40), SPECS[0], SPECS[3], 0, 0)
    await fleet.settled()
    assert fleet.directory.hit_tokens(PRFAAS, request_of(3, 40)) == 0
    await fleet.keeper.close()


def test_page_names_are_bounded() -> None:
    names = PageNames(PAGE, PAGE * TOKEN_SCALE, 100)
    for number in range(20):
        request = Request(
            number, 0.0, 30 * 512, 8, tuple(range(number * 100, number * 100 + 30)), 512
        )
        names.learn(request, engine_prompt(request))
        assert len(names) <= 100
    last = block_keys(engine_prompt(request), PAGE)[-1]
    assert names.blocks(Group.KV, last) == names.blocks(Group.STATE, last) != ()
    assert names.blocks(Group.KV, 12345) == ()


def test_a_prompt_whose_pages_were_forgotten_is_learned_again() -> None:
    """A document that is asked about for long outlives the bound."""
    names = PageNames(PAGE, PAGE * TOKEN_SCALE, 100)
    kept = request_of(1, 30)
    pages = block_keys(engine_prompt(kept), PAGE)
    names.learn(kept, engine_prompt(kept))
    before = [names.blocks(Group.KV, page) for page in pages]
    assert all(before[1:])
    for number in range(2, 12):
        other = Request(
            number, 0.0, 30 * 512, 8, tuple(range(number * 100, number * 100 + 30)), 512
        )
        names.learn(other, engine_prompt(other))
        names.learn(kept, engine_prompt(kept))
        assert [names.blocks(Group.KV, page) for page in pages] == before
        assert len(names) <= 100 and len(names._learned) <= 100


async def test_a_worker_that_was_lost_while_it_was_asked_is_forgotten() -> None:
    fleet = told()
    await fleet.serve(request_of(1, 40), SPECS[0])
    gone = Sends(SPECS[0], lambda: asyncio.sleep(0, 1))
    gone.mark_lost("killed")

    async def closed(name: str) -> list[WorkerEvent]:
        return await gone.cache_events()

    fleet.keeper._read = closed
    fleet.keeper.prefilled(request_of(2, 40), SPECS[0], SPECS[3], 0, 0)
    await fleet.settled()
    assert fleet.directory.hit_tokens(PRFAAS, request_of(3, 40)) == 0
    await fleet.keeper.close()


async def test_events_of_a_worker_are_remembered_within_a_bound() -> None:
    fleet = told()
    fleet.keeper = WorkerKeeper(fleet.directory, fleet.names, fleet.read, 10)
    await fleet.serve(request_of(1, 40), SPECS[0])
    assert {name: len(events) for name, events in fleet.keeper._recent.items()} == {
        "prfaas-0": 10,
        "pd-1": 0,
    }
    await fleet.keeper.close()


class Sends(RemoteInstance):
    """A worker of which only the fetch matters."""

    def __init__(self, spec: InstanceSpec, answer: Callable[[], Awaitable[int]]) -> None:
        address = DataAddress("127.0.0.1", 1, 1)
        super().__init__(spec, None, address, address, lambda request: ([], 1), 512)  # type: ignore[arg-type]
        self.answer = answer
        self.asked: list[tuple[str, int, int]] = []

    async def send_prefix(self, request, attempt, tokens, held_tokens, sink) -> int:
        self.asked.append((sink.spec.name, tokens, held_tokens))
        return await self.answer()


def copier_of(
    directory: PrefixDirectory,
    answer: Callable[[], Awaitable[int]],
    timeout: Timeout = asyncio.timeout,
) -> WorkerCopier:
    profiles = {PRFAAS: load_profile("1t-h200"), PD: load_profile("1t-h20")}
    instances = {spec.name: Sends(spec, answer) for spec in SPECS}
    return WorkerCopier(build_view(SPECS, profiles, {}), directory, instances, timeout)


async def known_at(*names: str) -> Told:
    fleet = told()
    for spec in SPECS:
        if spec.name in names:
            await fleet.serve(request_of(1, 40), spec)
    return fleet


async def test_two_requests_for_one_prefix_fetch_it_once() -> None:
    fleet = await known_at("prfaas-1")
    go_on = asyncio.Event()

    async def answer() -> int:
        await go_on.wait()
        return 777

    copier = copier_of(fleet.directory, answer)
    sink = copier._instances["pd-0"]
    copies = [
        asyncio.create_task(
            copier(PrefixCopy(request_of(n, 40 + n), 1, PRFAAS, sink, 40 * 512, 1e6))
        )
        for n in (2, 3, 4)
    ]
    await asyncio.sleep(0)
    copies[0].cancel()  # who asked first leaves: the others still get it
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*copies, return_exceptions=True) != [777, 0, 0]
    assert [copy.result() for copy in copies[1:]] == [0, 0]
    source = copier._instances["prfaas-1"]
    assert isinstance(source, Sends) and source.asked == [("pd-0", 40 * 512, 0)]
    assert copier.facts()["prefix_copies"] == {
        "fetched": 1, "shared": 2, "failed": 0, "tokens": 40 * 512, "bytes": 777,
    }  # fmt: skip
    assert not copier._under_way


async def test_failures_are_one_kind_and_what_is_gone_is_not_asked_for_again() -> None:
    fleet = await known_at("prfaas-0")
    outcome: Exception = InstanceLost("prfaas-0", "killed")

    async def answer() -> int:
        raise outcome

    copier = copier_of(fleet.directory, answer)
    wanted = PrefixCopy(request_of(2, 45), 1, PRFAAS, copier._instances["pd-0"], 40 * 512, 1e6)
    with pytest.raises(TransferFailed, match="killed"):
        await copier(wanted)
    assert fleet.directory.hit_tokens(PRFAAS, wanted.request) == 40 * 512
    outcome = PrefixGone("prfaas-0: not here")
    with pytest.raises(TransferFailed, match="not here"):
        await copier(wanted)
    assert fleet.directory.hit_tokens(PRFAAS, wanted.request) < 40 * 512
    with pytest.raises(TransferFailed, match="nobody in prfaas holds"):
        await copier(wanted)
    assert copier.figures.failed == 3 and not copier._under_way


async def test_a_lost_source_is_passed_over_and_a_slow_one_given_up() -> None:
    fleet = await known_at("prfaas-0", "prfaas-1")

    async def answer() -> int:
        await asyncio.sleep(60)
        return 1

    copier = copier_of(fleet.directory, answer)
    copier._worth_s = lambda *_: 0.02  # type: ignore[method-assign]
    first, second = copier._instances["prfaas-0"], copier._instances["prfaas-1"]
    assert isinstance(first, Sends) and isinstance(second, Sends)
    first.mark_lost("killed")
    wanted = PrefixCopy(request_of(2, 45), 1, PRFAAS, copier._instances["pd-0"], 40 * 512, 1e6)
    with pytest.raises(TransferFailed, match="TimeoutError"):
        await copier(wanted)
    assert (len(first.asked), len(second.asked)) == (0, 1)
    await copier.close()


async def test_a_fetch_is_not_given_up_for_a_stall_of_the_harness_itself() -> None:
    fleet = await known_at("prfaas-0")
    stalls = OwnStalls()

    async def answer() -> int:
        await asyncio.sleep(2 * BEAT_S)
        time.sleep(STALL_S + 2 * BEAT_S)  # noqa: ASYNC251 - this process stands still
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.05)
        return 777

    stalls.watch()
    try:
        for timeout, given_up in ((asyncio.timeout, True), (stalls.timeout, False)):
            copier = copier_of(fleet.directory, answer, timeout)
            # Less than it stands still; with what goes before, more than a busy machine takes.
            copier._worth_s = lambda *_: STALL_S + BEAT_S  # type: ignore[method-assign]
            sink = copier._instances["pd-0"]
            wanted = copier(PrefixCopy(request_of(2, 45), 1, PRFAAS, sink, 40 * 512, 1e6))
            if given_up:
                with pytest.raises(TransferFailed, match="TimeoutError"):
                    await wanted
            else:
                assert await wanted == 777
    finally:
        stalls.close()
