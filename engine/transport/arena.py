"""One piece of memory that the worker process and its data plane both map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence


class SharedArena:
    """Anonymous shared memory (memfd). It has no name, so nothing stays behind however the
    processes end.

    `buffer` is writable; `torch.frombuffer(arena.buffer, dtype=torch.uint8)` and
    `numpy.frombuffer` make tensors in it. Page-aligned, zero-filled.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED)
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int) -> SharedArena:
        """A new arena. Memory is committed by the kernel as it is first touched."""
        if size_bytes <= 0:
            raise ValueError(f"an arena of {size_bytes} bytes")
        fd = os.memfd_create("prfaas-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return cls(fd, size_bytes)

    @classmethod
    def attach(cls, fd: int) -> SharedArena:
        """Map an arena whose descriptor was inherited."""
        return cls(fd, os.fstat(fd).st_size)

    def views(self, ranges: Iterable[Sequence[int]]) -> list[memoryview]:
        """Memory of (offset, length) ranges; no copy."""
        buffer = self.buffer
        return [buffer[offset : offset + length] for offset, length in ranges]

    def close(self) -> None:
        """Unmap. Tensors made from `buffer` keep the mapping alive until they are gone."""
        if self.fd < 0:
            return
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            pass  # still exported to a tensor: unmapped when that is collected
        os.close(self.fd)
        self.fd = -1
