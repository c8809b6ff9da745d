# SPDX-License-Identifier: MIT
"""How much a running backup slows a prefetch."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import describe_filesystem
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

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of the prefetch, and of the backup beside it.
PAGE_BYTES = (
    (34_560, 34_560),
    (34_560, 2_752_512),
    (177_408, 786_240),
    (786_240, 786_240),
    (2_752_512, 34_560),
    (2_752_512, 2_752_512),
)
PAGES = 32
BACKUP_BYTES = 16_000_000  # Of one dump; more only takes more time to start and to end.
MOST_TIMES_ALONE = 1.5
METHOD = f"""\
A prefetch is what SGLang's prefetch thread does: a lookup of {PAGES} keys, then a load of these blocks. A
backup is what its backup thread does meanwhile: dumps of up to {PAGES} new blocks each, one after the other
without a pause, into another pool's store of the same process. `ours` is the prefetch beside the backup,
`other` the prefetch alone, when a backup has just ended: so both find the same in the processors' caches.
Data is in the page cache. Required: at most {MOST_TIMES_ALONE:g} times as long, a speed-up
of {1 / MOST_TIMES_ALONE:.2f}."""


def measure(directories: Sequence[Path], *, page_sizes: Sequence[tuple[int, int]], budget_s: float) -> Report:
    """Compare on every directory and pair of page sizes."""
    comparisons = []
    for parent in directories:
        storage = describe_filesystem(parent)
        for page_bytes, backup_bytes in page_sizes:
            labels = {
                "storage": storage,
                "page": format_bytes(page_bytes),
                "backup": format_bytes(backup_bytes),
            }
            progress(f"backup: {labels['page']} beside {labels['backup']}, {storage}")
            directory = Path(tempfile.mkdtemp(dir=parent))
            prefetched, backed_up = _open(directory, page_bytes), _open(directory, backup_bytes, "backup")
            pages, backup = PrivatePages(page_bytes, PAGES), Backup(backed_up, backup_bytes)
            alone = Prefetch(prefetched, pages, backup)
            beside = PrefetchBesideBackup(prefetched, pages, backup)
            times = run_pairs(beside, alone, ["prefetch"], budget_s=budget_s)
            comparisons.append(
                Comparison(
                    labels=labels,
                    other="alone",
                    moved_bytes=page_bytes * PAGES,
                    times=times["prefetch"],
                    required_speedup=1 / MOST_TIMES_ALONE,
                )
            )
            prefetched.close()
            backed_up.close()
            shutil.rmtree(directory, ignore_errors=True)
    return report_comparisons(
        comparisons,
        name="backup",
        title="How much a running backup slows a prefetch",
        method=METHOD,
        what="Prefetches",
        axes=("storage", "page", "backup"),
    )


class Prefetch(LocalContestant):
    """Looks up and loads the same blocks again and again, when a backup has just ended."""

    name = "alone"

    def __init__(self, store: KVStore, pages: PrivatePages, backup: Backup) -> None:
        self.pages = pages
        self.backup = backup
        self._store = store
        self._blocks = _blocks(pages, 0)
        pages.fill()
        store.delete([block.key for block in self._blocks])
        expect(store.dump(self._blocks), [BlockStatus.DONE] * PAGES, "dump")

    def prepare(self, phase: str, round_number: int) -> None:
        """Spoil the pages, and leave the processors' caches as a backup leaves them."""
        del phase, round_number
        self.pages.spoil(PAGES)
        self.backup.start()
        self.backup.stop()

    def run(self, phase: str, round_number: int) -> object:
        """Look all blocks up and load them."""
        del phase, round_number
        found = self._store.lookup([block.key for block in self._blocks])
        return found, self._store.load(self._blocks)

    def check(self, phase: str, round_number: int, result: object) -> None:
        """Check verdicts and bytes."""
        del round_number
        expect(result, ([True] * PAGES, [BlockStatus.DONE] * PAGES), phase)
        self.pages.check(PAGES)


class PrefetchBesideBackup(Prefetch):
    """The same while a backup runs."""

    name = "beside a backup"

    def prepare(self, phase: str, round_number: int) -> None:
        """Spoil the pages and wait until the backup is under way."""
        del phase, round_number
        self.pages.spoil(PAGES)
        self.backup.start()

    def check(self, phase: str, round_number: int, result: object) -> None:
        """End the backup, then check verdicts and bytes."""
        self.backup.stop()
        super().check(phase, round_number, result)


class Backup:
    """A thread that dumps new blocks until it is told to stop, and then removes them."""

    def __init__(self, store: KVStore, page_bytes: int) -> None:
        self._store = store
        self._pages = PrivatePages(page_bytes, min(PAGES, BACKUP_BYTES // page_bytes))
        self._pages.fill()
        self._first = 0
        self._stop = threading.Event()
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; returns after the first dump, in the midst of the second one."""
        self._stop.clear()
        self._begun.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._begun.wait()

    def stop(self) -> None:
        """End after the dump under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        written: list[BlockKey] = []
        while not self._stop.is_set():
            blocks = _blocks(self._pages, self._first)
            self._first += len(blocks)
            written += [block.key for block in blocks]
            self._store.dump(blocks)
            self._begun.set()
        self._store.delete(written)


def _open(directory: Path, page_bytes: int, name: str = "prefetch") -> KVStore:
    spec = StoreSpec(namespace=name, segment_bytes=(page_bytes,), identity=bytes(16))
    return open_store(spec, StoreConfig.from_mapping({"storage_backends": str(directory)}))


def _blocks(pages: PrivatePages, first: int) -> list[Block]:
    return [
        Block(BlockKey((first + page).to_bytes(16, "little")), pages.views(page))
        for page in range(len(pages))
    ]
