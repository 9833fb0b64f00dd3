import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import InputError
from workloads.request import Request
from workloads.scaling import TokenScale


def request(tokens, ids=(), block=0):
    return Request(7, 1.5, tokens, 1024, tuple(ids), block, "s", "t", "c")


def shared(a, b):
    depth = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        depth += 1
    return depth


def test_blocks_of_512_at_64_become_blocks_of_8():
    scaled = TokenScale(64).request(request(27_136, range(53), 512))
    assert scaled == Request(7, 1.5, 424, 16, tuple(range(53)), 8, "s", "t", "c")


def test_tokens_round_up_and_are_at_least_one():
    assert [TokenScale(64).tokens(n) for n in (1, 64, 65, 27_000)] == [1, 1, 2, 422]


def test_small_blocks_are_regrouped_under_the_id_of_their_last():
    scaled = TokenScale(64).request(request(100, range(7), 16))
    assert (scaled.input_tokens, scaled.block_ids, scaled.block_tokens) == (2, (3, 6), 1)
    assert TokenScale(48).request(request(512 * 4, range(4), 512)).block_tokens == 32


def test_a_tail_that_no_block_names_stays_unnamed():
    scaled = TokenScale(64).request(request(120, range(7), 16))
    assert scaled.block_ids == (3,)


def test_scale_one_changes_nothing():
    original = request(1000, range(2), 512)
    assert TokenScale(1).request(original) == original


def test_scale_below_one_is_refused():
    with pytest.raises(InputError, match="token_scale: found 0"):
        TokenScale(0)


@st.composite
def pairs(draw):
    """Two prompts that share exactly `common` blocks of a chain."""
    block = draw(st.integers(1, 64))
    common = draw(st.integers(0, 20))
    out = []
    for first in (1000, 2000):
        own = draw(st.integers(0 if out else 1, 20))
        ids = (*range(common), *range(first, first + own))
        if not ids:
            ids = (first,)
        last = draw(st.integers(1, block))
        out.append(request((len(ids) - 1) * block + last, ids, block))
    return draw(st.integers(1, 96)), common, out[0], out[1]


@given(pairs())
def test_whole_shared_blocks_stay_shared_and_no_sharing_arises(case):
    scale, _, a, b = case
    model = TokenScale(scale)
    before = shared(a.block_ids, b.block_ids)
    x, y = model.request(a), model.request(b)
    group = model.group(a.block_tokens)
    after = shared(x.block_ids, y.block_ids)
    assert before // group <= after <= -(-before // group)
    if before < len(a.block_ids) and before < len(b.block_ids):
        assert after == before // group
    for scaled, original in ((x, a), (y, b)):
        assert scaled.block_tokens * scale == original.block_tokens * group
        assert len(scaled.block_ids) == -(-scaled.input_tokens // scaled.block_tokens)
