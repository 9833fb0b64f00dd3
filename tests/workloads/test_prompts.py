import hashlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.errors import InputError
from workloads.prompts import prompt_tokens
from workloads.request import Request
from workloads.reuse import PrefixCache
from workloads.scaling import TokenScale
from workloads.traces.readers import open_trace

VOCAB = 1000
MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


def prompt(tokens, ids=(), block=0, number=0, **options):
    request = Request(number, 0.0, tokens, 1, tuple(ids), block)
    return prompt_tokens(request, VOCAB, 1, **options)


def test_shape_type_and_range():
    found = prompt(10_000, first_id=5)
    assert (found.shape, found.dtype) == ((10_000,), np.int32)
    assert (found.min(), found.max()) == (5, VOCAB - 1)


def test_a_prompt_that_fits_no_memory_is_refused(monkeypatch):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 22}
    monkeypatch.setattr("workloads.prompts.os.sysconf", sizes.get)
    with pytest.raises(InputError, match=r"2147483647 tokens takes about 137 GB"):
        prompt(2**31 - 1)


def test_content_depends_on_the_block_id_only():
    a = prompt(24, (7, 8, 9), 8, number=1)
    b = prompt(24, (7, 8, 4), 8, number=2, worker=3)
    assert (a[:16] == b[:16]).all() and (a[16:] != b[16:]).any()


def test_a_partial_block_is_a_prefix_of_its_whole():
    assert (prompt(20, (7, 8, 9), 8) == prompt(24, (7, 8, 9), 8)[:20]).all()


def test_a_tail_without_an_id_is_unique():
    a, b = prompt(24, (7, 8), 8, number=1), prompt(24, (7, 8), 8, number=2)
    assert (a[:16] == b[:16]).all() and (a[16:] != b[16:]).any()


def test_four_workers_with_one_seed_make_400_distinct_prompts():
    made = {
        prompt(64, number=number, worker=worker).tobytes()
        for worker in range(4)
        for number in range(100)
    }
    assert len(made) == 400


def test_another_seed_makes_other_prompts():
    request = Request(0, 0.0, 64, 1, (1, 2), 32)
    assert (prompt_tokens(request, VOCAB, 1) != prompt_tokens(request, VOCAB, 2)).any()


def test_ids_may_be_any_64_bit_number():
    assert prompt(4, (2**64 - 1, -3), 2).shape == (4,)


def test_vocabulary_must_leave_a_choice():
    with pytest.raises(InputError, match="vocab_size"):
        prompt_tokens(Request(0, 0.0, 4, 1), 3, 0, first_id=2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=2, max_size=12))
def test_prompts_reproduce_prefix_reuse_block_by_block(paths):
    """A cache keyed by tokens hits exactly as one keyed by ids does, also when scaled."""
    names: dict[tuple[int, ...], int] = {}
    by_id, held = PrefixCache(), set()
    for number, path in enumerate(paths):
        chain = tuple(
            names.setdefault(tuple(path[: depth + 1]), len(names)) for depth in range(len(path))
        )
        whole = Request(number, 0.0, len(path) * 512, 64, chain, 512)
        small = TokenScale(64).request(whole)
        tokens = prompt_tokens(small, VOCAB, 0)
        size = small.block_tokens
        ends = range(size, len(tokens) + 1, size)
        depth = 0
        for end in ends:
            if end > len(tokens) - 1 or tokens[:end].tobytes() not in held:
                break
            depth = end
        assert depth == by_id.serve(small)
        held.update(tokens[:end].tobytes() for end in ends)


@pytest.mark.skipif(not MOONCAKE.is_file(), reason="needs the real traces beside the checkout")
def test_prompts_of_a_real_trace_have_its_reuse():
    scale, by_id, held = TokenScale(64), PrefixCache(), set()
    for request in islice(open_trace(MOONCAKE), 2000):
        small = scale.request(request)
        digest, prefixes = hashlib.blake2b(digest_size=8), []
        tokens = prompt_tokens(small, VOCAB, 0)
        for start in range(0, len(tokens) - 7, 8):
            digest.update(tokens[start : start + 8].tobytes())
            prefixes.append(digest.digest())
        limit = (len(tokens) - 1) // 8
        depth = next((n for n, p in enumerate(prefixes[:limit]) if p not in held), limit)
        assert depth * 8 == by_id.serve(small)
        held.update(prefixes)
