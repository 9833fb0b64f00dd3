"""What one forward pass computes: a variable-length mix of prefill chunks and decode tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """The next tokens of one sequence.

    `start`       tokens of the sequence that the cache already holds; the pass computes positions
                  `start` .. `start + len(tokens)`.
    `slot`        state slot written (and read, unless `source_slot` says otherwise).
    `pages`       page table: entry i holds positions `i * page_tokens` onwards; it must cover
                  `start + len(tokens)`. Pages that end at or before `start` are only read.
    `source_slot` slot the state is read from, where it differs from `slot`: the checkpoint of a
                  prefix hit, which stays as it is (copy on write). With `start == 0` nothing is
                  read: the state begins at zero whatever the slot holds.
    `checkpoints` (position, slot) pairs: the state after exactly `position` tokens of the sequence
                  is also written to that slot. `start < position <= start + len(tokens)`.
    """

    tokens: Sequence[int]
    start: int
    slot: int
    pages: Sequence[int]
    source_slot: int | None = None
    checkpoints: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens or self.start < 0:
            raise ValueError("a piece needs at least one token and a start >= 0")
        end = self.start + len(self.tokens)
        if any(not self.start < position <= end for position, _ in self.checkpoints):
            raise ValueError(f"checkpoints {self.checkpoints} lie outside {self.start}..{end}")

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def read_slot(self) -> int:
        return self.slot if self.source_slot is None else self.source_slot

    @property
    def is_decode(self) -> bool:
        """One token on top of the slot's own state: takes the in-place single-step path."""
        return (
            len(self.tokens) == 1
            and self.start > 0
            and self.read_slot == self.slot
            and not self.checkpoints
        )


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode tokens of a batch, as tensors only, so that a captured graph can replay them.

    `slots` [B] int64, `context` [B] int64 (tokens held, the new one included), `page_table`
    [B, P] int32 (unused entries 0, the scratch page).
    """

    slots: Tensor
    context: Tensor
    page_table: Tensor

    def __len__(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prefill chunks of a batch, in row order; `cu_seqlens` [N+1] starts at 0."""

    pieces: tuple[Piece, ...]
    cu_seqlens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.pieces)

    def spans(self) -> Iterator[tuple[Piece, int, int]]:
        """Each piece with its first row and the row after its last, counted from the first chunk's
        first row."""
        return zip(self.pieces, self.cu_seqlens, self.cu_seqlens[1:], strict=False)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of one pass: decode tokens first, then the prefill chunks.

    `tokens` [T] int64; `latent_rows` [T] int64: row of each token in a flat
    [n_pages * page_tokens, latent_dim] view of a layer's latents; `last_rows` [N] int64: each
    piece's last row, in the order in which the pieces were given.
    """

    tokens: Tensor
    latent_rows: Tensor
    last_rows: Tensor
    decode: DecodeRows | None
    prefill: PrefillRows | None

    @property
    def n_decode(self) -> int:
        """Rows of decode tokens, which come before those of the chunks."""
        return 0 if self.decode is None else len(self.decode)

    @classmethod
    def build(
        cls, pieces: Sequence[Piece], page_tokens: int, device: torch.device | str = "cpu"
    ) -> ForwardBatch:
        """Lay out `pieces`. Raises ValueError where a page table does not cover its piece."""
        order = sorted(range(len(pieces)), key=lambda i: not pieces[i].is_decode)
        tokens: list[int] = []
        latent_rows: list[int] = []
        last_rows = [0] * len(pieces)
        for i in order:
            piece = pieces[i]
            if len(piece.pages) * page_tokens < piece.end:
                raise ValueError(f"{len(piece.pages)} pages do not hold {piece.end} tokens")
            tokens += piece.tokens
            latent_rows += [
                piece.pages[p // page_tokens] * page_tokens + p % page_tokens
                for p in range(piece.start, piece.end)
            ]
            last_rows[i] = len(tokens) - 1
        decoding = [pieces[i] for i in order if pieces[i].is_decode]
        chunks = tuple(pieces[i] for i in order if not pieces[i].is_decode)

        def integers(values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        decode = None
        if decoding:
            width = max(-(-piece.end // page_tokens) for piece in decoding)
            tables = [list(piece.pages[:width]) for piece in decoding]
            decode = DecodeRows(
                slots=integers([piece.slot for piece in decoding]),
                context=integers([piece.end for piece in decoding]),
                page_table=integers(
                    [table + [0] * (width - len(table)) for table in tables], torch.int32
                ),
            )
        prefill = None
        if chunks:
            lengths = accumulate((len(piece.tokens) for piece in chunks), initial=0)
            prefill = PrefillRows(chunks, tuple(lengths))
        return cls(integers(tokens), integers(latent_rows), integers(last_rows), decode, prefill)
