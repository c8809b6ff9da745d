# SPDX-License-Identifier: MIT
"""The raw memory of host pages: fill it, spoil it, and check what came back."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
import xxhash


class HostPages:
    """Some pages of a host pool, in an order of their own as a busy allocator hands them out.

    A pool without bytes (a logical anchor) has pages of 0 bytes.
    """

    def __init__(self, pool: Any, count: int) -> None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
        self.page_tokens = int(pool.page_size)
        self.indices = torch.cat(
            [torch.arange(page * self.page_tokens, (page + 1) * self.page_tokens) for page in order]
        )
        self._ranges = _page_ranges(pool, self.indices, count)
        self.page_bytes = sum(length for _, length in self._ranges[0])
        self._digests: list[int] = []

    def __len__(self) -> int:
        return len(self._ranges)

    def first_indices(self, count: int) -> torch.Tensor:
        """Return the host indices of the first pages, one per token, as SGLang passes them."""
        return self.indices[: count * self.page_tokens]

    def views(self, page: int) -> list[memoryview]:
        """Return the byte ranges of one page, in storage order."""
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


def _page_ranges(pool: Any, indices: torch.Tensor, count: int) -> list[list[tuple[int, int]]]:
    if getattr(pool, "kv_buffer", None) is None and getattr(pool, "size_per_token", 0) == 0:
        return [[] for _ in range(count)]
    addresses, sizes = pool.get_page_buffer_meta(indices)
    parts = len(addresses) // count
    flat = [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
    return [[part for part in flat[page * parts : (page + 1) * parts] if part[1]] for page in range(count)]
