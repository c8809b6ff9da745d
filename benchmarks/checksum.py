# SPDX-License-Identifier: MIT
"""What verifying a checksum on every load costs."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from benchmarks.block_work import drop_from_page_cache
from benchmarks.machine import MEMORY_FILESYSTEMS, describe_filesystem
from benchmarks.pages import PrivatePages
from benchmarks.pairs import LocalContestant, expect, run_pairs
from benchmarks.reporting import report_comparisons
from benchmarks.results import (
    Comparison,
    Report,
    format_bytes,
    progress,
)
from ucm.store import Block, BlockKey, BlockStatus, KVStore, StoreSpec
from ucm.store.factory import StoreConfig, open_store
from ucm.store.posix import file_io

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_BYTES = (16_384, 34_560, 65_536, 177_408, 262_144, 786_240, 1_048_576, 2_752_512, 4_194_304, 6_589_440)
PAGES = 32
LARGE_PAGE_BYTES = 500_000
MOST_SHARE = 0.1
METHOD = f"""\
`ours` loads {PAGES} blocks from the embedded store, `other` loads the same blocks with the payload
checksum left out (everything else stays, the footer's fields are compared). Times are processor time of
the whole process: the data is in the page cache, so that a load is nothing but copying, and other
programs do not count. `cold`: the blocks are dropped from the page cache before each load, as after a
restart; times are then those of the clock. 1 minus the speed-up is the share of a load that verification
takes. Required: below {MOST_SHARE:.0%} on pages of 0.5 MB and more."""


def measure(directories: Sequence[Path], *, page_sizes: Sequence[int], budget_s: float) -> Report:
    """Compare on every directory and page size."""
    comparisons = []
    for parent in directories:
        for page_bytes in page_sizes:
            comparisons.append(_compare(parent, page_bytes, Loading, UnverifiedLoading, "", budget_s))
            if page_bytes >= LARGE_PAGE_BYTES and describe_filesystem(parent) not in MEMORY_FILESYSTEMS:
                comparisons.append(
                    _compare(parent, page_bytes, ColdLoading, UnverifiedColdLoading, ", cold", budget_s)
                )
    return report_comparisons(
        comparisons,
        name="checksum",
        title="What verifying a checksum on every load costs",
        method=METHOD,
        what="Loads",
        axes=("storage", "page", "pages"),
    )


def _compare(
    parent: Path,
    page_bytes: int,
    verified: type[Loading],
    unverified: type[Loading],
    temperature: str,
    budget_s: float,
) -> Comparison:
    storage = describe_filesystem(parent) + temperature
    progress(f"checksum: {format_bytes(page_bytes)}, {storage}")
    directory = Path(tempfile.mkdtemp(dir=parent))
    spec = StoreSpec(namespace="checksum", segment_bytes=(page_bytes,), identity=bytes(16))
    store = open_store(spec, StoreConfig.from_mapping({"storage_backends": str(directory)}))
    pages = PrivatePages(page_bytes, PAGES)
    pages.fill()
    ours = verified(store, directory, pages, "verified")
    ours.dump()
    times = run_pairs(ours, unverified(store, directory, pages, "unverified"), ["load"], budget_s=budget_s)
    store.close()
    shutil.rmtree(directory, ignore_errors=True)
    return Comparison(
        labels={"storage": storage, "page": format_bytes(page_bytes), "pages": str(PAGES)},
        other="unverified",
        moved_bytes=page_bytes * PAGES,
        times=times["load"],
        required_speedup=1 - MOST_SHARE if page_bytes >= LARGE_PAGE_BYTES else None,
    )


class Loading(LocalContestant):
    """Loads the same blocks again and again; what counts is the processor time of all threads."""

    clock = staticmethod(time.process_time)

    def __init__(self, store: KVStore, directory: Path, pages: PrivatePages, name: str) -> None:
        self.name = name
        self._store = store
        self._directory = directory
        self._pages = pages
        self._blocks = [
            Block(BlockKey(page.to_bytes(16, "little")), pages.views(page)) for page in range(len(pages))
        ]

    def dump(self) -> None:
        """Store what is to be loaded."""
        expect(self._store.dump(self._blocks), [BlockStatus.DONE] * len(self._blocks), "dump")

    def prepare(self, phase: str, round_number: int) -> None:
        """Spoil the pages."""
        del phase, round_number
        self._pages.spoil(len(self._pages))

    def run(self, phase: str, round_number: int) -> object:
        """Load all blocks."""
        del phase, round_number
        return self._store.load(self._blocks)

    def check(self, phase: str, round_number: int, result: object) -> None:
        """Check verdicts and bytes."""
        del round_number
        expect(result, [BlockStatus.DONE] * len(self._blocks), phase)
        self._pages.check(len(self._pages))


class UnverifiedLoading(Loading):
    """Loads without looking at the payload's checksum."""

    def run(self, phase: str, round_number: int) -> object:
        """Load all blocks; `check_footer` takes None for "leave the payload unchecked"."""
        with mock.patch.object(file_io, "payload_checksum", _no_checksum):
            return super().run(phase, round_number)


class ColdLoading(Loading):
    """Loads what is not in the page cache; what counts is the time that passes."""

    clock = staticmethod(time.perf_counter)

    def prepare(self, phase: str, round_number: int) -> None:
        """Spoil the pages and empty the page cache."""
        super().prepare(phase, round_number)
        drop_from_page_cache(self._directory)


class UnverifiedColdLoading(ColdLoading, UnverifiedLoading):
    """Both."""


def _no_checksum(segments: object) -> None:
    del segments
