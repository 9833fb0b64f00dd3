from hypothesis import given
from hypothesis import strategies as st

from workloads.request import Request
from workloads.reuse import PrefixCache


def request(tokens, ids):
    return Request(0, 0.0, tokens, 1, tuple(ids), 10)


def test_whole_blocks_only_and_never_the_last_token():
    cache = PrefixCache()
    assert cache.serve(request(25, [1, 2, 3])) == 0
    assert cache.hit_tokens(request(25, [1, 2, 3])) == 20
    assert cache.hit_tokens(request(20, [1, 2])) == 10
    assert cache.hit_tokens(request(35, [1, 9, 2, 3])) == 10
    assert cache.hit_tokens(Request(0, 0.0, 50, 1)) == 0


def test_least_recently_used_blocks_go_first_and_tails_before_heads():
    cache = PrefixCache(max_blocks=4)
    cache.serve(request(30, [1, 2, 3]))
    cache.serve(request(20, [7, 8]))
    assert cache.evicted_blocks == 1
    assert cache.hit_tokens(request(31, [1, 2, 3, 4])) == 20
    assert cache.hit_tokens(request(21, [7, 8, 9])) == 20


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=20)


def chains(paths):
    names: dict = {}
    for path in paths:
        ids = [names.setdefault(tuple(path[: n + 1]), len(names)) for n in range(len(path))]
        yield request(len(ids) * 10 + 5, [*ids, -1 - len(names)])


@given(PATHS)
def test_a_bound_that_is_never_reached_changes_nothing(paths):
    free, bounded = PrefixCache(), PrefixCache(max_blocks=1000)
    assert [free.serve(r) for r in chains(paths)] == [bounded.serve(r) for r in chains(paths)]


@given(PATHS, st.integers(1, 6))
def test_a_bounded_cache_never_hits_deeper_nor_holds_more(paths, bound):
    free, bounded = PrefixCache(), PrefixCache(bound)
    for r in chains(paths):
        assert bounded.serve(r) <= free.serve(r)
        assert len(bounded._held) <= bound
