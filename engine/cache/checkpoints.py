"""Where to keep a copy of the recurrent state while a prompt is computed.

A state can be reused only at the exact length at which it was taken, so a prefix hit needs a
checkpoint at a block boundary that the next prompt shares. Each one costs a whole state slot.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """`interval_blocks`: one at each multiple of so many blocks (0: none). `prompt_end`: at the
    last block boundary of the prompt, for a conversation that goes on. `junction`: where blocks of
    an earlier prompt matched but no state did, for the next prompt that shares them.
    """

    interval_blocks: int = 32
    prompt_end: bool = True
    junction: bool = True

    def boundaries(
        self, start_tokens: int, kv_tokens: int, prompt_tokens: int, block_tokens: int
    ) -> list[int]:
        """At which token counts to keep a state: ascending, > start_tokens and <= prompt_tokens.

        `start_tokens` are not computed (joint hit); blocks matched up to `kv_tokens`.
        """
        wanted: set[int] = set()
        if self.interval_blocks:
            step = self.interval_blocks * block_tokens
            wanted.update(range((start_tokens // step + 1) * step, prompt_tokens + 1, step))
        if self.prompt_end:
            wanted.add(prompt_tokens // block_tokens * block_tokens)
        if self.junction:
            wanted.add(kv_tokens)
        return sorted(n for n in wanted if start_tokens < n <= prompt_tokens)
