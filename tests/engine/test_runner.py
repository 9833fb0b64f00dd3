"""Scheduler, pool and model together: hits equal cold runs, whatever was freed, cut or mixed.

Freed memory is NaN in these tests, and the shapes have d_k != d_v.
"""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

import torch

from engine.cache.figures import Group
from engine.scheduler import Limits
from engine.sequence import Sampling, Sequence

PAGE = 16
TOLERANCE = {"atol": 2e-4, "rtol": 0}


def prompt_of(length: int, seed: int = 0, shared: int = 0) -> list[int]:
    common, own = random.Random(99), random.Random(seed)
    return [common.randrange(256) for _ in range(shared)] + [
        own.randrange(256) for _ in range(length - shared)
    ]


def cold_logits(engine, model, prompt):
    one = engine(model)
    one.generate(prompt, 1)
    return one.logits[-1][0]


@pytest.mark.parametrize("model", ["tiny", "tiny-7to1"])
@pytest.mark.parametrize("length", [97, 98, 113, 160, 200])
def test_a_hit_gives_the_logits_of_a_cold_run(model, length, engine):
    """Among them one-token tails behind a hit (97 = 96 + 1)."""
    warm = engine(model)
    warm.generate(prompt_of(130, 1, shared=96), 2)
    prompt = prompt_of(length, 2, shared=96)
    before = warm.pool.figures()[Group.STATE].hit_tokens
    warm.generate(prompt, 1)
    assert warm.pool.figures()[Group.STATE].hit_tokens - before == 96
    torch.testing.assert_close(warm.logits[-1][0], cold_logits(engine, model, prompt), **TOLERANCE)


@pytest.mark.parametrize("model", ["tiny", "tiny-7to1"])
def test_chunks_across_checkpoints_equal_one_shot(model, engine):
    prompt = prompt_of(150)
    expected = cold_logits(engine, model, prompt)
    for step_tokens in (16, 48, 100):
        cut = engine(model, limits=Limits(step_tokens=step_tokens), interval_blocks=1)
        cut.generate(prompt, 1)
        assert len(cut.logits) == -(-150 // (step_tokens // PAGE * PAGE))
        torch.testing.assert_close(cut.logits[-1][0], expected, **TOLERANCE)
    passes = engine(model, limits=Limits(one_prompt=True), forward_tokens=32)
    passes.generate(prompt, 1)
    torch.testing.assert_close(passes.logits[-1][0], expected, **TOLERANCE)


def test_warm_sequences_in_one_batch_mixed_with_decode(engine):
    warm = engine()
    warm.generate(prompt_of(140, 1, shared=96), 1)
    decoding = Sequence("d", prompt_of(20, 7), 30)
    warm.scheduler.add(decoding)
    warm.step()
    lengths = (97, 100, 128, 131)
    mixed = [Sequence(str(n), prompt_of(n, n, shared=96), 3) for n in lengths]
    mixed.append(Sequence("cold", prompt_of(50, 5), 3))
    for sequence in mixed:
        warm.scheduler.add(sequence)
    step = warm.scheduler.schedule()
    assert len(step.items) == 6 and sum(item.source_slot > 0 for item in step.items) == 4
    warm.scheduler.complete(step, warm.runner.execute(step))
    rows = warm.logits[-1]
    for item, row in zip(step.items, rows, strict=True):
        tokens = item.sequence.tokens[: item.stop]
        torch.testing.assert_close(row, cold_logits(engine, "tiny", tokens), **TOLERANCE)
    while len(warm.scheduler):
        warm.step()
    for sequence in (decoding, *mixed):
        prompt = sequence.tokens[: sequence.prompt_tokens]
        assert sequence.tokens == prompt + engine().generate(prompt, sequence.max_tokens)


@pytest.mark.parametrize("tail", [1, 2, 3])
def test_a_tail_shorter_than_the_convolution_leaves_the_shared_block_as_it_is(tail, engine):
    warm = engine()
    warm.generate(prompt_of(96, 1, shared=96), 1)
    before = warm.storage.buffer.clone()
    # Sharing 96 tokens; the checkpoint at 64 or 96 is only read.
    warm.generate(prompt_of(96 + tail, 2, shared=96), 1)
    changed = (before != warm.storage.buffer).nonzero().flatten()
    layout = warm.storage.layout
    blocks = list(warm.pool._blocks.values())
    shared = [b.page for b in blocks[:6]]
    for layer, latents in layout.latents.items():
        for page in shared:
            first = latents.offset + page * latents.row_bytes
            inside = (changed >= first) & (changed < first + latents.row_bytes)
            assert not inside.any(), (layer, page)
    for arrays in (layout.state, layout.conv):
        for array in arrays.values():
            for block in blocks[:4]:
                if block.slot > 0:
                    first = array.offset + block.slot * array.row_bytes
                    assert not ((changed >= first) & (changed < first + array.row_bytes)).any()


def test_a_reused_slot_does_not_carry_the_request_before(engine):
    fresh = engine(pages=12, slots=2)
    expected = engine().generate(prompt_of(60, 2), 8)
    for seed in (1, 3, 4):
        fresh.generate(prompt_of(70, seed), 8)
    assert fresh.generate(prompt_of(60, 2), 8) == expected
    assert all(torch.isfinite(rows).all() for rows in fresh.logits)


def test_a_preempted_request_goes_on_as_if_uninterrupted(engine):
    tight = engine(pages=10, slots=8, interval_blocks=1)
    sampling = Sampling(temperature=0.8, seed=11)
    sequences = [Sequence(str(n), prompt_of(33, n), 40, sampling=sampling) for n in range(3)]
    for sequence in sequences:
        tight.scheduler.add(sequence)
    while len(tight.scheduler):
        tight.step()
    assert tight.scheduler.preemptions > 0
    for n, sequence in enumerate(sequences):
        assert sequence.tokens[33:] == engine().generate(prompt_of(33, n), 40, sampling)


def test_tenants_never_share(engine):
    one = engine()
    prompt = prompt_of(100)
    expected = one.generate(prompt, 4, tenant="a")
    assert one.generate(prompt, 4, tenant="b") == expected
    assert one.pool.figures()[Group.KV].hit_tokens == 0
    assert one.generate(prompt, 4, tenant="a") == expected
    assert one.pool.figures()[Group.KV].hit_tokens > 0


def test_seeded_sampling_draws_from_the_softmax():
    from engine.sampling import sample

    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(4000, 3)
    drawn = sample(logits, [Sampling(1.0, 5)] * 4000, range(4000))
    shares = [drawn.count(token) / 4000 for token in range(3)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    assert sample(logits, [Sampling()] * 4000, range(4000)) == [0] * 4000
    assert drawn == sample(logits, [Sampling(1.0, 5)] * 4000, range(4000))
