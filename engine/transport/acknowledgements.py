"""What a receiver owes its senders: acknowledgements of chunks, gathered into few frames."""

from __future__ import annotations

from collections.abc import Sequence

from engine.transport.incoming import Handle
from engine.transport.messages import MAX_LISTED


class Acknowledgements:
    """Chunks that are here and whose sender was not told yet."""

    def __init__(self, credit_bytes: int) -> None:
        self._credit_bytes = credit_bytes
        self._numbers: dict[Handle, list[int]] = {}
        self._bytes = 0

    def owe(self, handle: Handle, numbers: Sequence[int], size_bytes: int = 0) -> None:
        """Chunks of the transfer are here; size_bytes: of those that took credit until now."""
        self._numbers.setdefault(handle, []).extend(numbers)
        self._bytes += size_bytes

    def forget(self, handle: Handle) -> None:
        """The transfer has ended: its answer says more than acknowledgements."""
        self._numbers.pop(handle, None)

    @property
    def due(self) -> bool:
        """Whether they should go out now. Until then they can wait for the next tick: they only
        return credit, and an eighth of it does not stop a sender."""
        return self._bytes * 8 >= self._credit_bytes

    def take(self) -> list[tuple[Handle, list[int]]]:
        """All of them, at most as many together as one frame may list; nothing is owed then."""
        owed, self._numbers, self._bytes = self._numbers, {}, 0
        return [
            (handle, numbers[at : at + MAX_LISTED])
            for handle, numbers in owed.items()
            for at in range(0, len(numbers), MAX_LISTED)
        ]
