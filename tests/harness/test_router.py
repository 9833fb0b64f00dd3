"""The router's promise: one end for each request, and accounting that returns to zero."""

import asyncio
from dataclasses import dataclass, field

from harness import clock
from harness.policies.base import Decision, NoRoute
from harness.ports import (
    DecodeDone,
    DecodeJob,
    InstanceLost,
    InstanceSpec,
    PrefillDone,
    PrefillJob,
    RequestRejected,
    Role,
    TransferFailed,
)
from harness.router import RetryRules, Router
from harness.topology import build_view
from harness.view import View
from results.records import RequestRecord, Status
from workloads.request import Request

SPECS = [
    InstanceSpec("pd-0", "pd", Role.PREFILL, "p"),
    InstanceSpec("pd-1", "pd", Role.PREFILL, "p"),
    InstanceSpec("pd-2", "pd", Role.DECODE, "p"),
]


@dataclass
class FakeInstance:
    """Fails the first `failures` calls with `error`, then serves in 1 ms."""

    spec: InstanceSpec
    failures: int = 0
    error: Exception | None = None
    abandoned: list[tuple[int, int]] = field(default_factory=list)

    @property
    def role(self) -> Role:
        return self.spec.role

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error

    async def prefill(self, job: PrefillJob) -> PrefillDone:
        now_s = asyncio.get_running_loop().time()
        self._fail()
        await asyncio.sleep(0.001)
        return PrefillDone(now_s, now_s + 0.001, now_s + 0.001, 42, 7)

    async def decode(self, job: DecodeJob) -> DecodeDone:
        now_s = asyncio.get_running_loop().time()
        self._fail()
        return DecodeDone(now_s, [(now_s, 0.5, 10)], [7] * 10)

    def abandon(self, request: Request, attempt: int) -> None:
        self.abandoned.append((request.id, attempt))

    async def drain(self) -> None: ...

    async def convert(self, role: Role) -> None: ...


class LeastWait:
    name = "least-wait"

    def route(self, request: Request, view: View) -> Decision:
        key, decode_key = view.prefill["pd"].least(), view.decode["pd"].least()
        if key < 0 or decode_key < 0:
            raise NoRoute("no usable instance")
        return Decision("pd", key, "pd", decode_key, 0.001)


class Work:
    def prefill_s(self, input_tokens: int, cached_tokens: int = 0) -> float:
        return 0.001


def build(**faults: tuple[int, Exception]) -> tuple[Router, View, dict[str, FakeInstance]]:
    instances = {spec.name: FakeInstance(spec) for spec in SPECS}
    for name, (failures, error) in faults.items():
        instances[name].failures, instances[name].error = failures, error
    view = build_view(SPECS, {"pd": Work()}, {})
    return Router(LeastWait(), view, instances, {}, RetryRules(3, 0.001)), view, instances


async def serve(router: Router) -> RequestRecord:
    record = RequestRecord(1, 0.0, 100, 10)
    await router.serve(Request(1, 0.0, 100, 10), record, asyncio.get_running_loop().time())
    return record


def assert_idle(view: View) -> None:
    assert view.prefill["pd"].queued == [0, 0]
    assert view.decode["pd"].active(0) == 0


async def test_a_request_succeeds_with_all_its_times() -> None:
    router, view, instances = build()
    record = await serve(router)
    assert record.status is Status.SUCCEEDED
    assert (record.attempts, record.tokens_received, record.token_ids) == (1, 10, [7] * 10)
    assert record.last_token_s - record.first_token_s == 4.5
    assert record.prefill_started_s <= record.prefill_finished_s <= record.delivered_s
    assert_idle(view)
    assert all(not instance.abandoned for instance in instances.values())


async def test_a_lost_prefill_is_retried_and_leaves_nothing() -> None:
    router, view, instances = build(**{"pd-0": (1, InstanceLost("pd-0", "gone"))})
    record = await serve(router)
    assert (record.status, record.attempts) == (Status.SUCCEEDED, 2)
    assert instances["pd-0"].abandoned == [(1, 1)]
    assert instances["pd-2"].abandoned == [(1, 1)]
    assert_idle(view)


async def test_a_lost_decode_recomputes_from_the_prompt() -> None:
    router, view, _ = build(**{"pd-2": (1, TransferFailed("half a cache"))})
    record = await serve(router)
    assert (record.status, record.attempts) == (Status.SUCCEEDED, 2)
    assert_idle(view)


async def test_attempts_are_bounded_and_the_reason_is_kept() -> None:
    router, view, _ = build(**{"pd-2": (99, InstanceLost("pd-2", "gone"))})
    record = await serve(router)
    assert (record.status, record.attempts) == (Status.FAILED, 3)
    assert record.failure == "InstanceLost: pd-2: gone"
    assert_idle(view)


async def test_a_rejection_is_final() -> None:
    router, view, _ = build(**{"pd-0": (99, RequestRejected("too long"))})
    record = await serve(router)
    assert (record.status, record.attempts) == (Status.FAILED, 1)
    assert_idle(view)


async def test_no_usable_instance_fails_visibly() -> None:
    router, view, _ = build()
    view.decode["pd"].set_usable(0, False)
    record = await serve(router)
    assert (record.status, record.failure) == (Status.FAILED, "NoRoute: no usable instance")


async def test_an_instance_that_is_down_gets_no_work() -> None:
    router, view, _ = build()
    view.prefill["pd"].set_usable(0, False)
    record = await serve(router)
    assert record.prefill_instance == "pd-1"


async def test_cancellation_releases_the_accounting() -> None:
    router, view, instances = build()
    record = RequestRecord(1, 0.0, 100, 10)
    task = asyncio.ensure_future(
        router.serve(Request(1, 0.0, 100, 10), record, asyncio.get_running_loop().time())
    )
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (record.status, record.failure) == (Status.FAILED, "cancelled")
    assert instances["pd-0"].abandoned == [(1, 1)]
    assert_idle(view)


class Dying(FakeInstance):
    """Dies under each request, and the view hears of it; is back after `down_s`, if that is
    said."""

    def __init__(self, spec: InstanceSpec, view: View, down_s: float | None = None) -> None:
        super().__init__(spec)
        self.view, self.down_s, self.deaths = view, down_s, 0

    async def prefill(self, job: PrefillJob) -> PrefillDone:
        self.deaths += 1
        self.view.set_lost(self.spec.name, True)
        if self.down_s is not None:
            asyncio.get_running_loop().call_later(
                self.down_s, self.view.set_lost, self.spec.name, False
            )
        raise InstanceLost(self.spec.name, "died")


def dying(n_prefill: int, rules: RetryRules, down_s: float | None = None, good: int = 0) -> Router:
    """`n_prefill` instances that die under their work, chosen before `good` ones that do not."""
    specs = [InstanceSpec(f"pd-{i}", "pd", Role.PREFILL, "p") for i in range(n_prefill + good)]
    decode = InstanceSpec("pd-d", "pd", Role.DECODE, "p")
    view = build_view([*specs, decode], {"pd": Work()}, {})
    instances = {spec.name: Dying(spec, view, down_s) for spec in specs[:n_prefill]}
    instances |= {spec.name: FakeInstance(spec) for spec in [*specs[n_prefill:], decode]}
    return Router(LeastWait(), view, instances, {}, rules)


async def test_an_attempt_whose_instance_is_lost_does_not_count() -> None:
    record = await serve(dying(5, RetryRules(2, 0.001), good=1))
    assert (record.status, record.attempts) == (Status.SUCCEEDED, 6)


async def test_a_failure_that_is_nobodys_death_counts_among_deaths() -> None:
    router = dying(3, RetryRules(2, 0.001), good=1)
    good = router._instances["pd-3"]
    good.failures, good.error = 99, InstanceLost("pd-3", "draining")
    record = await serve(router)
    assert (record.status, record.attempts) == (Status.FAILED, 5)
    assert record.failure == "InstanceLost: pd-3: draining"


async def test_without_patience_nobody_waits_for_the_lost() -> None:
    record = await serve(dying(1, RetryRules(3, 0.001), down_s=0.05))
    assert (record.status, record.failure) == (Status.FAILED, "NoRoute: no usable instance")
    assert record.attempts == 4


def test_a_lost_instance_is_waited_for_as_long_as_patience_lasts() -> None:
    async def scenario() -> None:
        router = dying(1, RetryRules(1, 0.001, patience_s=0.5), down_s=0.1)
        record = await serve(router)
        assert (record.status, record.failure) == (Status.FAILED, "NoRoute: no usable instance")
        # It dies at once, and then whenever it is back: about every 0.1 s.
        deaths = router._instances["pd-0"].deaths
        assert deaths == 6 and record.attempts == 2 * deaths + 1
        assert 0.5 <= asyncio.get_running_loop().time() < 0.6

    clock.run(scenario())


def test_the_lost_are_waited_for_and_then_serve() -> None:
    async def scenario() -> None:
        router = dying(1, RetryRules(1, 0.001, patience_s=5.0), down_s=0.02)

        async def heal() -> None:
            await asyncio.sleep(0.01)
            router._instances["pd-0"] = FakeInstance(SPECS[0])

        healing = asyncio.ensure_future(heal())
        record = await serve(router)
        await healing
        assert record.status is Status.SUCCEEDED
        assert record.attempts == 3  # died, found nobody, served

    clock.run(scenario())
