import pytest

from workloads.reuse import PrefixCache
from workloads.spec import ArrivalSpec, DocumentsWorkload, generate


@pytest.mark.parametrize("reuse", [0.0, 0.3, 0.9])
def test_the_set_share_of_requests_finds_its_document(reuse):
    workload = DocumentsWorkload(reuse=reuse, document=8192, question=100)
    cache = PrefixCache()
    hits = [
        cache.serve(r) for r in generate(workload, ArrivalSpec(), 2, request_rate=1.0, count=4000)
    ]
    assert set(hits) <= {0, 8192}
    assert sum(hit > 0 for hit in hits) / 4000 == pytest.approx(reuse, abs=0.02)


def test_questions_are_never_shared_and_old_documents_are_forgotten():
    workload = DocumentsWorkload(reuse=0.5, live_documents=3, document=1300, question=500, skew=0)
    found = list(generate(workload, ArrivalSpec(), 2, request_rate=1.0, count=500))
    assert all(len(r.block_ids) == 4 for r in found)
    own = [block for r in found for block in r.block_ids[2:]]
    assert len(own) == len(set(own))
    order = list(dict.fromkeys(r.block_ids[:2] for r in found))
    newest = -1
    for r in found:
        rank = order.index(r.block_ids[:2])
        newest = max(newest, rank)
        assert newest - rank < 3


def test_skew_prefers_the_newest():
    def share(skew):
        workload = DocumentsWorkload(reuse=0.9, skew=skew, document=600, question=50)
        found = list(generate(workload, ArrivalSpec(), 2, request_rate=1.0, count=3000))
        newest, hits = None, 0
        seen = set()
        for r in found:
            document = r.block_ids[0]
            hits += document == newest and document in seen
            if document not in seen:
                newest = document
                seen.add(document)
        return hits / 3000

    assert share(2.0) > 0.4 > 0.1 > share(0.0)
