"""Byte layout, regions and poisoning of the cache tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from engine.cache.storage import CacheStorage
from engine.model.config import InputError, shape
from engine.model.layout import CacheLayout

TINY = shape("tiny")


def layout(**changes: object) -> CacheLayout:
    return CacheLayout(TINY, **{"n_pages": 6, "n_slots": 4, "page_tokens": 8, **changes})


def test_shapes_are_v_first_and_fp32():
    storage = CacheStorage(layout(dtype="bfloat16"))
    assert storage.state[0].shape == (4, 2, TINY.d_v, TINY.d_k)
    assert storage.state[0].dtype == torch.float32
    assert storage.conv[2].shape == (4, 3, TINY.conv_channels)
    assert storage.latents[3].shape == (6, 8, 24)
    assert storage.latents[3].dtype == torch.bfloat16
    assert sorted(storage.state) == [0, 1, 2]
    assert sorted(storage.latents) == [3]


def test_tensors_are_views_of_a_given_buffer():
    where = layout()
    memory = bytearray(where.nbytes)
    storage = CacheStorage(where, buffer=memory)
    storage.state[1][2] = torch.arange(2 * TINY.d_v * TINY.d_k).view(2, TINY.d_v, TINY.d_k)
    (offset, length), _ = where.regions(1, [], 2)
    there = torch.frombuffer(memory, dtype=torch.float32, offset=offset, count=length // 4)
    assert torch.equal(there, torch.arange(len(there), dtype=torch.float32))
    with pytest.raises(ValueError, match="layout needs"):
        CacheStorage(where, buffer=bytearray(where.nbytes - 1))


def test_regions_of_a_request_add_up_to_its_bytes():
    where = layout(dtype="bfloat16")
    regions = [r for i in range(TINY.layers) for r in where.regions(i, [2, 3, 5], 1, n_tokens=19)]
    assert sum(length for _, length in regions) == where.request_bytes(19)
    assert where.request_bytes(19) == TINY.state_bytes() + 19 * TINY.kv_bytes_per_token()


def test_regions_merge_neighbours_and_leave_out_the_tail():
    where = layout()
    token = TINY.latent_dim * 4
    base = where.latents[3].offset
    assert where.regions(3, [2, 3, 5], 1, n_tokens=19) == [
        (base + 16 * token, 16 * token),
        (base + 40 * token, 3 * token),
    ]
    assert where.regions(3, [], 1, n_tokens=0) == []
    with pytest.raises(ValueError, match="25 tokens do not end in the last of 3 pages"):
        where.regions(3, [2, 3, 5], 1, n_tokens=25)


def test_regions_never_name_scratch_or_foreign_rows():
    with pytest.raises(IndexError):
        layout().regions(3, [0], 1)
    with pytest.raises(IndexError):
        layout().regions(0, [], 4)


def test_arrays_do_not_overlap():
    where = layout()
    arrays = [*where.latents.values(), *where.state.values(), *where.conv.values()]
    spans = sorted((a.offset, a.offset + a.nbytes) for a in arrays)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[-1][1] <= where.nbytes


def test_poison_reaches_only_what_is_named():
    storage = CacheStorage(layout())
    storage.poison(slots=(2,), pages=(5,))
    assert storage.state[0][2].isnan().all()
    assert storage.conv[2][2].isnan().all()
    assert storage.latents[3][5].isnan().all()
    assert not storage.state[0][[0, 1, 3]].isnan().any()
    assert not storage.latents[3][:5].isnan().any()


def test_layout_id_differs_where_bytes_would_be_misread():
    ids = {
        layout().layout_id,
        layout(page_tokens=16).layout_id,
        layout(dtype="bfloat16").layout_id,
        CacheLayout(shape("tiny-7to1"), 6, 4, 8).layout_id,
    }
    assert len(ids) == 4
    assert layout(n_pages=99).layout_id == layout().layout_id


def test_too_small_or_unknown_is_refused():
    with pytest.raises(InputError, match="one of each is scratch"):
        layout(n_slots=1)
    with pytest.raises(InputError, match="'int8' is unknown"):
        layout(dtype="int8")
