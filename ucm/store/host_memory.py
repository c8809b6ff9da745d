# SPDX-License-Identifier: MIT
"""Work on large buffers, with the GIL or without, whichever takes less time now.

Without it, threads copy and hash at once. But getting it back takes up to 5 ms beside a thread that is busy,
as SGLang's scheduler may be: a hundred times as long as a medium buffer takes.
"""

from __future__ import annotations

import ctypes
import time

ALWAYS_FREE_BYTES = 1024 * 1024
"""So many bytes are always worked on without the GIL: keeping it would hold up everybody else."""

OFTEN_FREE_BYTES = 256 * 1024
"""So many are, unless the GIL came back late a short time ago; less takes a few microseconds."""

# Far above what less than `ALWAYS_FREE_BYTES` take, below the 5 ms after which Python makes a thread let go.
_LATE_S = 0.002
# After so long it is tried again: beside a busy thread, one late return for each thread that then does.
_MEMORY_S = 0.25


class Gil:
    """Remembers whether the GIL comes back at once; one for all threads."""

    def __init__(self) -> None:
        self._late_until = 0.0

    def lets_go(self, size: int) -> bool:
        """Tell whether to work on so many bytes without the GIL."""
        return size >= ALWAYS_FREE_BYTES or (
            size >= OFTEN_FREE_BYTES and time.monotonic() >= self._late_until
        )

    def is_back(self, size: int, since: float) -> None:
        """Note that this thread has it again, having worked on so many bytes since then (monotonic)."""
        now = time.monotonic()
        if size < ALWAYS_FREE_BYTES and now - since > _LATE_S:
            self._late_until = now + _MEMORY_S


gil = Gil()


def copy(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the beginning of `target`; both are writable and contiguous."""
    size = source.nbytes
    if not gil.lets_go(size):
        target[:size] = source
    elif size <= target.nbytes:
        since = time.monotonic()
        ctypes.memmove(_address(target), _address(source), size)
        gil.is_back(size, since)
    else:
        raise ValueError(f"{size} bytes do not fit into {target.nbytes}")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
