"""What forward passes leave in a worker's memory: prompts of mixed length, one after the other.

    python benchmarks/memory.py [--passes 2000] [--trim 20]
    MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072 python benchmarks/memory.py

Prints, for each quarter of the passes, the least and most MiB between two of them: `held` is what
the process has (RssAnon), `in use` what its allocators have handed out and not got back
(`engine.in_use`), `kept` what the C library keeps of the rest. As in a worker the passes run in a
thread of their own, which has an arena of its own. glibc on Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import threading
import time
from pathlib import Path

import torch

from engine.in_use import in_use_bytes, kept_bytes
from engine.model.batch import ForwardBatch, Piece
from engine.worker.loading import load_engine
from engine.worker.options import WorkerOptions

MIB = 2**20
PAGE_TOKENS = 8
LONGEST = 4000
NAMES = ("held", "in use", "kept")


def _held_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=2000, metavar="N", help="4 or more")
    parser.add_argument("--trim", type=int, default=0, metavar="N", help="trim each N passes")
    options = parser.parse_args()
    passes = options.passes
    if passes < 4 or options.trim < 0:
        parser.error("--passes needs 4 or more, --trim 0 (never) or more")
    if kept_bytes() is None:
        parser.error("glibc 2.33 or newer is needed")
    trim = ctypes.CDLL(None).malloc_trim
    engine = load_engine(
        WorkerOptions(
            socket=None,
            listen=None,
            model="bench",
            dtype="float32",
            page_tokens=PAGE_TOKENS,
            pages=-(-LONGEST // PAGE_TOKENS),
            slots=2,
        )
    )
    rows: list[tuple[float, float, float]] = []
    dice = random.Random(2)

    def compute() -> None:
        spent_s, tokens = 0.0, 0
        for _ in range(passes):
            length = min(LONGEST, max(16, int(dice.lognormvariate(5.5, 1.0))))
            prompt = dice.choices(range(engine.model.config.vocab), k=length)
            piece = Piece(prompt, 0, 1, range(1, 1 - -length // PAGE_TOKENS))
            begun_s = time.thread_time()
            with torch.inference_mode():
                batch = ForwardBatch.build([piece], PAGE_TOKENS, engine.storage.device)
                engine.model.forward(batch, engine.storage, None)
            if options.trim and len(rows) % options.trim == options.trim - 1:
                trim(0)
            spent_s, tokens = spent_s + time.thread_time() - begun_s, tokens + length
            now = _held_bytes(), in_use_bytes() or 0, kept_bytes() or 0
            rows.append((now[0] / MIB, now[1] / MIB, now[2] / MIB))
        print(f"{tokens:,} tokens, {spent_s * 1e6 / tokens:.1f} us of CPU a token")

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    size = passes // 4
    for quarter in range(4):
        of_quarter = rows[quarter * size : (quarter + 1) * size]
        spans = (f"{min(each):.1f} to {max(each):.1f}" for each in zip(*of_quarter, strict=True))
        print("  ".join(f"{name} {span}" for name, span in zip(NAMES, spans, strict=True)))


if __name__ == "__main__":
    main()
