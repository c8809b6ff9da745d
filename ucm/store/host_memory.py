# SPDX-License-Identifier: MIT
"""Copying between buffers, with the GIL or without."""

from __future__ import annotations

import ctypes

LEAST_FREE_BYTES = 1024 * 1024
"""What is done with so many bytes at a time is done without the GIL, if there is a choice.

Less takes some ten microseconds. Getting the GIL back takes up to 5 ms beside a thread that is busy, as
SGLang's scheduler is one; but keeping it for longer would hold up that thread, and all the others.
"""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the beginning of `target`; both are writable and contiguous."""
    size = source.nbytes
    if size < LEAST_FREE_BYTES:
        target[:size] = source
    elif size <= target.nbytes:
        ctypes.memmove(_address(target), _address(source), size)
    else:
        raise ValueError(f"{size} bytes do not fit into {target.nbytes}")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
