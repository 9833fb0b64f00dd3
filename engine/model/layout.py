"""Where each layer's cache lies in one flat buffer. Torch-free, so that a process that only moves
bytes can address it.

    MLA layer:  latents [n_pages, page_tokens, latent_dim]       cache dtype
    KDA layer:  state   [n_slots, heads, d_v, d_k]               fp32, V-first
                conv    [n_slots, conv_width - 1, conv_channels] cache dtype, oldest entry first

Page 0 and slot 0 are scratch: padding rows of a fixed-size decode batch read and write them, and
no request ever owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.config import DTYPE_ITEMSIZE, InputError, ModelConfig

Region = tuple[int, int]
"""(byte offset in the buffer, length in bytes)"""

_ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array of the layout. `row` is the byte size of one page or slot."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        size = DTYPE_ITEMSIZE[self.dtype]
        for n in self.shape[1:]:
            size *= n
        return size

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes


class CacheLayout:
    """Byte layout of `n_pages` pages of `page_tokens` tokens and `n_slots` state slots.

    Counts include the scratch page 0 and the scratch slot 0, so both must be at least 2.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_pages: int,
        n_slots: int,
        page_tokens: int = 64,
        dtype: str = "float32",
    ) -> None:
        if dtype not in DTYPE_ITEMSIZE:
            raise InputError(f"cache dtype {dtype!r} is unknown; have {', '.join(DTYPE_ITEMSIZE)}")
        if n_pages < 2 or n_slots < 2 or page_tokens < 1:
            raise InputError(
                f"cache of {n_pages} pages of {page_tokens} tokens and {n_slots} slots is too "
                "small: needs 2 pages and 2 slots (one of each is scratch)"
            )
        self.config = config
        self.n_pages = n_pages
        self.n_slots = n_slots
        self.page_tokens = page_tokens
        self.dtype = dtype
        self.latents: dict[int, Tensor] = {}
        self.state: dict[int, Tensor] = {}
        self.conv: dict[int, Tensor] = {}
        end = 0

        def place(shape: tuple[int, ...], dtype: str) -> Tensor:
            nonlocal end
            tensor = Tensor(end, shape, dtype)
            end += -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            return tensor

        for layer in range(config.layers):
            if config.is_mla(layer):
                self.latents[layer] = place((n_pages, page_tokens, config.latent_dim), dtype)
            else:
                self.state[layer] = place(
                    (n_slots, config.kda_heads, config.d_v, config.d_k), "float32"
                )
                self.conv[layer] = place(
                    (n_slots, config.conv_width - 1, config.conv_channels), dtype
                )
        self.nbytes = end

    @property
    def layout_id(self) -> str:
        """Two sides may exchange pages and states only if this is equal (pool sizes may differ)."""
        return f"{self.config.fingerprint()}-p{self.page_tokens}-{self.dtype}"

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)

    def request_bytes(self, n_tokens: int) -> int:
        """Bytes of a whole request: what `regions` of all layers add up to."""
        return self.config.request_bytes(n_tokens, self.dtype)

    def regions(
        self, layer: int, pages: Sequence[int], slot: int, n_tokens: int | None = None
    ) -> list[Region]:
        """Byte regions that hold one request's cache of `layer`, in wire order.

        MLA: the pages in the given order (neighbours merged); `n_tokens` says how many tokens these
        pages hold (default: all full), and the unused tail of the last page is left out.
        KDA: the slot's state, then its convolution entries; `pages` is not looked at.
        """
        if layer in self.state:
            return [self._row(self.state[layer], slot), self._row(self.conv[layer], slot)]
        tensor = self.latents[layer]
        token_bytes = tensor.row_bytes // self.page_tokens
        left = len(pages) * self.page_tokens if n_tokens is None else n_tokens
        if not (len(pages) - 1) * self.page_tokens < left <= len(pages) * self.page_tokens and (
            pages or left
        ):
            raise ValueError(f"{left} tokens do not end in the last of {len(pages)} pages")
        regions: list[Region] = []
        for page in pages:
            offset, length = self._row(tensor, page)
            length = min(length, left * token_bytes)
            left -= self.page_tokens
            if regions and regions[-1][0] + regions[-1][1] == offset:
                regions[-1] = (regions[-1][0], regions[-1][1] + length)
            else:
                regions.append((offset, length))
        return regions

    @staticmethod
    def _row(tensor: Tensor, index: int) -> Region:
        if not 0 < index < tensor.shape[0]:
            raise IndexError(f"row {index} is not 1 to {tensor.shape[0] - 1}")
        return tensor.offset + index * tensor.row_bytes, tensor.row_bytes
