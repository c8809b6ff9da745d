# SPDX-License-Identifier: MIT
"""Reading blocks after a restart, when the page cache is empty, and reading them from it."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.block_work import COLD, GET, SET, BlockWork
from benchmarks.machine import MEMORY_FILESYSTEMS, describe_filesystem
from benchmarks.native_store import NativeProcess
from benchmarks.pairs import Contestant, run_pairs
from benchmarks.reporting import report_comparisons
from benchmarks.results import (
    Comparison,
    Report,
    format_bytes,
    progress,
)
from benchmarks.store import EmbeddedWork
from ucm.testing import native_ucm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.pairs import PairedTimes

PAGE_BYTES = (524_288, 786_240, 1_000_001, 2_752_512, 6_589_440)
BATCH_BYTES = 64_000_000
SECTOR_BYTES = 512
BUFFERED_SPEEDUP, DIRECT_SPEEDUP, PLAIN_SPEEDUP = 3.0, 0.9, 1 / 1.25
METHOD = f"""\
`ours` is the embedded PosixStore with checksums on and `io_mode` auto. `{COLD}`: the files are dropped from
the page cache before each turn. `other` is then the native PosixStore of {native_ucm.wheel()} in a
process of its own, with `io_direct` off and on; with it on it fails for pages that are no multiple of
{SECTOR_BYTES} bytes, so there is no such line. `{GET}`: the data is in the page cache, and `other` reads
the same bytes from one plain file with `os.preadv`. `the disk's limit`, shown: that file read around the
page cache by one call into huge pages. Batches of about {BATCH_BYTES // 1_000_000} MB.
Required: {BUFFERED_SPEEDUP:g} times as fast as native buffered, {DIRECT_SPEEDUP:g} times
native direct, 1.25 times the plain file's time at most."""


def measure(
    directories: Sequence[Path], *, native: Path, page_sizes: Sequence[int], budget_s: float
) -> Report:
    """Compare on every directory that is on a disk, and warm reads on all."""
    comparisons: list[Comparison] = []
    for parent in directories:
        for page_bytes in page_sizes:
            comparisons += _compare(parent, native, page_bytes, budget_s)
    return report_comparisons(
        comparisons,
        name="cold",
        title="Cold and warm reads",
        method=METHOD,
        what="Reads",
        axes=("call", "page", "against"),
    )


class PlainFile(BlockWork):
    """One file, its pages one after the other, open all the time."""

    def __init__(self, directory: Path, page_bytes: int, count: int) -> None:
        super().__init__("plain file", directory, page_bytes, count)
        self._views = [view for page in range(count) for view in self.pages.views(page)]
        self._descriptor = os.open(directory / "plain", os.O_RDWR | os.O_CREAT)

    def set(self, keys: Sequence[bytes]) -> list[bool]:
        """Write the file."""
        return self._all(keys, os.pwritev)

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        """Read it."""
        return self._all(keys, os.preadv)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """There is one file only."""
        raise NotImplementedError

    def remove(self, keys: Sequence[bytes]) -> None:
        """The next round writes it again."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _all(
        self, keys: Sequence[bytes], move: Callable[[int, Sequence[memoryview], int], int]
    ) -> list[bool]:
        wanted = sum(view.nbytes for view in self._views)
        return [move(self._descriptor, self._views, 0) == wanted] * len(keys)


class DiskLimit(PlainFile):
    """The same file read around the page cache by one call: what the disk gives."""

    def __init__(self, directory: Path, page_bytes: int, count: int) -> None:
        super().__init__(directory, page_bytes, count)
        self.name = "one direct read"
        self._direct = os.open(directory / "plain", os.O_RDONLY | os.O_DIRECT)
        # A disk takes several times as long to fill scattered pages of memory.
        self._room = mmap.mmap(
            -1, page_bytes * count + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._room.madvise(mmap.MADV_HUGEPAGE)
        self._room[:] = bytes(len(self._room))

    def get(self, keys: Sequence[bytes]) -> list[bool]:
        """Read it into aligned memory."""
        wanted = len(keys) * self.pages.page_bytes
        whole = wanted + -wanted % mmap.PAGESIZE
        with memoryview(self._room) as room:
            return [os.preadv(self._direct, [room[:whole]], 0) == wanted] * len(keys)

    def check(self, phase: str, round_number: int, result: object) -> None:
        """Check the verdicts, and after a read the bytes, where the pages are."""
        if phase == COLD:
            with memoryview(self._room) as room:
                offset = 0
                for view in self._views:
                    view[:] = room[offset : offset + view.nbytes]
                    offset += view.nbytes
            self._room[:] = bytes(len(self._room))
        super().check(phase, round_number, result)

    def close(self) -> None:
        """Close the file and free the memory."""
        os.close(self._direct)
        self._room.close()
        super().close()


def _compare(parent: Path, native: Path, page_bytes: int, budget_s: float) -> list[Comparison]:
    storage = describe_filesystem(parent)
    count = max(4, BATCH_BYTES // page_bytes)
    progress(f"cold: {count} x {format_bytes(page_bytes)}, {storage}")

    def line(phase: str, against: str, other: str, times: PairedTimes, required: float | None) -> Comparison:
        labels = {"storage": storage, "page": f"{page_bytes:,}", "call": phase, "against": against}
        return Comparison(
            labels=labels,
            other=other,
            moved_bytes=page_bytes * count,
            times=times,
            required_speedup=required,
        )

    def compete(phase: str, make: Callable[[Path], Contestant]) -> PairedTimes:
        directory = Path(tempfile.mkdtemp(dir=parent))
        ours, other = directory / "ours", directory / "other"
        other.mkdir()
        with closing(EmbeddedWork(ours, page_bytes, count)) as work, closing(make(other)) as rival:  # type: ignore[type-var]  # Each has `close`.
            times = run_pairs(work, rival, [SET, phase], budget_s=budget_s)
        shutil.rmtree(directory, ignore_errors=True)
        return times[phase]

    plain = compete(GET, lambda directory: PlainFile(directory, page_bytes, count))
    lines = [line(GET, "one plain file", "plain file", plain, PLAIN_SPEEDUP)]
    if storage in MEMORY_FILESYSTEMS:
        return lines
    buffered = compete(COLD, lambda directory: NativeProcess(native, directory, page_bytes, count))
    lines.append(line(COLD, "io_direct off", NativeProcess.name, buffered, BUFFERED_SPEEDUP))
    limit = compete(COLD, lambda directory: DiskLimit(directory, page_bytes, count))
    lines.append(line(COLD, "the disk's limit", "one direct read", limit, None))
    if page_bytes % SECTOR_BYTES == 0:
        direct = compete(
            COLD, lambda directory: NativeProcess(native, directory, page_bytes, count, io_direct=True)
        )
        lines.append(line(COLD, "io_direct on", NativeProcess.name, direct, DIRECT_SPEEDUP))
    return lines
