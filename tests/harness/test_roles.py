"""Changes of role in which the instance dies, at every point on the way."""

import asyncio

import pytest

from harness import clock
from harness.experiment import load_experiment
from harness.fleets.modelled import ModelledFleet, build_fleet, fluid_links
from harness.planner.experiment import deployment_of
from harness.ports import PrefillJob, Role
from harness.schedulers.roles import Roles
from harness.topology import PD, PRFAAS, instance_specs
from workloads.request import Request

PAPER = load_experiment("paper")
DEPLOYMENT = deployment_of(PAPER)
CONVERSION_S = 5.0


def build(n_prefill: int = 2, n_decode: int = 2) -> tuple[ModelledFleet, Roles]:
    configuration = PAPER.configurations[-1].model_copy(
        update={"n_prefill": n_prefill, "n_decode": n_decode}
    )
    profiles = {PRFAAS: DEPLOYMENT.remote, PD: DEPLOYMENT.local}
    fleet = build_fleet(instance_specs(PAPER, configuration), profiles, fluid_links(PAPER.link))
    return fleet, Roles(fleet.view, fleet.instances, PD, CONVERSION_S)


def usable_as(fleet: ModelledFleet, name: str) -> list[Role]:
    view = fleet.view
    pools = {Role.PREFILL: view.prefill[PD], Role.DECODE: view.decode[PD]}
    return [
        role
        for role, pool in pools.items()
        if name in pool.key_of and pool.usable(pool.key_of[name])
    ]


def test_lost_while_it_warms_up_in_its_new_role_it_is_not_used() -> None:
    async def scenario() -> None:
        fleet, roles = build()
        instance = fleet.instances["pd-0"]
        converting = asyncio.ensure_future(roles.convert("pd-0", Role.DECODE))
        await asyncio.sleep(CONVERSION_S / 2)
        assert instance.role is Role.DECODE
        instance.crash()
        assert not await converting
        assert usable_as(fleet, "pd-0") == []
        instance.restart()
        assert usable_as(fleet, "pd-0") == [Role.DECODE]

    clock.run(scenario())


def test_back_before_its_warm_up_is_over_it_waits_for_that() -> None:
    async def scenario() -> None:
        fleet, roles = build()
        instance = fleet.instances["pd-0"]
        converting = asyncio.ensure_future(roles.convert("pd-0", Role.DECODE))
        await asyncio.sleep(CONVERSION_S / 4)
        instance.crash()
        await asyncio.sleep(CONVERSION_S / 4)
        instance.restart()
        assert usable_as(fleet, "pd-0") == []
        assert await converting
        assert usable_as(fleet, "pd-0") == [Role.DECODE]

    clock.run(scenario())


def test_lost_while_it_drains_it_comes_back_in_its_old_role() -> None:
    async def scenario() -> None:
        fleet, roles = build()
        instance = fleet.instances["pd-0"]
        work = instance.prefill(
            PrefillJob(Request(1, 0.0, 27_000, 1), 1, 0, 0, fleet.instances["pd-2"], None, 0.0)
        )
        converting = asyncio.ensure_future(roles.convert("pd-0", Role.DECODE))
        await asyncio.sleep(0.01)
        instance.crash()
        assert not await converting
        assert (await asyncio.gather(work, return_exceptions=True))[0] is not None
        assert usable_as(fleet, "pd-0") == [] and not fleet.view.prefill[PD].away
        instance.restart()
        assert usable_as(fleet, "pd-0") == [Role.PREFILL]

    clock.run(scenario())


@pytest.mark.parametrize("down_s", [1.0, 3.0, 20.0])
def test_a_second_conversion_finds_it_where_the_first_left_it(down_s: float) -> None:
    async def scenario() -> None:
        fleet, roles = build(3, 2)
        instance = fleet.instances["pd-0"]
        converting = asyncio.ensure_future(roles.convert("pd-0", Role.DECODE))
        await asyncio.sleep(CONVERSION_S / 2)
        instance.crash()
        asyncio.get_running_loop().call_later(down_s, instance.restart)
        await converting
        await asyncio.sleep(down_s)
        assert usable_as(fleet, "pd-0") == [Role.DECODE]
        assert await roles.convert("pd-0", Role.PREFILL)
        assert usable_as(fleet, "pd-0") == [Role.PREFILL]
        assert roles.counts() == (3, 2)

    clock.run(scenario())
