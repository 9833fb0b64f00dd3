from collections import defaultdict
from itertools import pairwise

import pytest

from workloads.reuse import PrefixCache
from workloads.spec import ArrivalSpec, SessionsWorkload, generate

WORKLOAD = SessionsWorkload(mean_turns=4, system_tokens=1300, output_tokens=300)


@pytest.fixture(scope="module")
def requests():
    return list(generate(WORKLOAD, ArrivalSpec(), 11, request_rate=3.0, count=4000))


def by_session(requests):
    sessions = defaultdict(list)
    for request in requests:
        sessions[request.session].append(request)
    return sessions


def test_each_turn_extends_the_chain_of_the_last(requests):
    turns = 0
    for session in by_session(requests).values():
        for before, after in pairwise(session):
            turns += 1
            full = before.input_tokens // 512
            assert after.block_ids[:full] == before.block_ids[:full]
            assert after.input_tokens >= before.input_tokens + 300 + 8
            assert after.arrival_s >= before.arrival_s + WORKLOAD.response_s
            if before.input_tokens % 512:
                assert before.block_ids[-1] not in after.block_ids
    assert turns > 2000


def test_sessions_share_the_whole_blocks_of_the_system_prompt_only(requests):
    firsts = [session[0] for session in by_session(requests).values()]
    assert len({r.block_ids[:2] for r in firsts}) == 1
    rest = [block for r in firsts for block in r.block_ids[2:]]
    assert len(rest) == len(set(rest))


def test_request_rate_is_reached_after_a_warm_start():
    cold = list(generate(WORKLOAD, ArrivalSpec(), 1, request_rate=3.0, duration_s=600))
    warm_workload = WORKLOAD.model_copy(update={"warm_s": 1500.0})
    warm = list(generate(warm_workload, ArrivalSpec(), 1, request_rate=3.0, duration_s=600))
    assert len(warm) / 600 == pytest.approx(3.0, rel=0.1)
    assert len(cold) < 0.9 * len(warm)


def test_reuse_is_what_the_chains_say(requests):
    cache = PrefixCache()
    for request in requests:
        hit = cache.serve(request)
        assert hit % 512 == 0 and hit < request.input_tokens
    sessions = by_session(requests)
    session = max(sessions.values(), key=len)
    cache = PrefixCache()
    hits = [cache.serve(request) for request in session]
    assert hits[0] == 0
    for hit, before in zip(hits[1:], session, strict=False):
        assert hit == before.input_tokens // 512 * 512


def test_a_session_ends_before_the_longest_prompt():
    workload = SessionsWorkload(mean_turns=40, max_input_tokens=5000, first_message=8000)
    found = list(generate(workload, ArrivalSpec(), 0, request_rate=1.0, count=50))
    assert {r.input_tokens for r in found} == {5000}
