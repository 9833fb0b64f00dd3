"""The asyncio client with real data plane processes on loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.transport.client import Callbacks, DataPlane
from engine.transport.errors import PlaneLost, TransferFailed, TransferRefused
from engine.transport.frames import HEADER_BYTES, ROW_BYTES
from engine.transport.messages import Key
from engine.transport.outbound import Peer
from engine.transport.regions import Kind, Range, Region
from engine.transport.settings import Settings

MIB = 1 << 20


async def test_layer_wise_transfer_arrives_whole(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    manifest, key = bench.manifest(), Key("r1", 1)
    transfer = await sender.open(Peer(*receiver.address), key, manifest)
    for region, where in bench.layout(manifest).items():
        half = where.length // 2
        transfer.push(region, [Range(where.offset, half)])
        await asyncio.sleep(0)
        transfer.push(region, [Range(where.offset + half, where.length - half)])
    stats = await transfer.commit(first_token=7, meta={"note": "x"})
    bench.assert_arrived(decoder, key, manifest)
    assert decoder.committed[key].first_token == 7
    assert decoder.committed[key].meta == {"note": "x"}
    assert decoder.committed[key].manifest == manifest
    assert stats.resent == 0
    assert manifest.total_bytes < stats.wire_bytes < manifest.total_bytes * 1.01
    assert decoder.aborted == []


@pytest.mark.parametrize("codecs", [{}, {Kind.STATE: "bf16"}])
async def test_small_layers_share_frames_whatever_memory_and_codec_they_have(
    bench: Any, codecs: dict
) -> None:
    """Regions of several ranges at the receiver, some of which cross at half their size."""
    import numpy

    decoder, receiver = await bench.decoder()
    decoder.block = 8192
    decoder.free = list(range(0, decoder.arena.size_bytes, 8192))
    sender = await bench.sender()
    layers, state_bytes = 60, 12_288
    manifest = bench.manifest(layers, kv=20_000, state=state_bytes, codecs=codecs)
    # Whole numbers of few bits: bf16 carries them exactly.
    values = numpy.frombuffer(bench.source.buffer, numpy.float32)
    values[:] = numpy.random.default_rng(0).integers(0, 100, len(values))
    stats = await bench.send(sender, Peer(*receiver.address), Key("r"), manifest)
    bench.assert_arrived(decoder, Key("r"), manifest)
    saved = layers // 2 * state_bytes // 2 if codecs else 0
    bodies = manifest.total_bytes - saved
    assert bodies + layers * ROW_BYTES <= stats.wire_bytes < bodies + layers * HEADER_BYTES


async def test_audit_rows_agree(bench: Any) -> None:
    _, receiver = await bench.decoder()
    sender = await bench.sender()
    manifest = bench.manifest(2)
    await bench.send(sender, Peer(*receiver.address), Key("r"), manifest)
    (sent,) = sender.audit_rows()
    received: list[dict] = []
    await bench.until(lambda: received.extend(receiver.audit_rows()) or received)
    assert (sent["direction"], received[0]["direction"]) == ("sent", "received")
    for name in ("request_id", "attempt", "tenant", "bytes", "digest", "n_tokens", "held_tokens"):
        assert sent[name] == received[0][name]
    assert sent["bytes"] == manifest.total_bytes
    assert sent["wire_bytes"] > manifest.total_bytes
    assert received[0]["wire_bytes"] is None
    assert sent["peer_incarnation"] == receiver.settings.incarnation
    assert received[0]["peer_incarnation"] == sender.settings.incarnation


async def test_bf16_state_crosses_at_half_size(bench: Any) -> None:
    import numpy

    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    manifest = bench.manifest(2, kv=4096, state=2 * MIB, codecs={Kind.STATE: "bf16"})
    where = bench.layout(manifest)
    state = manifest.regions[1].region
    values = numpy.frombuffer(bench.source.buffer, numpy.float32)[1024 : 1024 + MIB // 2]
    values[:] = numpy.random.default_rng(0).standard_normal(MIB // 2)
    assert where[state].offset == 4096
    stats = await bench.send(sender, Peer(*receiver.address), Key("r"), manifest)
    got = numpy.frombuffer(decoder.content(Key("r"), state), numpy.float32)
    assert numpy.abs(got / values - 1).max() <= 2**-8
    assert stats.wire_bytes < MIB + 4096 + 1000


async def test_refusals(bench: Any) -> None:
    decoder, receiver = await bench.decoder(4 * MIB)
    sender = await bench.sender()
    other = await DataPlane.start(bench.source, Settings(incarnation=9, layout="u"))
    with pytest.raises(TransferRefused, match="no blocks"):
        await sender.open(Peer(*receiver.address), Key("big"), bench.manifest())
    with pytest.raises(TransferRefused, match="layout 'u'"):
        await other.open(Peer(*receiver.address), Key("x"), bench.manifest())
    with pytest.raises(TransferFailed, match="restarted"):
        await sender.open(Peer(*receiver.address, 99), Key("y"), bench.manifest())
    with pytest.raises(TransferRefused, match="takes no caches"):
        await other.open(Peer(*other.address), Key("z"), bench.manifest())
    await other.close()
    assert len(decoder.free) == decoder.blocks


async def test_destinations_are_checked_before_the_grant(bench: Any) -> None:
    decoder, _ = await bench.decoder()

    async def wrong(key: Key, manifest: Any) -> Any:
        regions = await decoder.on_offer(key, manifest)
        regions[manifest.regions[0].region] = [Range(0, 5)]
        return regions

    receiver = await DataPlane.start(
        decoder.arena,
        Settings(incarnation=9, layout="t"),
        Callbacks(wrong, decoder.on_commit, lambda key: decoder.aborted.append(key)),
    )
    sender = await bench.sender()
    with pytest.raises(TransferRefused, match="5 bytes reserved for"):
        await sender.open(Peer(*receiver.address), Key("r"), bench.manifest())
    assert decoder.aborted == [Key("r")]
    await receiver.close()


async def test_plain_tcp_beyond_loopback_must_be_asked_for(bench: Any) -> None:
    with pytest.raises(PlaneLost, match="plain TCP on"):
        await bench.plane(bench.source, host="0.0.0.0")
    await bench.plane(bench.source, host="0.0.0.0", allow_plain=True)


async def test_misuse_is_found_in_the_worker(bench: Any) -> None:
    decoder, receiver = await bench.decoder()
    sender = await bench.sender()
    manifest = bench.manifest(2)
    region = manifest.regions[1].region
    transfer = await sender.open(Peer(*receiver.address), Key("r"), manifest)
    transfer.push(region, [Range(0, 5)])
    with pytest.raises(ValueError, match="3149824 bytes were not pushed"):
        await transfer.commit()
    with pytest.raises(ValueError, match="262144 bytes pushed, 262139 are missing"):
        transfer.push(region, [Range(0, 256 * 1024)])
    with pytest.raises(ValueError, match="beyond the arena"):
        transfer.push(region, [Range(16 * MIB - 1, 2)])
    with pytest.raises(ValueError, match="not in the manifest"):
        transfer.push(Region(7, Kind.KV), [Range(0, 1)])
    assert await transfer.cancel() is False
    await bench.until(lambda: decoder.aborted == [Key("r")])
    await bench.send(sender, Peer(*receiver.address), Key("r", 1), manifest)
