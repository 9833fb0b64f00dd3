"""A remote instance that is lost: what is asked of it fails as that, whatever became of its
connection."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from harness.instances.remote import DataAddress, RemoteInstance
from harness.ports import DecodeJob, InstanceLost, InstanceSpec, PrefillDone, Role
from workloads.request import Request

REQUEST = Request(1, 0.0, 100, 10)


async def start(handler=None, on_silent=None):
    """A worker that answers /decode by `handler`, and the instance that speaks to it."""
    app = web.Application()

    async def healthy(_):
        return web.json_response({"state": "ready"})

    app.router.add_get("/health", healthy)
    if handler is not None:
        app.router.add_post("/decode", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    session = aiohttp.ClientSession(f"http://{host}:{port}")
    spec = InstanceSpec("pd-1", "pd", Role.DECODE, "")
    address = DataAddress("127.0.0.1", 1, 1)
    instance = RemoteInstance(
        spec, session, address, None, lambda request: ([1] * 100, 10), 8, on_silent
    )
    return instance, session, runner


def decode(instance):
    return instance.decode(DecodeJob(REQUEST, 1, PrefillDone(0.0, 0.0, 0.0, 0)))


async def test_a_lost_instance_with_a_closed_session_is_lost():
    instance, session, runner = await start()
    instance.mark_lost("killed")
    await session.close()
    with pytest.raises(InstanceLost, match="killed"):
        await decode(instance)
    instance.abandon(REQUEST, 1)
    await runner.cleanup()


async def test_a_session_that_is_closed_for_the_heir_while_it_is_asked_is_a_loss():
    instance, session, runner = await start()
    asking = asyncio.ensure_future(instance.audit_rows())
    await asyncio.sleep(0)  # the question is about to be asked
    instance.mark_lost("killed")
    await session.close()
    with pytest.raises(InstanceLost, match="killed"):
        await asking
    await runner.cleanup()


async def test_a_connection_that_breaks_is_looked_into_and_a_dead_worker_is_lost_at_once():
    heard = []

    async def handler(request):
        request.transport.close()
        await runner.cleanup()  # nobody listens any more

    instance, session, runner = await start(handler, heard.append)
    with pytest.raises(InstanceLost):
        await decode(instance)
    assert heard == ["no answer within 3 s"]
    await session.close()


async def test_a_connection_that_breaks_under_a_worker_that_lives_is_no_loss():
    heard = []

    async def handler(request):
        request.transport.close()

    instance, session, runner = await start(handler, heard.append)
    with pytest.raises(InstanceLost):
        await decode(instance)
    assert heard == [] and not instance.lost
    await session.close()
    await runner.cleanup()
