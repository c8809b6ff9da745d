# SPDX-License-Identifier: MIT
"""Pages of SGLang's host pools."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

from benchmarks.pages import Pages


class HostPages(Pages):
    """Pages of one of SGLang's host pools, in no order, as a busy allocator hands them out.

    A pool without bytes (a logical anchor) has pages of 0 bytes.
    """

    def __init__(self, pool: Any, count: int) -> None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
        self._pool = pool  # Its memory goes with it, and we know addresses only.
        self._page_tokens = int(pool.page_size)
        self._indices = torch.cat(
            [torch.arange(page * self._page_tokens, (page + 1) * self._page_tokens) for page in order]
        )
        super().__init__(_pool_ranges(pool, self._indices, count))

    def first_indices(self, count: int) -> torch.Tensor:
        """Return the host indices of the first pages, one per token, as SGLang passes them."""
        return self._indices[: count * self._page_tokens]


def _pool_ranges(pool: Any, indices: torch.Tensor, count: int) -> list[list[tuple[int, int]]]:
    if isinstance(pool, LogicalHostPool):
        return [[] for _ in range(count)]
    addresses, sizes = pool.get_page_buffer_meta(indices)
    parts = len(addresses) // count
    flat = [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
    return [[part for part in flat[page * parts : (page + 1) * parts] if part[1]] for page in range(count)]
