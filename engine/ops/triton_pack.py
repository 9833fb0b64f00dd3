"""Gather pages into token rows and scatter them back, in Triton: one launch, any page order."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A kernel's arguments are typed by the launch.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_TOKENS = 16

_WORDS = {2: torch.int16, 4: torch.int32}
"""Values are moved as integers: a copy must not touch a NaN's payload."""


@triton.jit
def _copy_rows(
    pool, packed, pages, n_tokens,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = token < n_tokens
    column = tl.arange(0, WIDTH_PAD)
    page = tl.load(pages + token // PAGE, mask=held, other=0).to(tl.int64)
    there = pool + (page * PAGE + token % PAGE)[:, None] * WIDTH + column[None, :]
    here = packed + token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    mask = held[:, None] & (column < WIDTH)[None, :]
    if GATHER:
        tl.store(here, tl.load(there, mask=mask), mask=mask)
    else:
        tl.store(there, tl.load(here, mask=mask), mask=mask)


def gather_rows(pool: Tensor, pages: Tensor, n_tokens: int) -> Tensor:
    """pool [n_pages, page_tokens, width], pages [P] -> their first rows [n_tokens, width]."""
    packed = pool.new_empty(n_tokens, pool.shape[-1])
    _launch(pool, packed, pages, n_tokens, gather=True)
    return packed


def scatter_rows(pool: Tensor, pages: Tensor, rows: Tensor) -> None:
    """Inverse of `gather_rows`: rows [n_tokens, width] into the pool's `pages`."""
    _launch(pool, rows, pages, rows.shape[0], gather=False)


def _launch(pool: Tensor, packed: Tensor, pages: Tensor, n_tokens: int, *, gather: bool) -> None:
    if not n_tokens:
        return
    word = _WORDS[pool.element_size()]
    width = pool.shape[-1]
    _copy_rows[(triton.cdiv(n_tokens, _BLOCK_TOKENS),)](
        pool.view(word), packed.view(word), pages, n_tokens,
        PAGE=pool.shape[1], WIDTH=width, WIDTH_PAD=triton.next_power_of_2(width),
        BLOCK=_BLOCK_TOKENS, GATHER=gather,
    )  # fmt: skip
