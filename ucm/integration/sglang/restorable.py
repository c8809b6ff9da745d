# SPDX-License-Identifier: MIT
"""From stored pages to the prefix lengths that every pool can serve; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class PoolPresence:
    """Stored pages of one sidecar, and how many of them a prefix needs.

    Args:
        present: `present[i]` tells whether page i, from the sequence start, is stored.
        window_pages: How many pages before the end of a prefix must exist; a
            shorter prefix needs all it has. None: every page of the prefix.
    """

    present: Sequence[bool]
    window_pages: int | None
    _runs: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.window_pages is not None and self.window_pages < 1:
            raise ValueError(f"a window has at least 1 page, got {self.window_pages}")
        # runs[n]: how many stored pages in a row end with page n - 1.
        runs = [0]
        for stored in self.present:
            runs.append(runs[-1] + 1 if stored else 0)
        object.__setattr__(self, "_runs", runs)

    def can_end_at(self, pages: int) -> bool:
        """Tell whether this pool can serve a prefix of `pages` pages."""
        needed = pages if self.window_pages is None else min(self.window_pages, pages)
        return self._runs[pages] >= needed

    def longest_prefix(self) -> int:
        """Return the longest prefix, in pages, this pool can serve by itself."""
        return next((n for n in range(len(self.present), 0, -1) if self.can_end_at(n)), 0)


def leading_pages(present: Sequence[bool]) -> int:
    """Return how many pages are stored before the first one that is not."""
    return next((page for page, stored in enumerate(present) if not stored), len(present))


def restorable_prefixes(kv_pages: int, sidecars: Sequence[PoolPresence]) -> list[int]:
    """Return the prefix lengths, in pages, from which every pool can resume.

    Args:
        kv_pages: Leading KV pages in the store.
        sidecars: One entry per sidecar that limits the hit.

    Returns:
        Ascending lengths in [1, kv_pages]; not contiguous if a pool stores only
        trailing windows. Empty means a miss.

    Raises:
        ValueError: A sidecar describes fewer than `kv_pages` pages.
    """
    if any(len(sidecar.present) < kv_pages for sidecar in sidecars):
        raise ValueError(f"sidecar presence is shorter than {kv_pages} pages")
    lengths = range(1, kv_pages + 1)
    return [n for n in lengths if all(sidecar.can_end_at(n) for sidecar in sidecars)]


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """How a pool keeps a second form of the KV pages: a group of keys per block of pages.

    Args:
        block_pages: KV pages that one block covers.
        group_pages: Pages of the pool, and keys, that one block is stored as.
    """

    block_pages: int
    group_pages: int

    def group_keys(self, page_hashes: Sequence[str]) -> list[str]:
        """Return the keys of all whole blocks, group after group.

        A hash names everything up to the end of its page, so only the last
        hashes of a block can name what was made from the whole block.
        """
        if not 0 < self.group_pages <= self.block_pages:
            return []
        ends = range(self.block_pages, len(page_hashes) + 1, self.block_pages)
        return [key for end in ends for key in page_hashes[end - self.group_pages : end]]

    def covered_pages(self, present: Sequence[bool]) -> int:
        """Return the KV pages that the leading complete groups cover."""
        if self.group_pages < 1:
            return 0
        return leading_pages(present) // self.group_pages * self.block_pages
