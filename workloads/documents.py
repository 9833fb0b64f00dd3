"""Questions about shared documents, with a set share of requests that find theirs known."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from workloads.draws import BlockIds, endless
from workloads.kinds import DocumentsWorkload
from workloads.request import Request


def document_requests(
    workload: DocumentsWorkload,
    times_s: Iterator[float],
    lengths: np.random.Generator,
    outputs: np.random.Generator,
    choices: np.random.Generator,
) -> Iterator[Request]:
    """One request for each arrival time. Ids are not final.

    Only whole blocks of a document are shared: the block in which the question starts is its own.
    """
    document_rng, question_rng = lengths.spawn(2)
    documents = endless(workload.document, document_rng, workload.stratified)
    questions = endless(workload.question, question_rng)
    answers = endless(workload.output_tokens, outputs)
    size = workload.block_tokens
    ids = BlockIds()
    popularity = np.cumsum(np.arange(1, workload.live_documents + 1.0) ** -workload.skew)
    live: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=workload.live_documents)
    for arrival_s in times_s:
        known, which = choices.random(2).tolist()
        if live and known < workload.reuse:
            rank = int(np.searchsorted(popularity[: len(live)], which * popularity[len(live) - 1]))
            tokens, chain = live[-1 - rank]
        else:
            tokens = next(documents)
            chain = ids.take(tokens // size)
            live.append((tokens, chain))
        total = tokens + next(questions)
        own = ids.take(-(-total // size) - len(chain))
        yield Request(0, arrival_s, total, next(answers), chain + own, size)
