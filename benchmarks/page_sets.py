# SPDX-License-Identifier: MIT
"""Sets of pages on SGLang's real host pools, moved and looked up as a whole by any backend."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.backends import TRAILING_POOLS, Backend, transfer
from benchmarks.block_work import GET, HIT, MISS, SET
from benchmarks.host_pages import HostPages
from benchmarks.pairs import LocalContestant, expect
from ucm.testing.host_pools import (
    FLASH_COMPRESS_RATIOS,
    DeepSeekV4Model,
    HostPools,
    MhaModel,
    Model,
    host_pools,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

PRIMARY = "kv"
MOST_STORED_BYTES = 500_000_000
LIMIT_PHASES = (SET, GET)
"""What can be asked of a limit: it has no keys to look up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSet:
    """Some pages of a model, all pools of it."""

    name: str
    model: Model
    page_tokens: int
    count: int
    is_mla: bool = False
    draft_tokens: int = 0

    def host_pools(self) -> HostPools:
        """Build the host pools, with room for all pages."""
        # The assembler makes host pools twice as large as the device pools.
        return host_pools(
            self.model,
            page_tokens=self.page_tokens,
            pages=max(4, self.count // 2),
            draft_tokens=self.draft_tokens,
        )


def _mha(name: str, layers: int, heads: int) -> PageSet:
    model = MhaModel(layers=layers, heads=heads, head_dim=64)
    return PageSet(name=name, model=model, page_tokens=64, count=32)


PAGE_SETS = (
    PageSet(
        name="16 x V4 Flash, six pools",
        model=DeepSeekV4Model(compress_ratios=FLASH_COMPRESS_RATIOS, mtp_layers=1),
        page_tokens=256,
        count=16,
        is_mla=True,
        draft_tokens=2,
    ),
    _mha("32 x 64 KB", layers=2, heads=2),
    _mha("32 x 256 KB", layers=8, heads=2),
    _mha("32 x 1 MB", layers=8, heads=8),
    _mha("32 x 4 MB", layers=32, heads=8),
)
"""Costs are told of the first."""


class PageSetWork(LocalContestant):
    """Works on a set of pages, under new keys in every round."""

    def __init__(self, name: str, pages: dict[str, HostPages], count: int) -> None:
        self.name = name
        self._pages = pages
        self._count = count

    @property
    def moved_bytes(self) -> int:
        """Payload of a set or get."""
        return self._count * sum(pages.page_bytes for pages in self._pages.values())

    @abstractmethod
    def set(self, keys: Sequence[str]) -> None:
        """Store all pages; raises `AssertionError` if it fails."""

    @abstractmethod
    def get(self, keys: Sequence[str]) -> None:
        """Load all pages; raises `AssertionError` if it fails."""

    def exists(self, keys: Sequence[str]) -> int:
        """Tell how many leading pages can be loaded."""
        raise NotImplementedError

    def prepare(self, phase: str, round_number: int) -> None:
        """Spoil the host pages that a get has to restore."""
        del round_number
        if phase == GET:
            for pages in self._pages.values():
                pages.spoil(self._count)

    def run(self, phase: str, round_number: int) -> object:
        """Make the calls of one phase."""
        call = {SET: self.set, GET: self.get, HIT: self.exists, MISS: self.exists}[phase]
        return call([_key(round_number, page, is_stored=phase != MISS) for page in range(self._count)])

    def check(self, phase: str, round_number: int, result: object) -> None:
        """Check how many pages were found, and after a get the bytes."""
        expected = {SET: None, GET: None, HIT: self._count, MISS: 0}[phase]
        expect(result, expected, f"{self.name}, {phase}, round {round_number}")
        if phase == GET:
            for pages in self._pages.values():
                pages.check(self._count)

    def close(self) -> None:
        """Release what is held."""


class BackendPages(PageSetWork):
    """Through a storage backend, in the order of SGLang's controller."""

    def __init__(self, backend: Backend, pages: dict[str, HostPages], count: int, page_tokens: int) -> None:
        super().__init__(backend.name, pages, count)
        self._backend = backend
        self._primary_indices = (
            pages[PRIMARY].first_indices(count) if PRIMARY in pages else torch.arange(count * page_tokens)
        )
        sidecars = [name for name in pages if name != PRIMARY]
        self._following = [name for name in sidecars if name not in TRAILING_POOLS]
        self._trailing = [name for name in sidecars if name in TRAILING_POOLS]
        self._stored_bytes = 0

    def set(self, keys: Sequence[str]) -> None:
        """Store the sidecars, then the primary KV."""
        if sidecars := self._following + self._trailing:
            self._expect_all(self._backend.set_sidecars(self._transfers(sidecars, keys)))
        expect(self._backend.set_primary(keys, self._primary_indices), True, "set of the primary KV")

    def get(self, keys: Sequence[str]) -> None:
        """Load the primary KV, the pools that follow it, then those of which an end is needed (here: all)."""
        expect(self._backend.get_primary(keys, self._primary_indices), self._count, "get of the primary KV")
        for names in (self._following, self._trailing):
            if names:
                self._expect_all(self._backend.get_sidecars(self._transfers(names, keys)))

    def exists(self, keys: Sequence[str]) -> int:
        """Ask once, over all pools."""
        return self._backend.restorable_pages(keys)

    def finish(self, round_number: int) -> None:
        """Free the space of the rounds so far, now and then."""
        del round_number
        self._stored_bytes += self.moved_bytes
        if self._stored_bytes > MOST_STORED_BYTES:
            self._backend.clear()
            self._stored_bytes = 0

    def close(self) -> None:
        """Remove everything stored and close the backend."""
        self._backend.clear()
        self._backend.close()

    def _transfers(self, names: Sequence[str], keys: Sequence[str]) -> list[PoolTransfer]:
        return [transfer(name, keys, self._pages[name].first_indices(self._count)) for name in names]

    def _expect_all(self, verdicts: dict[str, list[bool]]) -> None:
        failed = {str(name): pages.count(False) for name, pages in verdicts.items() if False in pages}
        if failed:
            told = ", ".join(f"{count} of {name}" for name, count in failed.items())
            raise AssertionError(f"pages not moved: {told}")


class PlainFiles(PageSetWork):
    """One plain file a pool, open all the time, its pages one after the other."""

    def __init__(self, name: str, directory: Path, pages: dict[str, HostPages], count: int) -> None:
        super().__init__(name, pages, count)
        self._views = {
            pool: [view for page in range(count) for view in pool_pages.views(page)]
            for pool, pool_pages in pages.items()
        }
        self._descriptors = {
            pool: os.open(directory / f"plain-{pool}", os.O_RDWR | os.O_CREAT) for pool in pages
        }

    def set(self, keys: Sequence[str]) -> None:
        """Write the files."""
        del keys
        for pool, views in self._views.items():
            written = os.pwritev(self._descriptors[pool], views, 0)
            expect(written, self._pages[pool].page_bytes * self._count, f"bytes written of {pool}")

    def get(self, keys: Sequence[str]) -> None:
        """Read the files."""
        del keys
        for pool, views in self._views.items():
            read = os.preadv(self._descriptors[pool], views, 0)
            expect(read, self._pages[pool].page_bytes * self._count, f"bytes read of {pool}")

    def finish(self, round_number: int) -> None:
        """Empty the files: the next round has to get its space again, as new blocks have."""
        del round_number
        for descriptor in self._descriptors.values():
            os.ftruncate(descriptor, 0)

    def close(self) -> None:
        """Empty and close the files."""
        self.finish(0)
        for descriptor in self._descriptors.values():
            os.close(descriptor)


class MemoryCopies(PageSetWork):
    """Copies in memory that is there already, on one thread."""

    def __init__(self, name: str, pages: dict[str, HostPages], count: int) -> None:
        super().__init__(name, pages, count)
        self._host = [
            view for pool_pages in pages.values() for page in range(count) for view in pool_pages.views(page)
        ]
        self._copies = [bytearray(view.nbytes) for view in self._host]

    def set(self, keys: Sequence[str]) -> None:
        """Copy from the host pages."""
        del keys
        for view, copy in zip(self._host, self._copies, strict=True):
            copy[:] = view

    def get(self, keys: Sequence[str]) -> None:
        """Copy into the host pages."""
        del keys
        for view, copy in zip(self._host, self._copies, strict=True):
            view[:] = copy


def host_pages(page_set: PageSet, pools: HostPools) -> dict[str, HostPages]:
    """Return the pages of all pools that have bytes, filled."""
    pages = {name: HostPages(pools[name], page_set.count) for name in pools.names}
    filled = {name: pool_pages for name, pool_pages in pages.items() if pool_pages.page_bytes}
    for pool_pages in filled.values():
        pool_pages.fill()
    return filled


def _key(round_number: int, page: int, *, is_stored: bool) -> str:
    """Return a page hash as SGLang makes it: 64 hex digits."""
    return hashlib.sha256(f"{round_number} {page} {is_stored}".encode()).hexdigest()
