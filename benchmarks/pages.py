# SPDX-License-Identifier: MIT
"""Pages in memory: fill them, spoil them, and check what came back."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import xxhash


class Pages:
    """Pages of equal size, each one or more ranges of raw memory (address, bytes)."""

    def __init__(self, ranges: list[list[tuple[int, int]]]) -> None:
        self._ranges = ranges
        self._digests: list[int] = []
        self.page_bytes = sum(length for _, length in ranges[0])

    def __len__(self) -> int:
        return len(self._ranges)

    def views(self, page: int) -> list[memoryview]:
        """Return the ranges of one page, in storage order."""
        return [
            memoryview((ctypes.c_char * length).from_address(address)).cast("B")
            for address, length in self._ranges[page]
        ]

    def fill(self) -> None:
        """Write random bytes, different in every page, and remember what they are."""
        random = np.random.default_rng(len(self))
        for page in range(len(self)):
            for view in self.views(page):
                view[:] = random.bytes(len(view))
        self._digests = [self._digest(page) for page in range(len(self))]

    def spoil(self, count: int) -> None:
        """Overwrite the first pages, so that only a real read can make them right again."""
        for page in range(count):
            for address, length in self._ranges[page]:
                ctypes.memset(address, 0x5A, length)

    def check(self, count: int) -> None:
        """Raise `AssertionError` unless the first pages hold what `fill` wrote."""
        wrong = [page for page in range(count) if self._digest(page) != self._digests[page]]
        if wrong:
            raise AssertionError(f"{len(wrong)} of {count} pages hold wrong bytes, first {wrong[0]}")

    def _digest(self, page: int) -> int:
        digest = xxhash.xxh3_64()
        for view in self.views(page):
            digest.update(view)
        return digest.intdigest()


class PrivatePages(Pages):
    """Pages in memory of their own, one range each."""

    def __init__(self, page_bytes: int, count: int) -> None:
        # Page-aligned, for stores that read around the page cache straight into it.
        self._memory = np.frombuffer(mmap.mmap(-1, page_bytes * count), dtype=np.uint8)
        start = self._memory.ctypes.data
        super().__init__([[(start + page * page_bytes, page_bytes)] for page in range(count)])

    def address(self, page: int) -> int:
        """Return where a page starts."""
        return self._ranges[page][0][0]
