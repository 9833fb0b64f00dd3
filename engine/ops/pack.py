"""Pages and states of one layer into one contiguous wire buffer, and back.

The wire order is that of `CacheLayout.regions`: an MLA layer's token rows, page by page, without
the unused tail of the last page; a KDA layer's state, then its convolution entries. Bytes are
moved as they are: pages by a kernel that follows the page table (Triton on CUDA), a state, which
is contiguous, by a plain copy. The one exception is asked for by name: `StateCodec.BF16` halves
the state on the wire, and rounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from engine.cache.storage import CacheStorage


class StateCodec(StrEnum):
    """How the recurrent state crosses the wire. The convolution and latents always cross as is."""

    EXACT = "exact"
    BF16 = "bf16"


def packed_bytes(
    storage: CacheStorage, layer: int, n_tokens: int, codec: StateCodec = StateCodec.EXACT
) -> int:
    """Size of one layer's wire buffer for a request with `n_tokens` in the given pages."""
    layout = storage.layout
    if layer in layout.latents:
        return n_tokens * layout.latents[layer].row_bytes // layout.page_tokens
    state = layout.state[layer].row_bytes
    return (state // 2 if codec is StateCodec.BF16 else state) + layout.conv[layer].row_bytes


def pack(
    storage: CacheStorage,
    layer: int,
    pages: Sequence[int],
    slot: int,
    n_tokens: int,
    codec: StateCodec = StateCodec.EXACT,
) -> Tensor:
    """One layer of a request as a new uint8 tensor on the storage's device. `pages` hold the
    `n_tokens` tokens that are to cross (a suffix, where the other side has the rest)."""
    if layer in storage.latents:
        rows = _gather(storage.latents[layer], _index(storage, pages), n_tokens)
        return rows.reshape(-1).view(torch.uint8)
    state = storage.state[layer][slot]
    if codec is StateCodec.BF16:
        state = state.to(torch.bfloat16)
    parts = [state, storage.conv[layer][slot]]
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def unpack(
    storage: CacheStorage,
    layer: int,
    pages: Sequence[int],
    slot: int,
    n_tokens: int,
    wire: Tensor,
    codec: StateCodec = StateCodec.EXACT,
) -> None:
    """Inverse of `pack` into this storage's `pages` and `slot`. Raises ValueError where `wire` has
    not exactly the size of the layer; nothing is written then."""
    expected = packed_bytes(storage, layer, n_tokens, codec)
    if wire.numel() != expected:
        raise ValueError(f"layer {layer}: {wire.numel()} bytes arrived, {expected} expected")
    if layer in storage.latents:
        latents = storage.latents[layer]
        rows = wire.view(latents.dtype).view(n_tokens, latents.shape[-1])
        _scatter(latents, _index(storage, pages), rows)
        return
    state, conv = storage.state[layer], storage.conv[layer]
    split = wire.numel() - storage.layout.conv[layer].row_bytes
    held = torch.bfloat16 if codec is StateCodec.BF16 else state.dtype
    state[slot] = wire[:split].view(held).view(state.shape[1:]).to(state.dtype)
    conv[slot] = wire[split:].view(conv.dtype).view(conv.shape[1:])


def _gather(pool: Tensor, pages: Tensor, n_tokens: int) -> Tensor:
    """The first `n_tokens` token rows of `pages`, [n_tokens, width]."""
    if pool.is_cuda:
        from engine.ops.triton_pack import gather_rows

        return gather_rows(pool, pages, n_tokens)
    return pool.index_select(0, pages).flatten(0, 1)[:n_tokens]


def _scatter(pool: Tensor, pages: Tensor, rows: Tensor) -> None:
    """Inverse of `_gather`; what lies behind the last row in the last page stays as it is."""
    if pool.is_cuda:
        from engine.ops.triton_pack import scatter_rows

        scatter_rows(pool, pages, rows)
        return
    n_tokens, page_tokens = rows.shape[0], pool.shape[1]
    full, rest = divmod(n_tokens, page_tokens)
    if full:
        whole = rows[: full * page_tokens].view(full, page_tokens, -1)
        pool.index_copy_(0, pages[:full], whole)
    if rest:
        pool[pages[full], :rest] = rows[full * page_tokens :]


def _index(storage: CacheStorage, pages: Sequence[int]) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=storage.device)
