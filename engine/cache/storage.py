"""The tensors behind a cache pool: views of one flat buffer laid out by `CacheLayout`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.layout import CacheLayout

TORCH_DTYPE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class CacheStorage:
    """Per-layer cache tensors. Who owns which page and slot is decided elsewhere.

    `latents[layer]`  [n_pages, page_tokens, latent_dim]   (MLA layers)
    `state[layer]`    [n_slots, heads, d_v, d_k] fp32       (KDA layers)
    `conv[layer]`     [n_slots, conv_width - 1, channels]   (KDA layers)

    All are views of `buffer`, a uint8 tensor of `layout.nbytes`. Give a `buffer` (any writable
    object with the buffer protocol, e.g. `SharedMemory.buf`, or a uint8 tensor) to share the
    memory with another process, which addresses it by `layout.regions`.
    """

    def __init__(
        self,
        layout: CacheLayout,
        device: torch.device | str = "cpu",
        buffer: object | None = None,
    ) -> None:
        self.layout = layout
        self.device = torch.device(device)
        if buffer is None:
            flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self.device)
        elif isinstance(buffer, Tensor):
            flat = buffer
        else:
            flat = torch.frombuffer(buffer, dtype=torch.uint8)
        if flat.numel() < layout.nbytes:
            raise ValueError(f"buffer has {flat.numel()} bytes, layout needs {layout.nbytes}")
        self.buffer = flat[: layout.nbytes]

        def view(arrays: dict) -> dict[int, Tensor]:
            return {
                layer: self.buffer[a.offset : a.offset + a.nbytes]
                .view(TORCH_DTYPE[a.dtype])
                .view(a.shape)
                for layer, a in arrays.items()
            }

        self.latents = view(layout.latents)
        self.state = view(layout.state)
        self.conv = view(layout.conv)

    def poison(self, slots: tuple[int, ...] = (), pages: tuple[int, ...] = ()) -> None:
        """Fill freed slots and pages with NaN, so that any read of them shows (tests)."""
        for slot in slots:
            for tensors in (self.state, self.conv):
                for tensor in tensors.values():
                    tensor[slot].fill_(torch.nan)
        for page in pages:
            for tensor in self.latents.values():
                tensor[page].fill_(torch.nan)
