# SPDX-License-Identifier: MIT
"""Restore a DeepSeek V4 Flash prefix: our backend against reading the same bytes from six plain files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.backends import OURS, TRAILING_POOLS, Backend, transfer
from benchmarks.host_pages import HostPages
from benchmarks.machine import MEMORY_FILESYSTEMS, describe_filesystem
from benchmarks.pairs import LocalContestant, expect, run_pairs
from benchmarks.reporting import report_comparisons
from benchmarks.results import (
    Comparison,
    Report,
    format_bytes,
    progress,
)
from ucm.testing.host_pools import FLASH_COMPRESS_RATIOS, DeepSeekV4Model, host_pools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

PAGES = 16
PAGE_TOKENS = 256
MOST_TIMES_PLAIN = 1.3
ALL_PAGES = "all six pools, 16 pages each"
AS_CONTROLLER = "as the controller restores"
METHOD = f"""\
`ours` is a restore of {PAGES} pages through `UnifiedCacheStore` on SGLang's real V4 Flash host pools (43
layers and one MTP layer), checksums verified. `other` is `os.preadv` of the same bytes from six plain
files, opened beforehand, into the same host pages. The pages are overwritten before each turn and
compared after it. `{AS_CONTROLLER}`: all pages of c4, c4_indexer and c128, then only the last page of
swa, c4_state and c4_indexer_state, which is what SGLang asks for. Required of the whole: at most
{MOST_TIMES_PLAIN} times the plain time."""


def measure(directories: Sequence[Path], *, budget_s: float) -> Report:
    """Compare on every directory; the requirement is for memory file systems."""
    torch.set_num_threads(1)  # As SGLang's model runner does where there is a GPU.
    model = DeepSeekV4Model(compress_ratios=FLASH_COMPRESS_RATIOS, mtp_layers=1)
    pools = host_pools(model, page_tokens=PAGE_TOKENS, pages=PAGES, draft_tokens=2)
    pages = {name: HostPages(pools[name], PAGES) for name in pools.names if name != "kv"}
    for pool_pages in pages.values():
        pool_pages.fill()
    comparisons: list[Comparison] = []
    for parent in directories:
        storage = describe_filesystem(parent)
        progress(f"restore_v4: {storage}")
        directory = Path(tempfile.mkdtemp(dir=parent))
        backend = Backend(OURS, pools, directory, is_mla=True)
        ours, plain = BackendRestore(backend, pages), PlainRestore(directory, pages)
        times = run_pairs(ours, plain, [ALL_PAGES, AS_CONTROLLER], budget_s=budget_s)
        comparisons += [
            Comparison(
                labels={
                    "storage": storage,
                    "restore": phase,
                    "bytes": format_bytes(_moved_bytes(pages, phase)),
                },
                other=plain.name,
                moved_bytes=_moved_bytes(pages, phase),
                times=paired,
                required_speedup=1 / MOST_TIMES_PLAIN
                if storage in MEMORY_FILESYSTEMS and phase == ALL_PAGES
                else None,
            )
            for phase, paired in times.items()
        ]
        backend.close()
        plain.close()
        shutil.rmtree(directory, ignore_errors=True)
    return report_comparisons(
        comparisons,
        name="restore_v4",
        title="Restoring a DeepSeek V4 Flash prefix, against six plain files",
        method=METHOD,
        what="Restore",
        axes=("storage", "restore", "bytes"),
    )


class BackendRestore(LocalContestant):
    """Stores all pages once, then restores them again and again."""

    name = OURS

    def __init__(self, backend: Backend, pages: dict[str, HostPages]) -> None:
        self._backend = backend
        self._pages = pages
        self._keys = [f"{page:064x}" for page in range(PAGES)]
        verdicts = backend.set_sidecars([self._transfer(name, PAGES) for name in pages])
        expect(verdicts, {name: [True] * PAGES for name in pages}, "set")

    def prepare(self, phase: str, round_number: int) -> None:
        """Spoil the host pages."""
        del round_number
        _spoil(self._pages, phase)

    def run(self, phase: str, round_number: int) -> object:
        """Restore in the order of SGLang's controller: the anchor, what follows the KV, what trails."""
        del round_number
        anchor_indices = torch.arange(PAGES * PAGE_TOKENS)
        primary = self._backend.get_primary(self._keys, anchor_indices)
        following = [self._transfer(n, PAGES) for n in self._pages if n not in TRAILING_POOLS]
        trailing = [self._transfer(n, _page_count(n, phase)) for n in self._pages if n in TRAILING_POOLS]
        return primary, self._backend.get_sidecars(following) | self._backend.get_sidecars(trailing)

    def check(self, phase: str, round_number: int, result: object) -> None:
        """Check verdicts and bytes."""
        del round_number
        expected = (PAGES, {name: [True] * _page_count(name, phase) for name in self._pages})
        expect(result, expected, phase)
        _check(self._pages, phase)

    def _transfer(self, name: str, count: int) -> PoolTransfer:
        return transfer(name, self._keys[:count], self._pages[name].first_indices(count))


class PlainRestore(LocalContestant):
    """One plain file per pool, its pages one after the other."""

    name = "plain files"

    def __init__(self, directory: Path, pages: dict[str, HostPages]) -> None:
        self._pages = pages
        self._views = {
            name: [view for page in range(PAGES) for view in p.views(page)] for name, p in pages.items()
        }
        self._descriptors: dict[str, int] = {}
        for name, views in self._views.items():
            path = directory / f"plain-{name}"
            path.write_bytes(b"".join(views))
            self._descriptors[name] = os.open(path, os.O_RDONLY)

    def prepare(self, phase: str, round_number: int) -> None:
        """Spoil the host pages."""
        del round_number
        _spoil(self._pages, phase)

    def run(self, phase: str, round_number: int) -> object:
        """Read each file into its pool's pages."""
        del round_number
        return {
            name: os.preadv(self._descriptors[name], views[: _page_count(name, phase)], 0)
            for name, views in self._views.items()
        }

    def check(self, phase: str, round_number: int, result: object) -> None:
        """Check lengths and bytes."""
        del round_number
        expect(result, {n: p.page_bytes * _page_count(n, phase) for n, p in self._pages.items()}, phase)
        _check(self._pages, phase)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)


def _page_count(name: str, phase: str) -> int:
    return 1 if phase == AS_CONTROLLER and name in TRAILING_POOLS else PAGES


def _moved_bytes(pages: dict[str, HostPages], phase: str) -> int:
    return sum(pool_pages.page_bytes * _page_count(name, phase) for name, pool_pages in pages.items())


def _spoil(pages: dict[str, HostPages], phase: str) -> None:
    for name, pool_pages in pages.items():
        pool_pages.spoil(_page_count(name, phase))


def _check(pages: dict[str, HostPages], phase: str) -> None:
    for name, pool_pages in pages.items():
        pool_pages.check(_page_count(name, phase))
